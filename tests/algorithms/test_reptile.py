# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Reptile: trains as FedAvg does at a server rate of 1, deploys after inner steps."""

from typing import Any

import jax
import numpy as np
import optax

import fedblend as fb
import problems

on = problems.quadratics()
WORK: dict[str, Any] = {"steps": 3, "batch_size": 2}


def run(algorithm):
    return fb.simulate(
        algorithm, on.params, on.federated_data, jax.random.key(1), rounds=4, cohort=4
    ).complete()


def test_a_server_rate_of_one_is_fedavg_with_finetuning():
    averaged = fb.fedavg(on.loss, fb.Work(0.1, **WORK))
    wanted = run(fb.finetune(averaged, on.loss, fb.Work(0.1, **WORK)))
    found = run(fb.algorithms.reptile(on.loss, fb.Work(0.1, **WORK), 1.0))
    # The same sums up to x - (x - y) for y, in float32 on parameters of size 1.
    np.testing.assert_allclose(found.shared, wanted.shared, rtol=1e-5, atol=1e-6)
    for client in range(7):
        np.testing.assert_allclose(
            found.personal(client), wanted.personal(client), rtol=1e-5, atol=1e-6
        )
    assert not np.allclose(found.personal(0), found.shared)


def test_a_server_rate_goes_part_of_the_way():
    step = []
    for rate in (1.0, 0.25):
        algorithm = fb.algorithms.reptile(on.loss, fb.Work(0.1, **WORK), rate)
        first = fb.simulate(
            algorithm, on.params, on.federated_data, jax.random.key(1), rounds=1
        ).complete()
        step.append(first.shared - on.params)
    np.testing.assert_allclose(step[1], step[0] / 4, rtol=1e-4, atol=1e-6)


def test_the_server_takes_any_optimizer():
    done = run(fb.algorithms.reptile(on.loss, fb.Work(0.1, **WORK), optax.adam(0.05)))
    assert int(done.server.optimizer[0].count) == 4
