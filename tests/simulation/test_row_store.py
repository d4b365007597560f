# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Rows on the device, in memory or in files: the same numbers, fewer rows at once."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend.data.federated import FederatedData, Shards
from fedblend.simulation import cohort_loader
from fedblend.simulation.stores.row_store import HostRows, choose_rows

ROUNDS: dict[str, Any] = {"rounds": 5, "every": 3, "cohort": 4, "chunk": 3}


def outcome(federated_data, key=None, **settings):
    """Server, clients, personal models and measures of a short run of SCAFFOLD."""
    on = problems.classes()
    run = fb.simulate(
        fb.scaffold(on.loss, fb.Work(0.1, steps=3, batch_size=2)),
        on.params,
        federated_data,
        jax.random.key(0) if key is None else key,
        measure={"loss": fb.metrics.mean_loss(on.loss)},
        **ROUNDS | settings,
    ).complete()
    models = [run.personal(client) for client in (0, 4)]
    parts = (run.down, run.server, run.client_states(), models, run.measured)
    return jax.device_get(parts), run


def same_bits(left, right) -> None:
    """But for measures: rows of all clients at once are summed in another order."""
    *models, measured = left
    *others, also = right
    jax.tree.map(np.testing.assert_array_equal, models, others)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), measured, also)


@pytest.fixture(scope="module")
def data() -> FederatedData:
    """Some clients have no rows to test on."""
    return problems.classes().federated_data.holding_out(0.3)


def in_files(data: FederatedData, folder) -> FederatedData:
    """The same rows in memory-mapped files."""

    def mapped(name: str, split: Shards) -> Shards:
        leaves, structure = jax.tree.flatten(split.examples)
        for number, leaf in enumerate(leaves):
            np.save(folder / f"{name}{number}.npy", leaf)
        paths = [folder / f"{name}{number}.npy" for number in range(len(leaves))]
        files = [np.load(path, mmap_mode="r") for path in paths]
        return dataclasses.replace(split, examples=jax.tree.unflatten(structure, files))

    made = {name: mapped(name, split) for name, split in data.splits.items()}
    return dataclasses.replace(data, **made)


@pytest.fixture(scope="module")
def usual(data):
    return outcome(data, store=fb.Storage(rows="device"))[0]


@pytest.mark.slow
def test_rows_in_files_give_the_same_bits_in_parts_and_groups(
    data, usual, tmp_path, monkeypatch
):
    """Every round and every chunk of measured clients brings its own."""
    monkeypatch.setattr(cohort_loader, "PART_BYTES", 1)
    monkeypatch.setattr(cohort_loader, "AT_ONCE_BYTES", 1)
    found, run = outcome(in_files(data, tmp_path), store=fb.Storage("host", "host"))
    assert run._clients.rounds_at_once == 1
    same_bits(found, usual)


@pytest.mark.slow
def test_several_splits_side_by_side_give_the_same_bits(data):
    keys = jax.random.split(jax.random.key(3), 2)
    other = problems.classes().federated_data
    several = [data, other.holding_out(0.3)]
    here, there = (
        outcome(several, keys, store=fb.Storage(rows=kind))[0]
        for kind in ("device", "host")
    )
    same_bits(here, there)


def test_a_buffer_has_the_rows_of_its_clients_and_a_fixed_size(data):
    class Slices:
        """Shape, dtype and slicing are all that rows need."""

        shape, dtype = (18, 2), np.dtype(np.float64)
        read = 0

        def __getitem__(self, rows):
            Slices.read += rows.stop - rows.start
            return np.arange(36.0).reshape(self.shape)[rows]

    shards = Shards(Slices(), data.train.starts, np.array(problems.COUNTS))
    rows = HostRows({"train": shards})
    ids = np.array([[5, 2], [2, 0]])
    starts, counts = shards.starts[ids], shards.counts[ids]
    buffer, places = rows.load("train", starts, counts, 3)
    assert buffer.shape == (5 + 4 + 3, 2) and buffer.dtype == np.float32
    assert Slices.read == 2 + 4 + 3
    for start, place, count in zip(
        starts.ravel(), places.ravel(), counts.ravel(), strict=True
    ):
        wanted = np.arange(36.0).reshape(18, 2)[start : start + count]
        np.testing.assert_array_equal(buffer[place : place + count], wanted)


def test_rows_go_where_they_fit(data):
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(data.train.examples))
    assert choose_rows(data.splits, 10 * size) == "device"
    assert choose_rows(data.splits, size // 10) == "host"
    with pytest.raises(ValueError, match="rows: 'disk' is not 'auto', 'device'"):
        outcome(data, store=fb.Storage(rows="disk"))
