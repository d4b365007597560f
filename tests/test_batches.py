# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Several independent batches in one local step."""

import jax
import numpy as np
import pytest

import problems
from fedblend.batches import epoch_order, random_rows
from fedblend.keys import named
from fedblend.local import Epochs, Work, descend
from fedblend.losses import gradient

on = problems.quadratics()
KEY = jax.random.key(7)
CLIENT, RATE = 2, 0.1
SHARD = on.federated_data.train.shard(CLIENT)


def drawn_rows(key):
    return list(np.asarray(random_rows(SHARD, key, (4, 3))))


def epochs_rows(key):
    """Two epochs of four rows in batches of three: the second batch has one row."""
    orders = [epoch_order(SHARD, jax.random.fold_in(key, epoch)) for epoch in range(2)]
    return [np.asarray(o)[part] for o in orders for part in (slice(3), slice(3, 4))]


@pytest.mark.parametrize(
    ("steps", "rows_of"), [(4, drawn_rows), (Epochs(2), epochs_rows)]
)
def test_further_batches_are_drawn_for_their_purpose_and_leave_the_first(
    steps, rows_of
):
    matrices, vectors = on.federated_data.train.rows(CLIENT)

    def direction(here, first, second):
        return gradient(on.loss)(here, first) - 2 * gradient(on.loss)(here, second)

    reached, _ = descend(
        direction,
        on.params,
        SHARD,
        KEY,
        work=Work(optimizer=RATE, steps=steps, batch_size=3),
        further=("more",),
    )
    x = np.asarray(on.params, float)
    for batches in zip(rows_of(KEY), rows_of(named(KEY, "more")), strict=True):
        one, other = (
            matrices[picked].mean(axis=0) @ x - vectors[picked].mean(axis=0)
            for picked in batches
        )
        x = x - RATE * (one - 2 * other)
    np.testing.assert_allclose(reached, x, rtol=1e-5, atol=1e-6)
    assert np.abs(x - on.params).max() > 0.1
