# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A sweep side by side is the same as its runs one by one, to rounding."""

import jax
import jax.numpy as jnp
import pytest
from registry import CASES, RATE

import fedblend as fb
from fedblend.simulation import checkpoint
from runs import (
    CLIENTS,
    SETTINGS,
    close,
    differ,
    new_run,
    outcome,
    problem,
    same_bits,
    usual_run,
)

SWEEPS = {
    "fedavg": jnp.asarray([0.1, RATE], jnp.float32),
    "scaffold": jnp.asarray([0.1, RATE], jnp.float32),
    "fedprox": jnp.asarray([0.0, 0.5], jnp.float32),
}

BUILDERS = {
    "fedavg": lambda rate: fb.fedavg(
        problem().loss, fb.Work(rate, steps=3, batch_size=2)
    ),
    "scaffold": lambda rate: fb.scaffold(
        problem().loss, fb.Work(rate, steps=3, batch_size=2)
    ),
    "fedprox": lambda mu: fb.algorithms.fedprox(
        problem().loss, fb.Work(RATE, steps=3, batch_size=2), mu=mu
    ),
}


def simulate(algorithm, key, **settings):
    on = problem()
    return fb.simulate(
        algorithm, on.params, on.federated_data, key, **(SETTINGS | settings)
    )


def lane_of(run, replica: int):
    """What ``outcome`` gives for one replica."""
    whole = jax.device_get((run.down, run.server))
    states = [jax.device_get(run.client(client)) for client in range(CLIENTS)]
    models = [jax.device_get(run.personal(client)) for client in range(CLIENTS)]
    return jax.tree.map(lambda leaf: leaf[replica], (whole, states, models))


@pytest.mark.parametrize(("name", "values"), [*SWEEPS.items()], ids=SWEEPS)
def test_lanes_over_a_value_are_single_runs(name, values):
    """The last value of each sweep is that of the usual run."""
    swept = simulate(BUILDERS[name], jax.random.key(0), over=values).complete()
    close(lane_of(swept, 1), outcome(usual_run(name)))
    assert differ(lane_of(swept, 0), lane_of(swept, 1))
    assert swept.records[-1][1].bits_up == usual_run(name).records[-1].bits_up


@pytest.mark.parametrize(
    ("name", "store"),
    [("fedavg", "device"), *(("scaffold", s) for s in ("device", "host", "disk"))],
)
def test_lanes_over_keys_are_single_runs(name, store):
    """Every key draws its own cohorts, batches and states."""
    keys = jnp.stack([jax.random.key(0), jax.random.key(5)])
    swept = simulate(CASES[name](problem()), keys, store=store).complete()
    for replica, seed in enumerate([0, 5]):
        single = new_run(name, seed=seed)
        close(lane_of(swept, replica), outcome(single))
        assert swept.summary()[replica]["bits"] == single.summary()["bits"]


def test_lanes_over_values_and_keys_go_together():
    keys = jnp.stack([jax.random.key(0), jax.random.key(5)])
    rates = SWEEPS["scaffold"]
    swept = simulate(BUILDERS["scaffold"], keys, over=rates).complete()
    close(lane_of(swept, 1), outcome(new_run("scaffold", seed=5)))


def test_lanes_with_their_own_initial_parameters():
    keys = jnp.stack([jax.random.key(0), jax.random.key(5)])

    def init(key):
        noise = jax.random.normal(key, (3,))
        return problem().params._replace(bias=noise)

    on = problem()
    algorithm = CASES["fedavg"](on)
    swept = fb.simulate(algorithm, init, on.federated_data, keys, **SETTINGS).complete()
    single = fb.simulate(
        algorithm, init, on.federated_data, jax.random.key(5), **SETTINGS
    ).complete()
    close(jax.tree.map(lambda leaf: leaf[1], swept.shared), single.shared)


def test_lanes_stop_and_resume(tmp_path):
    run = simulate(BUILDERS["scaffold"], jax.random.key(0), over=SWEEPS["scaffold"])
    blocks = iter(run)
    next(blocks)
    next(blocks)
    checkpoint.save(tmp_path / "here", run)
    resumed = simulate(BUILDERS["scaffold"], jax.random.key(0), over=SWEEPS["scaffold"])
    checkpoint.restore(tmp_path / "here", resumed)
    run.complete()
    resumed.complete()
    for replica in (0, 1):
        same_bits(lane_of(run, replica), lane_of(resumed, replica))
    assert resumed.round == SETTINGS["rounds"]


def test_a_single_run_is_not_a_lane():
    assert usual_run("fedavg").replicas is None
