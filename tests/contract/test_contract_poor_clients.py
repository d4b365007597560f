# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Clients with fewer rows than a batch, one class, or nothing to validate on."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest

import fedblend as fb

COUNTS = (1, 3, 20, 20)
MODEL = fb.models.softmax(4, 3)
LOSS = fb.losses.cross_entropy(MODEL.apply)
WORK: Any = {"steps": 2, "batch_size": 8}
# Those that take rows apart, or several batches a step.
PERSONAL = {
    "apfl": lambda: fb.apfl(LOSS, fb.Work(0.1, **WORK), alpha=0.5, held_out=0.2),
    "perfedavg": lambda: fb.algorithms.perfedavg(
        LOSS, fb.Work(0.1, **WORK), inner_rate=0.1
    ),
    "mapper": lambda: fb.algorithms.mapper(LOSS, fb.Work(0.1, **WORK), grid=3),
}


@pytest.fixture(scope="module")
def federated_data():
    draws = np.random.default_rng(0)
    rows = (
        draws.normal(size=(sum(COUNTS), 4)).astype(np.float32),
        draws.integers(0, 3, sum(COUNTS)),
    )
    rows[1][:4] = 0  # the first two clients have one class
    edges = np.cumsum((0, *COUNTS))
    parts = [np.arange(*pair) for pair in itertools.pairwise(edges)]
    return fb.federate(rows, parts, validation=0.2)


def test_these_clients_are_poor(federated_data):
    assert federated_data.train.counts[0] < WORK["batch_size"]
    assert federated_data.validation.counts[0] == 0
    assert set(federated_data.train.rows(1)[1].tolist()) == {0}


@pytest.mark.parametrize("name", PERSONAL)
def test_poor_clients_get_finite_models(name, federated_data):
    run = fb.simulate(
        PERSONAL[name](),
        MODEL.init,
        federated_data,
        jax.random.key(0),
        rounds=2,
        every=2,
        measure={"loss": fb.metrics.mean_loss(LOSS)},
    ).complete()
    assert run.records[-1].rejected == 0
    for client in range(federated_data.clients):
        for leaf in jax.tree.leaves((run.personal(client), run.client(client))):
            if np.issubdtype(leaf.dtype, np.floating):
                assert np.isfinite(leaf).all()
    last = run.records[-1].measures
    for model in last["train"]:
        assert np.isfinite(last["train"][model]["loss"].mean)
        # The mean is over those that have rows; the others have no value at all.
        assert np.isfinite(last["validation"][model]["loss"].mean)
        values = run.measured[0]["validation"][model]["loss"]
        assert np.isnan(values[0])
        assert np.isfinite(values[2:]).all()
