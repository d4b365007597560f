# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Whatever bytes arrive, one kind of error says that they are wrong."""

import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from trials import apart, forged

from fedblend.simulation.serialize import WireError
from fedblend_federation import message as messages
from fedblend_federation.message import Message

HEAD = Message("round", "trial", 1, 4, base=3, fields={"asked": False})
MESSAGE = {"weight": np.ones((2, 3), np.float32), "bias": np.zeros(3, np.float32)}
GOOD = messages.encode(HEAD, MESSAGE)


def test_a_message_is_decoded_as_it_was_encoded():
    message = messages.decode(GOOD)
    assert message._replace(arrays={}) == HEAD
    np.testing.assert_array_equal(message.arrays["['weight']"], MESSAGE["weight"])


def _with(**head) -> bytes:
    header, metadata, body = apart(GOOD)
    return forged(header, {**metadata, **head}, body)


def _leaf(**entry) -> bytes:
    header, metadata, body = apart(GOOD)
    next(iter(header.values())).update(entry)
    return forged(header, metadata, body)


def _text(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


DEEP = "[" * 100_000 + "]" * 100_000
ODD: dict[str, bytes] = {
    "nothing": b"",
    "seven bytes": GOOD[:7],
    "a header of 40 GB": (40 << 30).to_bytes(8, "little") + GOOD[8:],
    "a header of 2 MB": ((2 << 20) + 8).to_bytes(8, "little") + bytes(3 << 20),
    "no JSON": _text("what"),
    "a list": _text("[]"),
    "deep JSON": _text(DEEP),
    "no metadata": _text("{}"),
    "metadata of a list": _text('{"__metadata__": []}'),
    "deep fields": _with(fields=DEEP),
    "fields of a list": _with(fields="[]"),
    "fields of no text": _with(fields={"a": 1}),
    "fields of a huge number": _with(fields='{"a": ' + "9" * 5000 + "}"),
    "a huge client": _with(client=str(10**30)),
    "a client of more digits": _with(client="1" * 5000),
    "a client in other digits": _with(client="٣"),
    "a client with a line": _with(client="1_0"),
    "a client with spaces": _with(client=" 1 "),
    "a number for text": _with(client=1),
    "an infinite number": _with(round=float("inf")),
    "a round below all": _with(round="-3"),
    "no kind": _with(kind="pickle"),
    "a kind of a list": _with(kind=["round"]),
    "a folder above": _with(experiment="../trial"),
    "an empty name": _with(experiment=""),
    "a long name": _with(experiment="a" * 65),
    "a name in other letters": _with(experiment="é"),
    "a name with a line": _with(experiment="trial\n"),
    "a name of a number": _with(experiment=3),
    "a foreign dtype": _leaf(dtype="O"),
    "a dtype of a list": _leaf(dtype=[]),
    "a shape of 40 GB": _leaf(shape=[100_000, 100_000]),
    "a negative shape": _leaf(shape=[-1, -6]),
    "a broken shape": _leaf(shape=[1.5, 4]),
    "a shape of text": _leaf(shape="23"),
    "many dimensions": _leaf(shape=[1] * 100 + [6]),
    "huge dimensions": _leaf(shape=[10**4000] * 200),
    "places that overlap": _leaf(data_offsets=[4, 28]),
    "places of one number": _leaf(data_offsets=[0]),
    "places beyond": _leaf(data_offsets=[0, 10**30]),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_bytes_are_no_message(name):
    with pytest.raises(WireError) as caught:
        messages.decode(ODD[name])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_what_stands_twice_counts_once():
    """The last of equal keys is read, and it is what the checksum covers."""
    text = GOOD[8 : 8 + int.from_bytes(GOOD[:8], "little")].decode()
    twice = text.replace('"kind":', '"kind": "describe", "kind":')
    body = GOOD[8 + len(text) :]
    data = len(twice).to_bytes(8, "little") + twice.encode() + body
    assert messages.decode(data)._replace(arrays={}) == HEAD


def test_many_leaves_are_read_or_refused_at_once():
    header = {
        f"{n:x}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
        for n in range(20_000)
    }
    _, metadata, _ = apart(GOOD)
    with pytest.raises(WireError, match="a header of more than"):
        messages.decode(forged(header, metadata, b""))
    few = dict(list(header.items())[:10_000])
    with pytest.raises(WireError, match="is missing"):
        messages.payload_of(messages.decode(forged(few, metadata, b"")), MESSAGE)


def test_text_of_other_machines_becomes_one_short_line():
    line = messages.one_line("a\r\n\x1b[31mb\u202e" + "é" * 1000)
    assert re.fullmatch(r"[ -~]{1,200}", line) and line.startswith("a ?[31mb?")


def test_sizes_are_checked_before_anything_is_allocated():
    program = textwrap.dedent("""
        import resource, sys
        from fedblend_federation import message as messages
        from fedblend.simulation.serialize import WireError
        resource.setrlimit(resource.RLIMIT_AS, (used := int(sys.argv[1]), used))
        for line in sys.stdin.buffer.read().split(b"!!!!"):
            try:
                messages.decode(line)
            except WireError:
                print("refused")
    """)
    odd = b"!!!!".join(ODD[n] for n in ("a header of 40 GB", "a shape of 40 GB"))
    limit = 4 << 30  # of addresses: JAX alone reserves more than two
    done = subprocess.run(
        [sys.executable, "-c", program, str(limit)], input=odd, capture_output=True
    )
    assert done.stdout.split() == [b"refused"] * 2, done.stderr
