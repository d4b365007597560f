# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Blocks that are begun before anybody asks for them change nothing that is seen."""

import jax
import numpy as np
import pytest

import fedblend as fb
from fedblend.simulation import devices, pipeline
from fedblend.simulation.pipeline import Begun

MODEL = fb.models.softmax(4, 3)
LOSS = fb.losses.cross_entropy(MODEL.apply)
WORK = fb.Work(0.1, steps=2, batch_size=3)


def start(algorithm=None, **settings):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((40, 4), np.float32), rng.integers(0, 3, 40, np.int32)
    chosen = {
        "rounds": 7,
        "every": 2,
        "cohort": 5,
        "measure": fb.metrics.standard("classes", LOSS, MODEL.apply),
    }
    return fb.simulate(
        algorithm or fb.fedavg(LOSS, WORK),
        MODEL.init,
        fb.federate(rows, np.split(np.arange(40), 8)),
        jax.random.key(1),
        **{**chosen, **settings},
    )


@pytest.fixture
def ahead(monkeypatch):
    """A CPU as if it were a device beside the host; the rounds that are begun ahead."""
    begun = []

    class Seen(Begun):
        def __new__(cls, *parts):
            begun.append(parts[1:3])
            return super().__new__(cls, *parts)

    monkeypatch.setattr(pipeline, "Begun", Seen)
    monkeypatch.setattr(devices, "has_accelerator", lambda: True)
    monkeypatch.setattr(pipeline, "AHEAD_SECONDS", 1e6)  # however busy this machine is
    return begun


def seen(run):
    """What a run shows after each block."""
    lines = []
    for record in run:
        shared = jax.tree.map(np.asarray, run.down.shared)
        spent = record.received, record.bits_up, record.bits_down
        lines.append((record.round, str(record.measures), spent, shared, run.records))
    return lines


def test_blocks_begun_ahead_show_the_same(ahead, monkeypatch):
    found = seen(start())
    assert ahead == [(2, 4), (4, 6), (6, 7)]
    assert all(record.seconds > 0 for record in found[-1][4])
    monkeypatch.setattr(devices, "has_accelerator", lambda: False)
    plain = seen(start())
    assert len(ahead) == 3
    assert [line[:3] for line in found] == [line[:3] for line in plain]
    for one, other in zip(found, plain, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one[3], other[3])


def test_states_are_not_given_up_ahead(ahead, monkeypatch):
    run = start(fb.scaffold(LOSS, WORK)).complete()
    assert not ahead
    monkeypatch.setattr(devices, "has_accelerator", lambda: False)
    plain = start(fb.scaffold(LOSS, WORK)).complete()
    both = [(one.shared, one.client_states()) for one in (run, plain)]
    jax.tree.map(np.testing.assert_array_equal, *both)


def test_long_blocks_are_not_begun_ahead(ahead, monkeypatch):
    monkeypatch.setattr(pipeline, "AHEAD_SECONDS", 0.0)
    start().complete()
    assert not ahead


def test_what_is_measured_client_by_client_is_not_begun_ahead(ahead):
    measure = {"size": fb.Metric(lambda params, batch: params.bias.sum(), True)}
    start(measure=measure).complete()
    assert not ahead


def restored(run):
    """The run, completed from another model than the one it had after a block."""
    records = iter(run)
    next(records)
    next(records)
    down, server = jax.tree.map(np.array, (run.down, run.server))
    moved = jax.tree.map(lambda leaf: leaf + 1, down.shared)
    snapshot = {**run.snapshot(), "server": (down._replace(shared=moved), server)}
    run.restore(snapshot, run.round, list(run.records))
    return run.complete().shared


def test_what_was_begun_from_another_model_is_not_used(ahead, monkeypatch):
    found = restored(start())
    assert ahead[:2] == [(2, 4), (4, 6)]
    monkeypatch.setattr(devices, "has_accelerator", lambda: False)
    jax.tree.map(np.testing.assert_array_equal, found, restored(start()))
