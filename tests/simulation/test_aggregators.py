# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What the server hears, against NumPy, with some ups masked."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedblend.simulation import aggregators

RNG = np.random.default_rng(0)
VALUES = RNG.standard_normal((9, 2, 3)).astype(np.float32)
MASKS = {
    "all": np.ones(9, bool),
    "even number": np.arange(9) < 8,
    "scattered": np.array([1, 0, 1, 1, 0, 1, 0, 1, 1], bool),
    "one": np.arange(9) == 4,
    "two": np.arange(9) > 6,
}
each_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
NEAR: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-7}
"""Float32 sums of nine numbers of size 1."""


@each_mask
def test_median(mask):
    spoiled = np.where(mask[:, None, None], VALUES, np.nan)
    found = aggregators.median(jnp.asarray(mask), jnp.asarray(spoiled))
    np.testing.assert_allclose(found, np.median(VALUES[mask], axis=0), **NEAR)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.4, 0.49])
@each_mask
def test_trimmed_mean(mask, fraction):
    spoiled = np.where(mask[:, None, None], VALUES, -np.inf)
    found = aggregators.trimmed(fraction)(jnp.asarray(mask), jnp.asarray(spoiled))
    ordered = np.sort(VALUES[mask], axis=0)
    cut = int(fraction * len(ordered))
    wanted = ordered[cut : len(ordered) - cut].mean(axis=0)
    np.testing.assert_allclose(found, wanted, **NEAR)


def ups(values):
    return {"a": jnp.asarray(values), "b": (jnp.asarray(values[:, 0, 0]),)}


@each_mask
def test_the_weighted_mean_is_the_same_by_chunks(mask):
    weights = np.arange(1, 10).astype(np.float32)
    running_sum = aggregators.empty(jax.tree.map(lambda leaf: leaf[0], ups(VALUES)))
    for chunk in np.split(np.arange(9), [3, 4]):
        running_sum, finite = aggregators.add_to(
            running_sum, ups(VALUES[chunk]), jnp.asarray(weights[chunk]), mask[chunk]
        )
        assert finite.all()
    aggregate = aggregators.finish(running_sum, 90.0)
    wanted = np.average(VALUES[mask], axis=0, weights=weights[mask])
    np.testing.assert_allclose(aggregate.mean["a"], wanted, **NEAR)
    np.testing.assert_allclose(aggregate.mean["b"][0], wanted[0, 0], **NEAR)
    assert float(aggregate.participation) == pytest.approx(weights[mask].sum() / 90)
    assert int(aggregate.count) == mask.sum()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_up_with_one_bad_entry_is_not_heard_at_all(value):
    spoiled = VALUES.copy()
    spoiled[2, 1, 1] = value
    running_sum = aggregators.empty(jax.tree.map(lambda leaf: leaf[0], ups(VALUES)))
    running_sum, finite = aggregators.add_to(
        running_sum, ups(spoiled), jnp.ones(9), jnp.ones(9, bool)
    )
    assert np.array_equal(finite, np.arange(9) != 2)
    aggregate = aggregators.finish(running_sum, 9.0)
    rest = np.delete(VALUES, 2, axis=0)
    np.testing.assert_allclose(aggregate.mean["a"], rest.mean(axis=0), **NEAR)
    assert float(aggregate.participation) == pytest.approx(8 / 9)


def test_nobody_heard_is_finite():
    running_sum = aggregators.empty(jax.tree.map(lambda leaf: leaf[0], ups(VALUES)))
    running_sum, _ = aggregators.add_to(
        running_sum, ups(VALUES), jnp.ones(9), jnp.zeros(9, bool)
    )
    aggregate = aggregators.finish(running_sum, 9.0)
    assert int(aggregate.count) == 0
    assert float(aggregate.participation) == 0
    assert not np.asarray(aggregate.mean["a"]).any()


def test_an_up_without_leaves_is_counted():
    running_sum, finite = aggregators.add_to(
        aggregators.empty(()), (), jnp.ones(4), jnp.array([1, 1, 0, 1], bool)
    )
    assert int(aggregators.finish(running_sum, 4.0).count) == 3
    assert finite.all()


def test_the_mean_of_half_precision_is_not_rounded_on_the_way():
    """A weight of 70000 is infinite in float16."""
    half = jnp.asarray([[1.0], [-1.0]], jnp.float16)
    running_sum = aggregators.empty(half[0])
    running_sum, _ = aggregators.add_to(
        running_sum, half, jnp.asarray([70000.0, 70000.0]), jnp.ones(2, bool)
    )
    mean = aggregators.finish(running_sum, 140000.0).mean
    assert mean.dtype == jnp.float16
    np.testing.assert_array_equal(mean, [0.0])


def test_whole_numbers_have_a_mean():
    counts = jnp.asarray([1, 2, 6], jnp.int32)
    running_sum = aggregators.empty(counts[0])
    running_sum, _ = aggregators.add_to(
        running_sum, counts, jnp.ones(3), jnp.ones(3, bool)
    )
    assert float(aggregators.finish(running_sum, 3.0).mean) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("name", "trim", "line"),
    [
        ("mode", 0.1, "reduction: 'mode' is not 'mean', 'median'"),
        ("trimmed_mean", 0.5, "trim: 0.5 is not in"),
        ("trimmed_mean", -0.1, "trim: -0.1 is not in"),
    ],
)
def test_an_unknown_reduction_is_refused_in_one_line(name, trim, line):
    with pytest.raises(ValueError, match=line):
        aggregators.reduction(name, trim)
