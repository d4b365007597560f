# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Measuring one model of all clients over all rows, and client by client."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.batches import everything
from fedblend.core import Shard
from fedblend.simulation import evaluate

COUNTS = np.array([0, 5, 1, 9, 0, 3])
"""Rows of the clients; with gaps between them, as of clients that nobody measures."""
STARTS = np.array([0, 2, 7, 12, 21, 25])
MODEL = fb.models.logistic(3)
LOSS = fb.losses.logistic(MODEL.apply)
METRICS = {
    name: fb.metrics.build(name, "binary", LOSS, MODEL.apply)
    for name in ("loss", "accuracy", "auc", "calibration_gap")
}


def test_all_rows_at_once_give_what_clients_have_one_by_one(monkeypatch):
    # Several batches of rows, in several groups of clients.
    monkeypatch.setattr(evaluate, "CPU_ROWS", 4)
    monkeypatch.setattr(evaluate, "MEASURE_BYTES", 10 * 16)
    rng = np.random.default_rng(0)
    examples = (
        jnp.asarray(rng.standard_normal((30, 3), np.float32)),
        jnp.asarray(rng.integers(2, size=30)),
    )
    params = MODEL.init(jax.random.key(0))._replace(weight=jnp.ones((1, 3)))
    places = jnp.asarray(STARTS), jnp.asarray(COUNTS)

    @jax.jit
    def both(params):
        def one(start, count):
            rows = everything(Shard(examples, start, count, start, 10))
            return fb.metrics.evaluate(METRICS, params, rows)

        every = evaluate.evaluate_rows(METRICS, params, examples, places, COUNTS, 10)
        return every, jax.vmap(one)(*places)

    every, single = both(params)
    # Sums of other lengths may round otherwise.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), every, single)


@pytest.fixture
def run():
    rows = np.ones((12, 3), np.float32), np.arange(12) % 2
    return fb.simulate(
        fb.scaffold(LOSS, fb.Work(0.1, steps=1, batch_size=1)),
        MODEL.init,
        fb.federate(rows, fb.partition.contiguous(12, 3), test=0.5),
        jax.random.key(0),
        rounds=1,
        measure={"loss": METRICS["loss"]},
    )


def test_a_model_for_all_is_measured_without_what_clients_remember(run, monkeypatch):
    monkeypatch.setattr(run._clients, "states", None)
    assert run.complete().result.test.personal.loss.clients == 3


def test_metrics_that_know_no_rows_are_measured_client_by_client(run):
    evaluation = run._evaluation
    assert evaluation.goes_by_rows
    metric = dataclasses.replace(METRICS["auc"], with_rows=None)
    assert not dataclasses.replace(evaluation, metrics={"auc": metric}).goes_by_rows
