# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Partitioners by their properties: who gets what, how often, and always the same."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedblend.data import partition as p
from fedblend.data.dataset import DataError
from fedblend.errors import UserError

LABELS = np.random.default_rng(0).integers(0, 10, 6000)

shapes = settings(deadline=None, max_examples=60, derandomize=True)


def flat(partition):
    return np.concatenate(partition.rows)


def assert_complete(partition, rows):
    """Each row exactly once, no client without rows."""
    np.testing.assert_array_equal(np.sort(flat(partition)), np.arange(rows))
    assert partition.counts.min() >= 1
    assert all(index.dtype == np.int64 for index in partition)


@st.composite
def labeled(draw, clients_at_most=12):
    """Labels (unbalanced, not from 0, with gaps), a number of clients, a seed."""
    classes = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, 25), min_size=classes, max_size=classes))
    labels = np.repeat(3 * np.arange(classes) - 2, sizes)
    seed = draw(st.integers(0, 99))
    np.random.default_rng(seed).shuffle(labels)
    clients = draw(st.integers(1, min(clients_at_most, len(labels))))
    return labels, clients, seed


@shapes
@given(st.integers(1, 200), st.data())
def test_even_pieces(rows, data):
    clients = data.draw(st.integers(1, rows))
    for partition in (p.iid(rows, clients, seed=3), p.contiguous(rows, clients)):
        assert_complete(partition, rows)
        assert np.ptp(partition.counts) <= 1
    expected = np.array_split(np.arange(rows), clients)
    for mine, theirs in zip(p.contiguous(rows, clients), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@shapes
@given(labeled(), st.data())
def test_classes_per_client(problem, data):
    labels, clients, seed = problem
    names, sizes = np.unique(labels, return_counts=True)
    classes = data.draw(st.integers(1, len(names)))
    if np.minimum(sizes, clients).sum() < clients * classes:
        with pytest.raises(DataError, match=r"the rows allow only \d+$"):
            p.classes_per_client(labels, clients, classes, seed)
        return
    partition = p.classes_per_client(labels, clients, classes, seed)
    held = [np.unique(labels[index]) for index in partition]
    assert [len(mine) for mine in held] == [classes] * clients
    used = np.unique(np.concatenate(held))
    assert len(used) == min(len(names), clients * classes)
    wanted = np.flatnonzero(np.isin(labels, used))
    np.testing.assert_array_equal(np.sort(flat(partition)), wanted)


def test_classes_are_chosen_at_random_and_evenly():
    partition = p.classes_per_client(LABELS, 200, 2, seed=1)
    pairs = [tuple(np.unique(LABELS[index])) for index in partition]
    assert len(set(pairs)) > 40  # of 45; fixed pairs would give 5
    counts = np.bincount(np.ravel(pairs))
    np.testing.assert_array_equal(counts, 40)


@shapes
@given(labeled(), st.sampled_from([1e-3, 0.1, 1.0, 100.0, 1e6]), st.integers(0, 5))
def test_dirichlet(problem, concentration, minimum):
    labels, clients, seed = problem
    minimum = min(minimum, len(labels) // clients)
    partition = p.dirichlet(labels, clients, concentration, seed, minimum)
    np.testing.assert_array_equal(np.sort(flat(partition)), np.arange(len(labels)))
    assert len(partition) == clients
    assert partition.counts.min() >= minimum


@pytest.mark.parametrize(("clients", "minimum"), [(6000, 1), (100, 60), (10, 100)])
def test_dirichlet_always_ends(clients, minimum):
    partition = p.dirichlet(LABELS, clients, 1e-3, minimum=minimum)
    assert_complete(partition, len(LABELS))
    assert partition.counts.min() >= minimum


def test_dirichlet_concentration_sets_the_skew():
    def largest_share(concentration):
        partition = p.dirichlet(LABELS, 20, concentration)
        tables = [np.bincount(LABELS[index], minlength=10) for index in partition]
        return np.mean([table.max() / table.sum() for table in tables])

    assert largest_share(0.01) > 0.8
    assert largest_share(1e4) < 0.15


def test_topping_up_takes_from_the_largest_only():
    labels = np.zeros(1000, int)
    free = p.dirichlet(labels, 50, 0.05, seed=2, minimum=0).counts
    full = p.dirichlet(labels, 50, 0.05, seed=2, minimum=3).counts
    givers = full < free
    assert givers.any()
    assert np.ptp(full[givers]) <= 1
    untouched = (free >= 3) & ~givers
    assert free[untouched].max(initial=0) <= full[givers].min() + 1
    np.testing.assert_array_equal(full[free < 3], 3)


@shapes
@given(labeled(), st.integers(1, 3))
def test_batches(problem, per_client):
    labels, clients, seed = problem
    if clients * per_client > len(labels):
        with pytest.raises(DataError, match="per_client"):
            p.shards(labels, clients, per_client, seed)
        return
    partition = p.shards(labels, clients, per_client, seed)
    assert_complete(partition, len(labels))
    assert np.ptp(partition.counts) <= per_client


def test_shards_hold_few_classes():
    balanced = np.repeat(np.arange(10), 600)
    partition = p.shards(balanced, 100, 2)
    assert max(len(np.unique(balanced[index])) for index in partition) == 2


def test_by_key():
    keys = np.array(["b", "a", "b", "c", "b", "a"])
    partition = p.by_key(keys, minimum=2)
    assert partition.names == ("a", "b")
    assert [index.tolist() for index in partition] == [[1, 5], [0, 2, 4]]
    assert partition.description == {"partition": "by_key", "minimum": 2, "dropped": 1}
    assert p.by_key(np.array([10, 9, 10])).names == ("9", "10")


@pytest.mark.parametrize(
    "build",
    [
        lambda seed: p.iid(6000, 30, seed),
        lambda seed: p.classes_per_client(LABELS, 30, 3, seed),
        lambda seed: p.dirichlet(LABELS, 30, 0.3, seed),
        lambda seed: p.shards(LABELS, 30, 2, seed),
    ],
)
def test_the_seed_decides(build):
    assert build(4).hash == build(4).hash
    assert build(4).hash != build(5).hash
    assert build(4).description["seed"] == 4


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: p.iid(5, 6), "clients: 6 with at least 1 rows each .* 5 rows"),
        (lambda: p.iid(5, 0), "iid: clients: 0 is not a whole number of at least 1"),
        (lambda: p.iid(5, 2, seed=-1), "seed: -1"),
        (lambda: p.contiguous(0, 1), "too many for 0 rows"),
        (lambda: p.classes_per_client(LABELS, 5, 11), r"11 .* 1\.\.10"),
        (lambda: p.dirichlet(LABELS, 10, 0.0), "concentration: 0.0"),
        (lambda: p.dirichlet(LABELS, 10, 1.0, minimum=601), "at least 601 rows"),
        (lambda: p.dirichlet(LABELS, 10, 1.0, minimum=-1), "minimum: -1"),
        (lambda: p.dirichlet(LABELS[:, None], 10, 1.0), "shape"),
        (lambda: p.dirichlet(LABELS / 2, 10, 1.0), "float64"),
        (lambda: p.shards(LABELS, 10, 0), "per_client"),
        (lambda: p.by_key(None), "no natural clients"),
        (lambda: p.by_key(np.array([1, 2]), minimum=2), "minimum: 2"),
    ],
)
def test_errors_are_one_clear_line(build, message):
    with pytest.raises((DataError, UserError), match=message) as error:
        build()
    assert "\n" not in str(error.value)


def test_a_hundred_thousand_clients():
    labels = np.random.default_rng(1).integers(0, 10, 300_000)
    start = time.perf_counter()
    for partition in (
        p.iid(len(labels), 100_000),
        p.classes_per_client(labels, 100_000, 2),
        p.dirichlet(labels, 100_000, 0.1, minimum=2),
        p.shards(labels, 100_000),
        p.by_key(np.arange(len(labels)) // 3),
    ):
        assert len(partition) == 100_000
    assert time.perf_counter() - start < 30  # 2 s on a quiet machine; n^2 takes hours
