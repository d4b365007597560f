# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A sweep side by side is the same as its runs one by one, to rounding."""

import jax
import jax.numpy as jnp
import pytest
from registry import CASES
from runs import CLIENTS, SETTINGS, close, outcome, problem, same_bits, usual_run

import fedblend as fb
from fedblend import checkpoint

RATES = jnp.asarray([0.1, 0.2], jnp.float32)

BUILDERS = {
    "fedavg": lambda rate: fb.fedavg(problem().loss, rate, steps=3, batch_size=2),
    "scaffold": lambda rate: fb.scaffold(problem().loss, rate, steps=3, batch_size=2),
    "fedprox": lambda mu: fb.fedprox(problem().loss, 0.2, mu=mu, steps=3, batch_size=2),
}
each_builder = pytest.mark.parametrize("name", BUILDERS)


def simulate(algorithm, key, **settings):
    on = problem()
    return fb.simulate(
        algorithm, on.params, on.federation, key, **(SETTINGS | settings)
    )


def lane_of(run, lane: int):
    """What ``outcome`` gives for one lane."""
    whole = jax.device_get((run.down, run.server))
    states = [jax.device_get(run.client(client)) for client in range(CLIENTS)]
    models = [jax.device_get(run.personal(client)) for client in range(CLIENTS)]
    return jax.tree.map(lambda leaf: leaf[lane], (whole, states, models))


@each_builder
def test_lanes_over_a_value_are_single_runs(name):
    swept = simulate(BUILDERS[name], jax.random.key(0), over=RATES).complete()
    for lane, rate in enumerate([0.1, 0.2]):
        single = simulate(BUILDERS[name](rate), jax.random.key(0))
        close(lane_of(swept, lane), outcome(single))
        assert swept.records[-1][lane].bits_up == single.records[-1].bits_up


@pytest.mark.parametrize("store", ["device", "host", "disk"])
@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_lanes_over_keys_are_single_runs(name, store):
    """Every key draws its own cohorts, batches and states."""
    keys = jnp.stack([jax.random.key(0), jax.random.key(5)])
    swept = simulate(CASES[name](problem()), keys, store=store).complete()
    for lane, seed in enumerate([0, 5]):
        single = simulate(CASES[name](problem()), jax.random.key(seed))
        close(lane_of(swept, lane), outcome(single))
        assert swept.summary()[lane]["bits"] == single.summary()["bits"]


def test_lanes_over_values_and_keys_go_together():
    keys = jnp.stack([jax.random.key(0), jax.random.key(5)])
    swept = simulate(BUILDERS["scaffold"], keys, over=RATES).complete()
    single = simulate(BUILDERS["scaffold"](0.2), jax.random.key(5))
    close(lane_of(swept, 1), outcome(single))


def test_lanes_with_their_own_initial_parameters():
    keys = jnp.stack([jax.random.key(0), jax.random.key(5)])

    def init(key):
        noise = jax.random.normal(key, (3,))
        return problem().params._replace(bias=noise)

    on = problem()
    algorithm = CASES["fedavg"](on)
    swept = fb.simulate(algorithm, init, on.federation, keys, **SETTINGS).complete()
    single = fb.simulate(
        algorithm, init, on.federation, jax.random.key(5), **SETTINGS
    ).complete()
    close(jax.tree.map(lambda leaf: leaf[1], swept.shared), single.shared)


def test_lanes_stop_and_resume(tmp_path):
    run = simulate(BUILDERS["scaffold"], jax.random.key(0), over=RATES)
    blocks = iter(run)
    next(blocks), next(blocks)
    checkpoint.save(tmp_path / "here", run)
    resumed = simulate(BUILDERS["scaffold"], jax.random.key(0), over=RATES)
    checkpoint.restore(tmp_path / "here", resumed)
    run.complete(), resumed.complete()
    for lane in (0, 1):
        same_bits(lane_of(run, lane), lane_of(resumed, lane))
    assert resumed.round == SETTINGS["rounds"]


def test_a_single_run_is_not_a_lane():
    assert usual_run("fedavg").lanes is None
