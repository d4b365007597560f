# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Trees as bytes: what comes back, what is refused; models of many clients."""

import json
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.extra import numpy as arrays
from safetensors.numpy import load_file

from fedblend.mixing import Blend
from fedblend.simulation import serialize
from fedblend.simulation.serialize import (
    StackReader,
    WireError,
    build_tree,
    checksum,
    pack,
    stack_writer,
    unpack,
    write_atomically,
)


class Pair(NamedTuple):
    left: Any
    right: Any


TREE = Pair(
    {"weight": np.arange(6, dtype=np.float32).reshape(2, 3), "none": None},
    [
        np.float64(2.5),
        np.array(-3, np.int8),
        np.zeros((0, 4), np.float16),
        np.array([True, False]),
        jnp.asarray([1.5, -2.25, 3e38], jnp.bfloat16),
        np.array([2**63], np.uint64),
        (),
    ],
)


def same(left, right) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())


def test_a_tree_comes_back_as_it_was():
    read, words = unpack(pack(TREE, {"join": "world é"}))
    same(build_tree(read, TREE), TREE)
    assert words == {"join": "world é"}


def test_a_lone_array_and_nothing_at_all_come_back():
    for tree in (np.float32(3), (), None, {"a": None}):
        same(build_tree(unpack(pack(tree))[0], tree), tree)


def test_rows_out_of_order_and_big_endian_numbers_come_back():
    tree = [np.arange(6.0).reshape(2, 3).T, np.arange(3, dtype=">f4")]
    read, _ = unpack(pack(tree))
    for found, wanted in zip(read.values(), tree, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_the_library_safetensors_reads_what_is_packed():
    safetensors = pytest.importorskip("safetensors.numpy")
    tree = {"a": TREE.left["weight"], "b": np.float64(1), "c": np.zeros((0, 2), "i4")}
    read = safetensors.load(pack(tree))
    assert {name: (v.shape, str(v.dtype)) for name, v in read.items()} == {
        "['a']": ((2, 3), "float32"),
        "['b']": ((), "float64"),
        "['c']": ((0, 2), "int32"),
    }
    np.testing.assert_array_equal(read["['a']"], tree["a"])
    halves = {"h": jnp.asarray([1.5, -2], jnp.bfloat16)}
    ((name, entry),) = pytest.importorskip("safetensors").deserialize(pack(halves))
    assert (name, entry["dtype"], entry["shape"]) == ("['h']", "BF16", [2])
    assert bytes(entry["data"]) == np.asarray(halves["h"]).tobytes()


def test_what_cannot_be_sent_is_refused():
    with pytest.raises(WireError, match="complex64, which cannot be sent"):
        pack({"z": np.zeros(2, np.complex64)})


def forged(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(dtype: Any = "F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def sealed(leaves: dict, body: bytes = b"") -> bytes:
    """A forged header whose checksum is right, so that something else must notice."""
    words = {"sha256": checksum({}, leaves, [body])}
    return forged({"__metadata__": words, **leaves}, body)


def test_a_sealed_header_is_read():
    read, words = unpack(sealed({"a": entry()}, b"\0\0\x80?"))
    assert (read["a"].tolist(), words) == ([1.0], {})


MALICIOUS = {
    "nothing": b"",
    "short": b"1234567",
    "endless header": (2**63).to_bytes(8, "little") + b"{}",
    "no JSON": forged(b"\xff\xfe{"),
    "deep JSON": forged(b"[" * 100_000),
    "a list": forged([1, 2]),
    "a number": forged(3),
    "no metadata": forged({"a": entry()}, b"1234"),
    "no checksum": forged({"__metadata__": {}, "a": entry()}, b"1234"),
    "wrong checksum": forged({"__metadata__": {"sha256": "0"}, "a": entry()}, b"1234"),
    "metadata is text": forged({"__metadata__": "x"}),
    "unknown dtype": sealed({"a": entry("Q4")}, b"1234"),
    "dtype is a list": sealed({"a": entry(["F32"])}, b"1234"),
    "negative offset": sealed({"a": entry(offsets=(-4, 0))}, b"1234"),
    "offsets turned round": sealed({"a": entry(offsets=(4, 0))}, b"1234"),
    "beyond the end": sealed({"a": entry(shape=(9,), offsets=(0, 36))}, b"1234"),
    "overlap": sealed({"a": entry(), "b": entry(offsets=(2, 6))}, b"123456"),
    "gap": sealed({"a": entry(offsets=(4, 8))}, b"12345678"),
    "rest": sealed({"a": entry()}, b"12345678"),
    "negative shape": sealed({"a": entry(shape=(-1,))}, b"1234"),
    "two negatives": sealed({"a": entry(shape=(-1, -1))}, b"1234"),
    "huge shape": sealed({"a": entry(shape=(10**40,))}, b"1234"),
    "huge and zero": sealed({"a": entry(shape=(0, 10**40), offsets=(0, 0))}),
    "endless shape": sealed({"a": entry(shape=(float("inf"),))}, b"1234"),
    "shape is text": sealed({"a": entry(shape=("1",))}, b"1234"),
    "too small a shape": sealed({"a": entry(shape=(), offsets=(0, 8))}, b"12345678"),
    "fraction": sealed({"a": entry(shape=(1.0,))}, b"1234"),
    "fractional offset": sealed({"a": entry(offsets=(0.0, 4))}, b"1234"),
    "entry is a number": sealed({"a": 7}, b"1234"),
}


@pytest.mark.parametrize("name", MALICIOUS)
def test_a_forged_header_is_refused(name):
    with pytest.raises(WireError):
        unpack(MALICIOUS[name])


@hypothesis.given(st.binary(max_size=200))
def test_any_bytes_are_refused_without_another_error(data):
    with pytest.raises(WireError):
        unpack(data)


@hypothesis.given(st.binary(max_size=120))
def test_any_header_is_refused_without_another_error(text):
    with pytest.raises(WireError):
        unpack(forged(text))


PACKED = pack({"a": np.arange(3.0), "b": np.zeros((2, 1), np.int32)}, {"about": "it"})


@hypothesis.given(st.integers(0, len(PACKED) - 1), st.integers(1, 255))
def test_one_damaged_byte_is_noticed_or_does_no_harm(place, change):
    """Blanks after the header carry nothing."""
    data = bytearray(PACKED)
    data[place] ^= change
    try:
        read, words = unpack(bytes(data))
    except WireError:
        return
    wanted, about = unpack(PACKED)
    same(read, wanted)
    assert words == about


@hypothesis.given(
    st.lists(
        arrays.arrays(
            st.sampled_from(["f2", "f4", "f8", "i1", "u2", "i4", "u8", "?"]),
            arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        ),
        max_size=4,
    ),
    st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3),
)
def test_any_arrays_and_words_come_back(tree, words):
    words.pop("sha256", None)
    read, found = unpack(pack(tree, words))
    same(build_tree(read, tree), tree)
    assert found == words


def test_nothing_is_written_through_a_link(tmp_path):
    """A folder that somebody sends may have links where files are written."""
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "model.new").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError):
        write_atomically(tmp_path / "model", b"theirs")
    assert (tmp_path / "mine").read_bytes() == b"mine"


def model(client: int) -> Blend:
    values = np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * client
    half = jnp.asarray([client, 1.5], jnp.bfloat16)
    return Blend(np.float32(client / 7), (values, half), (-values, half))  # pyright: ignore


def stacked(*clients: int) -> Blend:
    models = [model(client) for client in clients]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *models)


@pytest.fixture
def stack(tmp_path):
    path = tmp_path / "personal.safetensors"
    with stack_writer(path, model(0), 3, {"round": "5"}) as write:
        write(stacked(0, 1))
        write(stacked(2))
    return path


def test_each_model_comes_back_to_the_bit(stack):
    reader = StackReader(stack)
    assert (reader.clients, reader.metadata) == (3, {"round": "5"})
    for client in (2, 0):
        found = reader.model(client)
        assert found[".alpha"] == np.float32(client / 7)
        assert (found[".shared[0]"] == model(client).shared[0]).all()
        assert (
            found[".personal[1]"].tobytes() == np.asarray(model(client)[1][1]).tobytes()
        )


def test_safetensors_reads_it(stack):
    found = load_file(stack)
    assert found[".personal[0]"].shape == (3, 2, 3)
    assert (found[".personal[0]"][2] == model(2).personal[0]).all()


def test_a_file_that_was_not_finished_is_not_there(tmp_path):
    path = tmp_path / "personal.safetensors"
    with (
        pytest.raises(KeyboardInterrupt),
        stack_writer(path, model(0), 3, {}) as write,
    ):
        write(stacked(0))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with (
        pytest.raises(ValueError, match="1 of 3 models are written"),
        stack_writer(path, model(0), 3, {}) as write,
    ):
        write(stacked(0))
    assert list(tmp_path.iterdir()) == []


def test_damage_is_one_line(stack, monkeypatch):
    whole = stack.read_bytes()
    for damaged, line in (
        (b"", "it is empty"),
        (whole[:-1], "header is damaged"),
        (whole[:-1] + b"x", "checksum does not match"),
        (whole[:40], "cut off after 40 bytes"),
    ):
        stack.write_bytes(damaged)
        with pytest.raises(WireError, match=line):
            StackReader(stack)
    monkeypatch.setattr(serialize, "CHECKED_BYTES", 10)
    stack.write_bytes(whole[:-1] + b"x")
    assert StackReader(stack).clients == 3, "the data of a large file is not read"
