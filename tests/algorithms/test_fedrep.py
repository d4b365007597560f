# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FedRep: what travels, what stays, and what may go around it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend import compress
from fedblend.simulation.sampling import cohorts

KEY, RATE, SPLIT = jax.random.key(3), 0.2, 2
on = problems.quadratics()
PARAMS = {"body": on.params[:SPLIT], "head": on.params[SPLIT:]}
NOISY: dict[str, Any] = {"steps": 3, "batch_size": 2}
FULL: dict[str, Any] = {"steps": 3, "batch_size": None}


def loss(params, rows):
    return on.loss(jnp.concatenate([params["body"], params["head"]]), rows)


def fedrep(head=lambda path: path == "head", loss=loss, head_steps=2, **work):
    return fb.algorithms.fedrep(
        loss, fb.Work(RATE, **work), head=head, head_steps=head_steps
    )


def new_run(algorithm, params: Any = PARAMS, rounds=4, cohort=3, **settings):
    return fb.simulate(
        algorithm,
        params,
        on.federated_data,
        KEY,
        rounds=rounds,
        cohort=cohort,
        weights="uniform",
        **settings,
    )


def same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.fixture(scope="module")
def everybody():
    return new_run(fedrep(**FULL), cohort=7).complete()


@pytest.mark.slow
def test_without_a_body_it_is_training_alone():
    run = new_run(fedrep(lambda path: True, head_steps=3, **FULL)).complete()
    alone = new_run(fb.local_only(loss, fb.Work(RATE, **FULL))).complete()
    for client in range(7):
        same(run.personal(client), alone.personal(client))
    same(run.shared, PARAMS)
    assert not run.bits().up.any()


def test_a_head_survives_rounds_without_its_client():
    """Outside the cohort it stays, and is deployed under the newest body."""
    run, absent = new_run(fedrep(**FULL), every=1), 0
    heads, appearances = [PARAMS["head"]] * 7, np.zeros(7, int)
    for record in run:
        number = record.round - 1
        cohort = cohorts(KEY, [number], 7, 3)[0].tolist() if record.round else []
        appearances[cohort] += 1
        for client in range(7):
            model = run.personal(client)
            moved = not np.array_equal(model["head"], heads[client])
            assert moved == (client in cohort)
            same(model["head"], run.client(client).personal["head"])
            same(model["body"], run.shared["body"])
            absent += client not in cohort and bool((model["head"] != 0.5).all())
            heads[client] = model["head"]
    assert absent > 3
    only_the_body_is_counted(run, appearances)


def only_the_body_is_counted(run, appearances):
    model, body = 32 * 3, 32 * SPLIT
    np.testing.assert_array_equal(run.bits().up, appearances * body)
    joining = model * (appearances > 0)
    np.testing.assert_array_equal(run.bits().down, appearances * body + joining)
    assert run.shapes.message.shared["head"] is None
    same(run.shared["head"], PARAMS["head"])


def test_with_an_estimate_of_the_body_and_nothing_lost_it_is_the_same(everybody):
    """EF21 with the identity, everyone taking part."""
    wrapped = fb.transforms.ef21(fedrep(**FULL), compress.identity())
    run = new_run(wrapped, cohort=7).complete()
    for key in PARAMS:
        found, wanted = (it.personal(4)[key] for it in (run, everybody))
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(run.bits().up, everybody.bits().up)


def test_diana_with_noise_keeps_the_mean_of_all_memories():
    """Its rate follows from what is said, two entries, on both sides."""
    algorithm = fb.transforms.diana(fedrep(**FULL), compress.rand_k(1))
    run = new_run(algorithm).complete()
    memories = [run.client(i).memory for i in range(7)]
    mean = np.mean([memory["body"] for memory in memories], axis=0)
    assert np.abs(mean).max() > 1e-3
    np.testing.assert_allclose(run.server.memory["body"], mean, rtol=1e-5, atol=1e-7)
    assert not run.server.memory["head"].any()


def test_a_nudge_is_a_linear_term_for_the_body():
    push = {"body": jnp.asarray([0.3, -0.2], jnp.float32), "head": jnp.ones(1)}
    shard = jax.device_put(on.federated_data.train.shard(4))
    down = fb.Down(PARAMS, jnp.zeros((), jnp.int32))
    algorithm = fedrep(**FULL)
    _, state = algorithm.enroll(PARAMS, shard, KEY)
    told = algorithm.wire.tell(down._replace(correction=push), ())
    assert told.correction is not None
    assert told.correction["head"] is None
    nudged: Any = algorithm.client(told, state, shard, KEY)
    tilted: Any = fedrep(
        loss=lambda x, rows: loss(x, rows) + x["body"] @ push["body"], **FULL
    ).client(down, state, shard, KEY)
    np.testing.assert_allclose(
        nudged[0].delta["body"], tilted[0].delta["body"], rtol=1e-5
    )
    same(nudged[1], tilted[1])
