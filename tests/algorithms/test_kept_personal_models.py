# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A personal model survives the broadcasts of rounds without its client."""

import jax
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend.simulation.sampling import cohorts

on = problems.quadratics()
KEY = jax.random.key(11)
WORK = {"steps": 2, "batch_size": 2}
AVERAGED = fb.fedavg(on.loss, fb.Work(0.2, **WORK))
KEEPING = {
    "pfedme": fb.algorithms.pfedme(
        on.loss, fb.Work(0.3, **WORK), lam=1.0, inner_rate=0.3, inner_steps=3
    ),
    "ditto": fb.ditto(AVERAGED, on.loss, fb.Work(0.1, steps=3, batch_size=1), lam=0.5),
}


def new_run(algorithm):
    return fb.simulate(
        algorithm, on.params, on.federated_data, KEY, rounds=5, every=1, cohort=3
    )


@pytest.mark.parametrize("name", KEEPING)
def test_clients_deploy_the_model_of_their_last_round(name):
    members = cohorts(KEY, list(range(5)), 7, 3).tolist()
    run, models = new_run(KEEPING[name]), [np.asarray(on.params)] * 7
    absent = 0
    for record in run:
        cohort = members[record.round - 1] if record.round else []
        before, models = models, [np.asarray(run.personal(i)) for i in range(7)]
        for client in range(7):
            moved = not np.array_equal(models[client], before[client])
            assert moved == (client in cohort)
            np.testing.assert_array_equal(models[client], run.client(client).personal)
            if record.round and not np.array_equal(models[client], on.params):
                assert np.abs(models[client] - run.shared).max() > 1e-3
                absent += client not in cohort
    assert absent > 3
    if name == "ditto":
        shared = new_run(AVERAGED).complete().shared
        np.testing.assert_array_equal(run.shared, shared)
