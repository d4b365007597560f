# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning: another model is deployed, and nothing else changes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend import keys
from fedblend.losses import gradient

on = problems.quadratics()
WORK: dict[str, Any] = {"steps": 3, "batch_size": 2}
INNER = {
    "fedavg": fb.fedavg(on.loss, fb.Work(0.1, **WORK)),
    "scaffold": fb.scaffold(on.loss, fb.Work(0.1, **WORK)),
    "local only": fb.local_only(on.loss, fb.Work(0.1, **WORK)),
}
each_inner = pytest.mark.parametrize("name", INNER)


@each_inner
def test_training_is_the_wrapped_algorithms(name):
    tuned = fb.finetune(INNER[name], on.loss, fb.Work(0.2, **WORK))
    assert tuned._replace(personal=INNER[name].personal) == INNER[name]


@each_inner
def test_the_deployed_model_is_some_steps_from_the_wrapped_ones(name):
    """With a key of its own, so that the wrapped function may use the one given."""
    inner, key = INNER[name], jax.random.key(3)
    tuned = fb.finetune(inner, on.loss, fb.Work(0.2, **WORK))
    shard = jax.device_put(on.federated_data.train.shard(4))
    _, state = inner.enroll(on.params, shard, key)
    down = fb.Down(on.params, jnp.zeros((), jnp.int32))
    wanted, _ = fb.descend(
        gradient(on.loss),
        inner.personal(down, state, shard, key),
        shard,
        keys.named(key, "finetune"),
        work=fb.Work(optimizer=0.2, **WORK),
    )
    found = tuned.personal(down, state, shard, key)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_asking_for_a_model_twice_gives_the_same_one():
    tuned = fb.finetune(INNER["scaffold"], on.loss, fb.Work(0.2, **WORK))
    run = fb.simulate(
        tuned, on.params, on.federated_data, jax.random.key(0), rounds=2, cohort=3
    ).complete()
    before = run.client(1)
    np.testing.assert_array_equal(run.personal(1), run.personal(1))
    np.testing.assert_array_equal(run.client(1).control, before.control)
    assert not np.array_equal(run.personal(1), run.shared)
