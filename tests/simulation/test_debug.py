# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Steps without compiling: by hand, and those of the simulation with the same key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.errors import CodeError, InputError

ROWS = np.arange(12, dtype=np.float32)
DATA = fb.federate(ROWS, np.split(np.arange(12), [3, 8]), names="abc")


def test_the_steps_of_two_clients_by_hand(capsys):
    def loss(params, rows):
        print("called with", params["x"])
        return (params["x"] - rows) ** 2 / 2

    work = fb.Work(0.25, steps=2, batch_size=None)
    start = {"x": jnp.array(20.0)}
    found = fb.debug(fb.fedavg(loss, work), start, DATA, 0, rounds=2, clients=[0, 2])
    expected, shared = [], 20.0
    for number in range(2):
        ends = []
        for name, rows in (("a", ROWS[:3]), ("c", ROWS[8:])):
            x = shared
            for step in range(2):
                value, slope = np.mean((x - rows) ** 2) / 2, x - rows.mean()
                norms = {"x": abs(slope)}, {"x": abs(0.25 * slope)}
                expected.append((number, name, step, [value], *norms))
                x -= 0.25 * slope
            ends.append(x)
        shared = np.average(ends, weights=[3, 4])
    assert len(found) == 8
    for step, wanted in zip(found, expected, strict=True):
        assert step[:3] == wanted[:3]
        assert step.losses == pytest.approx(wanted[3], rel=1e-4)
        assert step.gradients == pytest.approx(wanted[4], rel=1e-4)
        assert step.updates == pytest.approx(wanted[5], rel=1e-4)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 8 and "20.0" in said[0]  # a compiled loss is called once


def test_a_client_draws_what_it_draws_in_a_simulation():
    def draws(params, rows, key):
        return params * (rows + jax.random.uniform(key))

    work = fb.Work(1.0, fb.Epochs(1), batch_size=2)
    method = fb.local_only(draws, work)
    run = fb.simulate(method, jnp.zeros(()), DATA, jax.random.key(3), rounds=2)
    steps = fb.debug(method, jnp.zeros(()), DATA, 3, rounds=2, clients=[1])
    assert [step.step for step in steps] == [0, 1, 2, 0, 1, 2]
    moved = -sum(sum(step.gradients.values()) for step in steps)
    np.testing.assert_allclose(run.personal(1), moved, rtol=1e-5)


def test_wrong_clients_and_losses_are_refused_in_one_line():
    def loss(params, rows):
        return params @ rows

    method = fb.fedavg(loss, fb.Work(0.1, 1, None))
    with pytest.raises(InputError, match=r"^clients: \[3\] is not some numbers from 0"):
        fb.debug(method, jnp.zeros(()), DATA, 0, clients=[3])
    with pytest.raises(CodeError, match=r"test_debug\.py"):
        fb.debug(method, jnp.zeros(()), DATA, 0)


def test_a_run_warns_once_of_the_first_client_that_is_not_finite():
    def broken(params, rows):
        """Its slope is NaN from round 2 on, of the client "b" only."""
        bad = (rows.max() == 7) & (params < -0.9)
        return params * jnp.where(bad, jnp.nan, jnp.ones_like(rows))

    def warned(method, metric=None, **more):
        measure = metric and {"loss": metric}
        with pytest.warns(UserWarning, match="not finite") as caught:
            fb.simulate(
                method, jnp.zeros(()), DATA, 0, measure=measure, **more
            ).complete()
        assert len(caught) == 1 and caught[0].filename.endswith("run.py")
        return str(caught[0].message)

    work = fb.Work(0.5, steps=1, batch_size=None)
    said = warned(fb.fedavg(broken, work), rounds=9, every=4)
    assert said.startswith("fedavg: round 3: client 'b': its answer is not finite")
    assert said.endswith("clients=[1])")
    measured = fb.metrics.mean_loss(broken)
    said = warned(fb.local_only(broken, work), measured, rounds=4, every=1)
    assert said.startswith("local_only: round 2: client 'b': train loss of the ")
