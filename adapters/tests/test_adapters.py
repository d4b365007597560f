# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Limit cases of methods on adapters: two programs that must agree.

Where both sides do the same sums in float32, in another order, for a few rounds of
steps on numbers of size 1, 1e-5 is some hundred times the rounding of one step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend import mixing, trees
from fedblend.errors import UserError
from fedblend_adapters.uses import uses_of

KEY = jax.random.key(4)
CLIENTS, ROWS, RANK = 4, 6, 2
PATH = "hidden/0/weight"
PLAIN = fb.models.mlp(5, 3, hidden=(6,))
WORK = fb.Work(0.3, steps=3, batch_size=None)


def rows(seed=0, clients=CLIENTS):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(clients * ROWS, 5)).astype(np.float32)
    return inputs, rng.integers(0, 3, clients * ROWS)


def parts(clients=CLIENTS):
    return np.split(np.arange(clients * ROWS), clients)


MODEL = fb.adapt.adapt(PLAIN, how=fb.adapt.lora(RANK), inputs=rows()[0])
LOSS = fb.losses.cross_entropy(MODEL.apply)
DATA = fb.federate(rows(), parts())
ONE = fb.federate(rows(clients=1), parts(1))
COPIES = tuple(np.concatenate([leaf] * CLIENTS) for leaf in rows(clients=1))
SAME = fb.federate(COPIES, parts())
INPUTS = rows(seed=1)[0]
SLOW = pytest.mark.slow
OTHERS_LATER = [0.3, *(pytest.param(alpha, marks=SLOW) for alpha in (0.0, 1.0))]
"""Weights of the shared model; the ends of their range are for the slow tests."""
LATER = [pytest.param(name, marks=SLOW) for name in ("fedavg", "ffa_lora")]


def moved(params, seed=2):
    """Parameters whose B is not zero."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: leaf + jnp.asarray(0.3 * rng.normal(size=leaf.shape), leaf.dtype),
        params,
    )


PARAMS = moved(MODEL.init(jax.random.key(1)))


def run(algorithm, data=DATA, params=PARAMS, rounds=3, **settings):
    settings = {"weights": "uniform", "every": max(rounds, 1)} | settings
    given = (algorithm, params, data, KEY)
    return fb.simulate(*given, rounds=rounds, **settings).complete()


def fedavg(loss=LOSS):
    return fb.fedavg(loss, WORK)


def flix(alpha, most=20):
    local = fb.solvers.gradient_descent(LOSS, 2.0, most=most)
    return fb.flix(LOSS, fedavg, alpha=alpha, local=local, mix=mixing.products)


def apfl(alpha):
    return fb.apfl(LOSS, WORK, alpha=alpha, learn="fixed", mix=mixing.products)


def close(left, right, atol=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), left, right
    )


def outputs(adapter):
    return MODEL.apply(adapter, INPUTS)


def product(adapter, path=PATH):
    return np.asarray(adapter[path]["b"] @ adapter[path]["a"])


@SLOW
def test_flix_with_alpha_1_is_the_wrapped_method_from_the_mean_of_local_adapters():
    start = run(flix(1.0), rounds=0).shared
    done = run(flix(1.0))
    close(done.shared, run(fedavg(), params=start).shared)
    for client in range(CLIENTS):
        close(outputs(done.personal(client)), outputs(done.shared))


@pytest.mark.slow
def test_flix_with_alpha_0_deploys_the_local_adapters_and_moves_nothing():
    done = run(flix(0.0))
    close(done.shared, PARAMS, atol=0)
    states = done.client_states().personal
    for client in range(CLIENTS):
        own = trees.take(states, client)
        close(outputs(done.personal(client)), outputs(own))
    assert np.abs(product(own) - product(PARAMS)).max() > 0.01


@SLOW
@pytest.mark.parametrize("build", [flix, apfl], ids=["flix", "apfl"])
def test_equal_clients_are_like_one(build):
    many, one = run(build(0.4), SAME), run(build(0.4), ONE)
    close(many.shared, one.shared)
    for client in range(CLIENTS):
        close(many.personal(client), one.personal(0))


@pytest.mark.parametrize("alpha", OTHERS_LATER)
def test_flix_of_one_client_starts_at_its_local_model_whatever_alpha(alpha):
    """Both models are the same there, and so is any mixture of their products."""
    start = run(flix(alpha), ONE, rounds=0)
    own = trees.take(start.client_states().personal, 0)
    close(outputs(start.personal(0)), outputs(own))


@SLOW
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_shared_adapter_of_apfl_is_that_of_fedavg(alpha):
    done = run(apfl(alpha), cohort=2)
    close(done.shared, run(fedavg(), cohort=2).shared, atol=1e-6)


def test_apfl_with_alpha_1_deploys_the_shared_adapter_with_alpha_0_one_of_its_own():
    shared, own = run(apfl(1.0)), run(apfl(0.0))
    alone = run(fb.local_only(LOSS, WORK))
    for client in range(CLIENTS):
        close(outputs(shared.personal(client)), outputs(shared.shared))
        close(outputs(own.personal(client)), outputs(alone.personal(client)))


@SLOW
def test_apfl_of_one_client_with_alpha_1_or_0_is_training_alone():
    alone = run(fb.local_only(LOSS, WORK), ONE).personal(0)
    for alpha in (0.0, 1.0):
        close(outputs(run(apfl(alpha), ONE).personal(0)), outputs(alone))


def test_alpha_learns_by_the_difference_of_products():
    """The derivative is <B_s A_s - B_p A_p, gradient in the weight>, not of factors."""
    other, batch = moved(PARAMS, seed=3), (rows()[0], rows()[1])
    slope = jax.grad(lambda a: LOSS(mixing.products(a, PARAMS, other), batch).mean())

    def of_weight(weight):
        base = PLAIN.init(jax.random.key(0))
        hidden = base.hidden[0]._replace(weight=weight)
        plain = fb.losses.cross_entropy(PLAIN.apply)
        return plain(base._replace(hidden=(hidden,)), batch).mean()

    alpha = 0.3
    base = PLAIN.init(jax.random.key(0)).hidden[0].weight
    mixed = alpha * product(PARAMS) + (1 - alpha) * product(other)
    gradient = jax.grad(of_weight)(base + mixed)
    wanted = np.vdot(product(PARAMS) - product(other), gradient)
    np.testing.assert_allclose(slope(alpha), wanted, rtol=1e-4)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_mixing_factors_differs_from_mixing_products_by_the_product_of_gaps(alpha):
    """alpha (1 - alpha) (B_s - B_p)(A_s - A_p): nothing where one factor is common."""
    other = moved(PARAMS, seed=3)
    by_products = product(mixing.products(alpha, PARAMS, other))
    by_factors = product(mixing.parameters(alpha, PARAMS, other))
    gap = trees.subtract(PARAMS, other)
    close(by_products - by_factors, alpha * (1 - alpha) * product(gap), atol=1e-6)
    other[PATH] = {**other[PATH], "a": PARAMS[PATH]["a"]}
    by_products = product(mixing.products(alpha, PARAMS, other))
    close(by_products, product(mixing.parameters(alpha, PARAMS, other)), atol=1e-6)


@SLOW
def test_ditto_without_pull_trains_alone_beside_fedavg():
    done = run(fb.ditto(fedavg(), LOSS, WORK, lam=0.0))
    alone = run(fb.local_only(LOSS, WORK))
    close(done.shared, run(fedavg()).shared)
    close(done.personal(1), alone.personal(1))


@SLOW
def test_a_personal_adapter_that_is_zero_and_stays_leaves_fedavg():
    two = fb.adapt.two_adapters(MODEL)
    begun = {"shared": PARAMS, "personal": MODEL.init(jax.random.key(9))}
    loss = fb.losses.cross_entropy(two.apply)
    done = run(
        fb.partial(loss, WORK, personal=["personal"], personal_steps=0), params=begun
    )
    close(done.shared["shared"], run(fedavg()).shared)


def test_ffa_lora_is_fedavg_on_adapters_with_one_a_for_all():
    how = fb.adapt.lora(RANK, train="b")
    frozen = fb.adapt.adapt(PLAIN, how=how, inputs=rows()[0])
    base = PLAIN.init(jax.random.key(0))
    fixed = how.constants(PATH, uses_of(PLAIN, base, rows()[0])[PATH])
    b = {"b": PARAMS[PATH]["b"]}
    small = run(
        fb.fedavg(fb.losses.cross_entropy(frozen.apply), WORK), params={PATH: b}
    )
    preset = run(fb.algorithms.ffa_lora(LOSS, WORK), params={PATH: b | fixed})
    close(preset.shared[PATH]["b"], small.shared[PATH]["b"])
    close(preset.personal(0)[PATH]["a"], fixed["a"], atol=0)
    assert preset.message_bits.up == small.message_bits.up == 32 * b["b"].size


@pytest.mark.parametrize("name", ["rolora", *LATER])
def test_which_methods_have_the_mean_of_products_as_the_product_of_means(name):
    """After each round; FedAvg misses it by more than a thousandth of its length."""
    algorithm = getattr(fb.algorithms, name)(LOSS, WORK)
    down = fb.Down(PARAMS, jnp.zeros((), jnp.int32))
    for number in range(3):
        down = down._replace(round=jnp.asarray(number, jnp.int32))
        reached = []
        for client in range(CLIENTS):
            shard = DATA.train.shard(client)
            _, state = algorithm.enroll(PARAMS, shard, KEY)
            up, _ = algorithm.client(algorithm.wire.tell(down, ()), state, shard, KEY)
            reached.append(trees.add_where_given(down.shared, up.delta))
        after = jax.tree.map(lambda *leaves: jnp.stack(leaves).mean(axis=0), *reached)
        wanted = np.mean([product(one) for one in reached], axis=0)
        gap = np.linalg.norm(wanted - product(after)) / np.linalg.norm(wanted)
        assert gap > 1e-3 if name == "fedavg" else gap < 1e-6
        down = down._replace(shared=after)


@SLOW
def test_two_clients_of_the_rest_of_the_world_have_each_others_adapters():
    two = fb.adapt.two_adapters(MODEL)
    loss = fb.losses.cross_entropy(two.apply)
    begun = {"shared": PARAMS, "personal": PARAMS}
    pair = fb.federate(rows(clients=2), parts(2))
    done = run(fb.algorithms.fedalt_lora(loss, WORK, clients=2), pair, params=begun)
    first, second = done.personal(0), done.personal(1)
    close(first["shared"], second["personal"], atol=1e-6)
    close(second["shared"], first["personal"], atol=1e-6)
    assert np.abs(product(first["personal"]) - product(second["personal"])).max() > 0.01


def test_methods_on_factors_refuse_models_without():
    plain = fb.losses.cross_entropy(PLAIN.apply)
    begun = PLAIN.init(jax.random.key(0))
    for name in ("fedsa_lora", "ffa_lora", "rolora"):
        line = rf"^{name}: params: '\*/[ab]' is not a part of a model with hidden/0/w"
        with pytest.raises(UserError, match=line):
            run(getattr(fb.algorithms, name)(plain, WORK), params=begun)
    line = "^fedalt_lora: params: a model's is not those of pairs of adapters"
    with pytest.raises(UserError, match=line):
        run(fb.algorithms.fedalt_lora(plain, WORK, clients=CLIENTS), params=begun)
    with pytest.raises(UserError, match="clients: 1 is not a whole number"):
        fb.algorithms.fedalt_lora(plain, WORK, clients=1)
