# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Stores: states by client id, and files that survive a crash at any moment."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedblend.simulation.stores.client_store import choose, choose_kind, open_store
from fedblend.simulation.stores.disk_store import DiskStore, StoreError

CLIENTS = 9


class State(NamedTuple):
    own: Any
    count: Any
    half: Any


TEMPLATE = State(
    jax.ShapeDtypeStruct((2, 3), np.dtype(np.float32)),
    jax.ShapeDtypeStruct((), np.dtype(np.int32)),
    jax.ShapeDtypeStruct((4,), np.dtype(jnp.bfloat16)),
)


def rows(ids, salt=0):
    """A different state for every client and every salt."""
    ids = np.asarray(ids)
    seeds = [np.random.default_rng((int(i), salt)) for i in ids]
    return jax.tree.map(
        lambda leaf: np.stack(
            [
                np.asarray(9 * s.normal(size=leaf.shape)).astype(leaf.dtype)
                for s in seeds
            ]
        ),
        TEMPLATE,
    )


def same(left, right) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(
            np.asarray(a, float), np.asarray(b, float)
        ),
        left,
        right,
    )


def advance(store, ids, salt) -> None:
    """One block: load the states of these clients, and save others."""
    ids = np.asarray(ids)
    store.reserve(ids)
    states, slots = store.buffer, store.slots(ids)
    members, first = np.unique(ids, return_index=True)
    slots = jnp.asarray(slots.ravel()[first])

    def put(all, values):
        return all.at[slots].set(values)

    store.save(ids, jax.tree.map(put, states, rows(members, salt)))


@pytest.fixture(params=["device", "host", "disk"])
def store(request, tmp_path):
    opened = open_store(request.param, TEMPLATE, CLIENTS, 4, tmp_path)
    opened.write(np.arange(CLIENTS), rows(range(CLIENTS)))
    return opened


def test_states_are_found_by_client_id(store):
    same(store.gather(np.array([7, 0, 7])), rows([7, 0, 7]))
    assert store.known.all()


def test_a_block_changes_its_clients_and_no_others(store):
    advance(store, [[5, 2], [2, 8]], salt=1)
    same(store.gather(np.array([2, 5, 8])), rows([2, 5, 8], 1))
    same(store.gather(np.array([0, 1, 3, 4, 6, 7])), rows([0, 1, 3, 4, 6, 7]))
    advance(store, [[2, 0]], salt=2)
    same(
        store.gather(np.array([0, 2, 5])),
        jax.tree.map(
            lambda a, b: np.concatenate([a, b]), rows([0, 2], 2), rows([5], 1)
        ),
    )


def test_a_block_finds_each_state_at_its_slot(store):
    ids = np.array([[5, 2], [2, 8]])
    store.reserve(ids)
    states, slots = store.buffer, store.slots(ids)
    for id_, slot in zip(ids.ravel(), np.asarray(slots).ravel(), strict=True):
        same(
            jax.tree.map(lambda leaf, s=slot: leaf[s], states),
            jax.tree.map(lambda leaf: leaf[0], rows([id_])),
        )


def test_a_snapshot_takes_a_store_back(store):
    advance(store, [[1, 2]], salt=1)
    kept = jax.tree.map(np.array, store.snapshot())
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), kept)
    wanted = store.template(len(kept.get("ids", ())))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), wanted) == shapes
    store.restore(kept)
    same(
        store.gather(np.array([1, 2, 3])),
        jax.tree.map(lambda a, b: np.concatenate([a, b]), rows([1, 2], 1), rows([3])),
    )


def disk(folder):
    return DiskStore(TEMPLATE, CLIENTS, 4, folder)


@pytest.fixture
def stopped(tmp_path):
    """A store after a block, and the snapshot that a checkpoint would hold."""
    first = disk(tmp_path)
    first.write(np.arange(CLIENTS), rows(range(CLIENTS)))
    advance(first, [[1, 2]], salt=1)
    advance(first, [[2, 3]], salt=2)
    return first, jax.tree.map(np.array, first.snapshot())


def check_second_block(store):
    same(store.gather(np.array([1])), rows([1], 1))
    same(store.gather(np.array([2, 3])), rows([2, 3], 2))
    same(store.gather(np.array([0, 8])), rows([0, 8]))


def test_files_behind_the_checkpoint_catch_up(stopped, tmp_path):
    """Killed right after saving: the last rows are in the checkpoint only."""
    again = disk(tmp_path)
    same(again.gather(np.array([3])), rows([3]))
    again.restore(stopped[1])
    check_second_block(again)


def test_files_that_were_being_written_are_written_again(stopped, tmp_path):
    """Killed in the next block: its load had begun to write the pending rows."""
    first, kept = stopped
    advance(first, [[5, 6]], salt=3)
    first.snapshot()  # waits for what is being written
    again = disk(tmp_path)
    again.states.own[2] = np.nan
    again.restore(kept)
    check_second_block(again)
    same(again.gather(np.array([5, 6])), rows([5, 6]))


def test_what_is_prepared_leaves_no_trace(stopped, tmp_path):
    """Killed in a block while the next one's rows were on their way."""
    first, kept = stopped
    first.stage(np.array([[4, 6]]))
    ids = np.array([[4, 6], [2, 0]])
    first.reserve(ids)
    first.save(ids, jax.tree.map(jnp.zeros_like, first.buffer))
    first.stage(np.array([[0, 1], [7, 8]]))
    first.wait()
    again = disk(tmp_path)
    again.restore(kept)
    check_second_block(again)
    same(again.gather(np.array([4, 6, 7])), rows([4, 6, 7]))


def test_a_client_that_leaves_and_comes_back_is_the_same(store):
    """The buffer has room for four; whoever left is brought, staged or late."""
    everyone = np.arange(CLIENTS)
    for salt, ids in enumerate(([0, 1, 2, 3], [4, 5, 6, 7], [0, 4, 8, 1]), start=1):
        store.stage(np.array([ids]))
        advance(store, [ids], salt)
        store.stage(np.array([[2, 7]]))  # somebody else may come in the end
    newest = [(0, 3), (1, 3), (2, 1), (3, 1), (4, 3), (5, 2), (6, 2), (7, 2), (8, 3)]
    wanted = [rows([client], salt) for client, salt in newest]
    same(
        store.gather(everyone),
        jax.tree.map(lambda *parts: np.concatenate(parts), *wanted),
    )


def test_one_may_go_on_and_resume_again(stopped, tmp_path):
    again = disk(tmp_path)
    again.restore(stopped[1])
    again.restore(stopped[1])
    advance(again, [[7]], salt=4)
    third = disk(tmp_path)
    third.restore(jax.tree.map(np.array, again.snapshot()))
    check_second_block(third)
    same(third.gather(np.array([7])), rows([7], 4))


def test_files_ahead_of_the_checkpoint_are_refused(stopped, tmp_path):
    first, kept = stopped
    advance(first, [[5, 6]], salt=3)
    advance(first, [[7]], salt=4)
    first.snapshot()
    with pytest.raises(StoreError, match="states of another moment"):
        disk(tmp_path).restore(kept)


def test_files_of_another_run_are_refused(stopped, tmp_path):
    disk(tmp_path).write(np.array([0]), rows([0], 5))
    with pytest.raises(StoreError, match="states of another run"):
        disk(tmp_path).restore(stopped[1])


def test_missing_files_are_refused(stopped, tmp_path):
    with pytest.raises(StoreError, match="lacks the clients' states"):
        disk(tmp_path / "elsewhere").restore(stopped[1])
    DiskStore(TEMPLATE, CLIENTS + 1, 4, tmp_path)  # makes the files anew
    with pytest.raises(StoreError):
        disk(tmp_path).restore(stopped[1])


def test_a_temporary_store_leaves_nothing_and_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        temporary = DiskStore(TEMPLATE, CLIENTS, 4, None)
        temporary.write(np.array([1]), rows([1]))
        folder = temporary.folder
        assert folder.exists()
        del temporary
        assert not folder.exists()


GB = 10**9


@pytest.mark.parametrize(
    ("clients", "device", "host", "kind"),
    [
        (1_000, 100 * GB, 120 * GB, "device"),
        (20_000, 100 * GB, 120 * GB, "host"),
        (20_000, 100 * GB, 50 * GB, "disk"),
        (1_000, None, 20 * GB, "device"),
        (20_000, None, 120 * GB, "disk"),
    ],
)
def test_the_free_memory_says_which_store(clients, device, host, kind):
    model = jax.ShapeDtypeStruct((1_626_442,), np.dtype(np.float32))
    assert choose(model, clients, device, host) == kind
    assert choose((), 10**9, device, host) == "device"


def test_an_unknown_store_is_refused_in_one_line():
    with pytest.raises(ValueError, match="store: 'cloud' is not 'auto', 'device'"):
        choose_kind("cloud", TEMPLATE, 3)
