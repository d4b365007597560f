# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Agnostic APFL: its shared path is agnostic FL's, its personal models APFL's."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
import problems

on = problems.classes()
key = jax.random.key(0)
work: dict[str, Any] = {"steps": 3, "batch_size": 2}
climbing: dict[str, Any] = {"clients": 7, "q_rate": 0.3}


def run(algorithm, rounds=4):
    return fb.simulate(
        algorithm,
        on.params,
        on.federated_data,
        key,
        rounds=rounds,
        cohort=4,
        weights="uniform",
        every=rounds,
    ).complete()


def same_bits(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_the_shared_path_is_agnostics_and_with_alpha_one_the_personal_model_too():
    alpha = np.array([1.0, 0.5, 1.0, 0.0, 0.5, 0.2, 0.5])
    chosen: dict[str, Any] = {"alpha": alpha, "learn": "fixed", **climbing}
    done = run(fb.algorithms.apfl_agnostic(on.loss, fb.Work(0.2, **work), **chosen))
    agnostic = run(fb.algorithms.agnostic(on.loss, fb.Work(0.2, **work), **climbing))
    same_bits(done.shared, agnostic.shared)
    same_bits(done.down.extra["agnostic"], agnostic.down.extra["agnostic"])
    assert np.ptp(done.down.extra["agnostic"]) > 0.05
    for client in (0, 2):
        same_bits(done.personal(client), agnostic.personal(client))
    assert np.abs(done.personal(3).weight - done.shared.weight).max() > 1e-2
    sizes, others = done.message_bits, agnostic.message_bits
    assert (sizes.up, sizes.down) == (others.up, others.down)


def test_what_a_client_keeps_is_apfls_and_its_answer_is_weighed():
    chosen: dict[str, Any] = {"alpha": 0.5, "held_out": 0.4}
    shard = jax.device_put(on.federated_data.train.shard(4))
    told = fb.Down(
        on.params, jnp.zeros((), jnp.int32), extra={"agnostic": jnp.float32(0.25)}
    )

    def visit(algorithm):
        _, state = algorithm.enroll(on.params, shard, key)
        return jax.jit(algorithm.client)(told, state, shard, key)

    up, mine = visit(
        fb.algorithms.apfl_agnostic(on.loss, fb.Work(0.2, **work), **climbing, **chosen)
    )
    plain, theirs = visit(fb.apfl(on.loss, fb.Work(0.2, **work), **chosen))
    same_bits(mine, theirs)
    assert float(mine.alpha) != 0.5
    for ours, whole in zip(up[:2], plain[:2], strict=True):
        weighed = jax.tree.map(lambda leaf: 7 * 0.25 * leaf, whole)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), ours, weighed)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"alpha": 1.5}, "alpha: 1.5 is not in"),
        ({"clients": 0}, "clients: 0 is not a whole number"),
    ],
)
def test_bad_settings_are_refused_in_one_line(wrong, line):
    with pytest.raises(ValueError, match=line):
        settings: dict[str, Any] = {"alpha": 0.5, **climbing, **wrong}
        fb.algorithms.apfl_agnostic(on.loss, fb.Work(0.2, **work), **settings)
