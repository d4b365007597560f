# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Bundles: messages come out as they went in, and nothing else does."""

import json

import numpy as np
import pytest

from fedblend.simulation.serialize import WireError
from fedblend_federation.message import (
    MAGIC,
    MAX_HEADER_BYTES,
    Message,
    decode,
    encode,
    is_bundle,
    pack_bundle,
    unpack_bundle,
)


def request(client: int, value: float) -> bytes:
    arrays = {"w": np.full(1000, value, np.float32)}
    return encode(Message("round", "trial", client, 3, base=2), arrays)


def test_messages_come_out_as_they_went_in():
    messages = [(7, request(7, 1.0)), (2, request(2, 2.0)), (5, b""), (6, b"short")]
    data = pack_bundle(messages)
    assert is_bundle(data) and not is_bundle(messages[0][1])
    assert list(unpack_bundle(data)) == messages


def test_equal_arrays_travel_once():
    same = pack_bundle((client, request(client, 1.0)) for client in range(50))
    other = pack_bundle((client, request(client, client)) for client in range(50))
    assert len(other) - len(same) >= 49 * 4000
    assert len(same) < 4000 + 50 * 700  # heads: JSON, a checksum


def test_no_message_is_a_bundle():
    assert int.from_bytes(MAGIC, "little") > MAX_HEADER_BYTES
    with pytest.raises(WireError, match="a header of more than"):
        decode(pack_bundle([(0, request(0, 1.0))]))


def test_a_damaged_bundle_is_one_line():
    data = pack_bundle([(1, request(1, 1.0)), (2, request(2, 2.0))])
    rng = np.random.default_rng(0)
    for cut in (8, 11, 12, 40, len(data) - 1):
        with pytest.raises(WireError, match="a bundle"):
            unpack_bundle(data[:cut])
    with pytest.raises(WireError, match="a bundle of"):
        unpack_bundle(data + b"x")
    for _ in range(500):  # what is not refused is some messages, within the bytes
        spoiled = bytearray(data)
        spoiled[rng.integers(8, 150)] = rng.integers(256)
        try:
            found = list(unpack_bundle(bytes(spoiled)))
        except WireError:
            continue
        assert len(found) == 2


@pytest.mark.parametrize(
    "header",
    [
        {},
        [],
        {"bodies": [], "entries": [[0, 0, 0]]},
        {"bodies": [0], "entries": [[0, 0, 0], [0, 0, 0]]},
        {"bodies": [-1], "entries": []},
        {"bodies": [1.0], "entries": []},
        {"bodies": [True], "entries": []},
        {"bodies": [0], "entries": [[0, 0]]},
        {"bodies": [0], "entries": [[0, 0, 1]]},
        {"bodies": [10**30], "entries": [[0, 0, 0]]},
    ],
)
def test_a_header_that_lies_is_one_line(header):
    text = json.dumps(header).encode()
    with pytest.raises(WireError, match="a bundle with a damaged header"):
        unpack_bundle(MAGIC + len(text).to_bytes(4, "little") + text)
