# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A run that stands still says so; one that is slow does not."""

import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend.simulation import watchdog

SECONDS = 0.2


def rest():
    """Use no CPU time."""
    time.sleep(2 * SECONDS)


def compute():
    """Use CPU time."""
    end = time.perf_counter() + 2 * SECONDS
    while time.perf_counter() < end:
        pass


def test_only_a_run_that_waits_and_computes_nothing_warns(monkeypatch):
    """Not in round 1, which is slow, nor while its user rests after round 0."""
    monkeypatch.setattr(watchdog, "SECONDS", SECONDS)
    works = iter([compute, rest])

    def on_host(value):
        next(works)()
        return np.zeros_like(value)

    def loss(params, rows):
        still = jax.lax.stop_gradient(params)
        waited = jax.pure_callback(on_host, still, still)
        return 0.5 * jnp.square(rows - params[None] - waited[None]).sum(axis=1)

    data = fb.federate(np.ones((2, 3), np.float32), [np.arange(2)])
    method = fb.fedavg(loss, fb.Work(0.1, steps=1, batch_size=None))
    start, key = jnp.zeros(3), jax.random.key(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for record in fb.simulate(method, start, data, key, rounds=2, every=1):
            if record.round == 0:
                rest()
    (line,) = [str(one.message) for one in caught]
    assert line.startswith("fedavg: no progress for 0.2 s after round 1, and no CPU")
    assert "\n" not in line
