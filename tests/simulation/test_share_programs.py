# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Runs with other keys and swept values use the programs of an earlier one."""

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb


def test_a_run_with_the_programs_of_another_is_the_same_run():
    federated_data, _ = fb.datasets.quadratics(clients=3, dim=2)

    def algorithm(rate):
        return fb.fedavg(fb.datasets.quadratic_loss, fb.Work(rate, 1, None))

    def run(seed: int, rate: float) -> fb.Run:
        return fb.simulate(
            algorithm,
            jnp.zeros(2),
            federated_data,
            jax.random.split(jax.random.key(seed), 2),
            rounds=2,
            every=2,
            over=jnp.full(2, rate),
        )

    first, alone, after = run(0, 0.1), run(1, 0.3), run(1, 0.3)
    first.complete()
    after.share_programs(first)
    np.testing.assert_array_equal(after.complete().shared, alone.complete().shared)
    assert not np.array_equal(after.shared, first.shared)
    assert alone.compile_seconds > 0 == after.compile_seconds
