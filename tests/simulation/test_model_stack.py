# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models of many clients in one file: whole or absent, read one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from fedblend.mixing import Blend
from fedblend.simulation.io import serialize
from fedblend.simulation.io.serialize import StackReader, StackWriter, WireError


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
    with StackWriter(path, model(0), 3, {"round": "5"}) as writer:
        writer.add(stacked(0, 1))
        writer.add(stacked(2))
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
        StackWriter(path, model(0), 3, {}) as writer,
    ):
        writer.add(stacked(0))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with (
        pytest.raises(ValueError, match="1 of 3 models are written"),
        StackWriter(path, model(0), 3, {}) as writer,
    ):
        writer.add(stacked(0))
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
