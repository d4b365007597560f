# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Partial personalization: its limits, its presets, and where both orders end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend.core import static_bits
from fedblend.errors import UserError

KEY, RATE, SPLIT = jax.random.key(3), 0.2, 2
ORDERS = ("alternate", "together")
on = problems.quadratics()
PARAMS = {"body": on.params[:SPLIT], "head": on.params[SPLIT:]}
NOISY = fb.Work(RATE, steps=3, batch_size=2)
FULL = fb.Work(RATE, steps=3, batch_size=None)


def loss(params, rows):
    return on.loss(jnp.concatenate([params["body"], params["head"]]), rows)


def complete(algorithm, rounds=4, cohort=3):
    run = fb.simulate(
        algorithm,
        PARAMS,
        on.federated_data,
        KEY,
        rounds=rounds,
        cohort=cohort,
        weights="uniform",
        every=rounds,
    )
    return run.complete()


def same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("order", ORDERS)
def test_with_nothing_personal_it_is_fedavg_bit_for_bit(order):
    plain = complete(fb.fedavg(loss, NOISY))
    bare = complete(fb.partial(loss, NOISY, personal=lambda path: False, order=order))
    same(bare.shared, plain.shared)
    same(bare.personal(2), plain.shared)
    assert bare.message_bits == plain.message_bits


def test_with_everything_personal_it_is_training_alone_bit_for_bit():
    alone = complete(fb.local_only(loss, NOISY))
    run = complete(fb.partial(loss, NOISY, personal=["body", "head"], order=ORDERS[1]))
    for client in range(7):
        same(run.personal(client), alone.personal(client))
    assert not run.bits().up.any()
    same(run.shared, PARAMS)


@pytest.mark.slow
def test_fedrep_is_fedalt_with_the_head_and_fedper_is_fedsim():
    rep = complete(fb.algorithms.fedrep(loss, NOISY, head=["head"], head_steps=2))
    alt = complete(
        fb.algorithms.fedalt(loss, NOISY, personal=["head"], personal_steps=2)
    )
    per = complete(fb.algorithms.fedper(loss, NOISY, head=["head"]))
    sim = complete(
        fb.algorithms.fedsim(loss, NOISY, personal=["head"], personal_rate=RATE)
    )
    for one, other in ((rep, alt), (per, sim)):
        same(one.shared, other.shared)
        same(one.client_states(), other.client_states())
    assert not np.array_equal(rep.shared["body"], per.shared["body"])


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_both_orders_end_at_the_optimum_of_both_blocks(order):
    """One full step on u, so that there is no drift; the optimum is a linear solve.

    Unknown are u and seven v_i: the gradient in every v_i is zero, and so is the mean
    of the gradients in u.
    """
    matrices, vectors = problems.client_matrices(on)
    system, right = np.zeros((SPLIT + 7, SPLIT + 7)), np.zeros(SPLIT + 7)
    for i, (a, b) in enumerate(zip(matrices, vectors, strict=True)):
        places = [0, 1, SPLIT + i]
        system[np.ix_(places, places)] += a
        right[places] += b
    wanted = np.linalg.solve(system, right)
    work = FULL._replace(steps=1)
    algorithm = fb.partial(
        loss, work, personal=["head"], order=order, personal_rate=RATE * 1.5
    )
    run = complete(algorithm, rounds=300, cohort=7)
    found = [*run.shared["body"], *(run.personal(i)["head"][0] for i in range(7))]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tuned", ["model", "head"])
def test_the_head_of_fedbabu_moves_only_when_it_is_deployed(tuned):
    babu = fb.algorithms.fedbabu(
        loss, FULL, head=["head"], tuning_steps=1, tuning_rate=0.1, tuned=tuned
    )
    run = complete(babu)
    frozen = complete(
        fb.fedavg(lambda x, rows: loss({**x, "head": PARAMS["head"]}, rows), FULL)
    )
    np.testing.assert_allclose(run.shared["body"], frozen.shared["body"], rtol=1e-6)
    states = run.client_states().personal
    same(states["head"], np.broadcast_to(PARAMS["head"], (7, 1)))
    same(run.shared["head"], PARAMS["head"])
    matrices, vectors = problems.client_matrices(on)
    before = np.concatenate([run.shared["body"], run.shared["head"]])
    for client, (matrix, vector) in enumerate(zip(matrices, vectors, strict=True)):
        step = 0.1 * (matrix @ before - vector)
        step[:SPLIT] *= tuned == "model"
        model = run.personal(client)
        after = np.concatenate([model["body"], model["head"]])
        np.testing.assert_allclose(after, before - step, rtol=1e-5, atol=1e-6)


def test_a_new_client_trains_its_part_under_the_shared_one():
    """Together too: single steps, between which the shared part is what was sent."""
    down = fb.Down(PARAMS, jnp.zeros((), jnp.int32))
    algorithm = fb.algorithms.fedper(loss, FULL._replace(steps=1), head=["head"])
    found = fb.personalize(algorithm, down, on.federated_data, KEY, visits=3).models
    matrices, vectors = problems.client_matrices(on)
    for client, (matrix, vector) in enumerate(zip(matrices, vectors, strict=True)):
        model = np.array(on.params, np.float64)
        for _ in range(3):
            model[SPLIT:] -= RATE * (matrix @ model - vector)[SPLIT:]
        np.testing.assert_allclose(found["head"][client], model[SPLIT:], rtol=1e-5)
    same(found["body"], np.broadcast_to(PARAMS["body"], (7, SPLIT)))


NETWORK = fb.models.mlp(4, 3, hidden=(5,), norm=True)
SIZES = {"hidden/0/weight": 20, "hidden/0/bias": 5, "norm/0/scale": 5}
SIZES |= {"norm/0/offset": 5, "last/weight": 15, "last/bias": 3}
PRESETS = {
    "fedper": ("head", {}, {"last/weight", "last/bias"}),
    "fedrep": ("head", {"head_steps": 2}, {"last/weight", "last/bias"}),
    "fedbabu": ("head", {"tuning_steps": 2}, {"last/weight", "last/bias"}),
    "lg_fedavg": ("body", {}, set(SIZES) - {"last/weight", "last/bias"}),
    "fedbn": ("normalization", {}, {"norm/0/scale", "norm/0/offset"}),
    "bitfit": ("biases", {}, {"hidden/0/bias", "norm/0/offset", "last/bias"}),
}


@pytest.mark.parametrize("name", PRESETS)
def test_what_stays_and_what_travels(name):
    """Of every preset, by shapes alone: only the rest is counted, in both ways."""
    key, more, stays = PRESETS[name]
    rows = jnp.ones((3, 4))
    part = {key: fb.models.find_part(NETWORK, rows, key)}
    of_network = fb.losses.cross_entropy(NETWORK.apply)
    algorithm = getattr(fb.algorithms, name)(of_network, NOISY, **part, **more)
    shard = fb.federate((np.ones((3, 4)), np.zeros(3, int)), [np.arange(3)])

    def round_of_one():
        own = shard.train.shard(0)
        params = NETWORK.init(KEY)
        down = fb.Down(params, jnp.zeros((), jnp.int32))
        _, state = algorithm.enroll(params, own, KEY)
        told = algorithm.wire.tell(down, ())
        up, after = algorithm.client(told, state, own, KEY)
        return told.shared, up.delta, state, after

    told, delta, state, after = jax.eval_shape(round_of_one)
    rest = sum(SIZES.values()) - sum(SIZES[path] for path in stays)
    assert static_bits(told) == static_bits(delta) == 32 * rest
    found = jax.tree_util.tree_leaves_with_path(state.personal)
    assert stays == {
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found
    }
    assert jax.tree.structure(state) == jax.tree.structure(after)


def test_steps_of_its_own_make_no_sense_together():
    line = r'^partial: personal_steps: 2 is not left out, as order = "together" needs$'
    with pytest.raises(UserError, match=line):
        fb.partial(loss, FULL, personal=["head"], order="together", personal_steps=2)


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        (fb.partial(loss, FULL, personal=["head", "tail"]), "partial: personal"),
        (fb.algorithms.fedper(loss, FULL, head=["tail"]), "fedper: head"),
        (fb.algorithms.fedala(loss, FULL, head=("hea", "tail")), "fedala: head"),
    ],
)
def test_a_part_that_no_model_has_is_refused(algorithm, key):
    line = rf"^{key}: '(tail|hea)' is not a part of a model with body, head\b"
    with pytest.raises(UserError, match=line):
        complete(algorithm, rounds=1)
