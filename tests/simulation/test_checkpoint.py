# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that cannot be used are refused in one line; a good one is never lost."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend.errors import CheckpointError
from fedblend.simulation.checkpoint import read_about, restore, save
from fedblend.simulation.serialize import pack, unpack, write_atomically

on = problems.quadratics()


def new_run(method=fb.scaffold, params=on.params, key=0, **settings):
    algorithm = method(on.loss, fb.Work(0.1, steps=1, batch_size=None))
    chosen: dict[str, Any] = {"rounds": 4, "cohort": 3, "every": 2, "chunk": 3}
    chosen |= settings
    return fb.simulate(
        algorithm, params, on.federated_data, jax.random.key(key), **chosen
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    run = new_run()
    blocks = iter(run)
    next(blocks)
    next(blocks)
    save(path, run, {"config": "x = 1"})
    return path


OTHERS: dict[str, dict[str, Any]] = {
    "was made with cohort 3, this run has 4": {"cohort": 4},
    "was made with every 2, this run has 1": {"every": 1},
    "was made with chunk 3, this run has 2": {"chunk": 2},
    "was made with key": {"key": 1},
    "was made with weight 18.0, this run has 7.0": {"weights": "uniform"},
    "was made with dropout 0.0, this run has 0.1": {
        "cohort": fb.Cohort(3, dropout=0.1)
    },
    "was made with store device, this run has host": {"store": "host"},
    "is not expected: another model": {"method": fb.fedavg},
    "is float32.3., expected bfloat16.3.": {"params": jnp.zeros(3, jnp.bfloat16)},
}


@pytest.mark.parametrize("line", OTHERS)
def test_a_checkpoint_of_another_run_is_refused(line, saved):
    with pytest.raises(CheckpointError, match=line) as error:
        restore(saved, new_run(**OTHERS[line]))
    assert "\n" not in str(error.value)
    assert str(saved) in str(error.value)


def test_a_refused_checkpoint_leaves_the_run_as_it_was(saved):
    run = new_run(method=fb.fedavg)
    with pytest.raises(CheckpointError):
        restore(saved, run)
    plain = new_run(method=fb.fedavg).complete()
    np.testing.assert_array_equal(run.complete().shared, plain.shared)


def test_a_missing_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        read_about(tmp_path / "none")


@pytest.mark.parametrize("version", ["999", "2"])
def test_a_checkpoint_of_another_version_is_refused(version, tmp_path):
    path = tmp_path / "other"
    path.write_bytes(pack((), {"fedblend": version}))
    with pytest.raises(CheckpointError, match=f"is of version {version}, and this"):
        read_about(path)


def test_a_foreign_file_is_refused(tmp_path):
    path = tmp_path / "foreign"
    path.write_bytes(pack({"weights": np.ones(3)}, {"by": "someone else"}))
    with pytest.raises(CheckpointError, match="not a fedblend checkpoint"):
        read_about(path)


@hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(st.data())
def test_a_damaged_checkpoint_is_refused(saved, tmp_path, data):
    whole = saved.read_bytes()
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(whole) - 1))
        damaged[place] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(whole)))
    path = tmp_path / "damaged"
    path.write_bytes(bytes(damaged) if data.draw(st.booleans()) else whole[:cut])
    try:
        about = read_about(path)
    except CheckpointError:
        return
    assert about == {"config": "x = 1"}
    arrays, _ = unpack(path.read_bytes())
    wanted, _ = unpack(whole)
    assert all(np.array_equal(arrays[name], wanted[name]) for name in wanted)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_disk_store_without_its_files_is_refused(tmp_path):
    run = new_run(store="disk")
    next(iter(run))
    save(tmp_path / "checkpoint", run)
    with pytest.raises(CheckpointError, match="lacks the clients' states"):
        restore(tmp_path / "checkpoint", new_run(store="disk"))
