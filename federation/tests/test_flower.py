# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Our messages inside of Flower's."""

import pytest

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedblend_federation.flower.records import SMALL, make_record, pause_in, read_record


@pytest.mark.parametrize("size", [1, SMALL, SMALL + 1])
def test_a_message_comes_out_as_it_went_in(size):
    message = bytes(range(256)) * (size // 256 + 1)
    record = make_record(message[:size])
    assert read_record(record) == message[:size]
    assert bool(record.array_records) == (size > SMALL)


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"other": ConfigRecord({"message": b"x"})},
        {"fedblend": ConfigRecord({"message": "x"})},
        {"fedblend": ConfigRecord({"other": b"x"})},
        {"fedblend": MetricRecord({"message": 1})},
    ],
)
def test_what_is_no_message_of_ours_is_empty(content):
    assert read_record(RecordDict(content)) == b""


@pytest.mark.parametrize(
    "pause, found", [(0.5, 0.5), (None, None), (float("inf"), None), (-1.0, None)]
)
def test_the_server_tells_nodes_how_long_to_pause(pause, found):
    assert pause_in(make_record(b"x", pause)) == found
    assert read_record(make_record(b"x", pause)) == b"x"
