# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Running statistics: literal loops, what must not touch them, what refuses them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedblend as fb
from fedblend.batch_statistics import Statistic, standardize
from fedblend.batches import everything
from fedblend.core import Batch
from fedblend.errors import InputError
from fedblend.losses import gradient, objective
from fedblend.trees import leaves_by_path, precision

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
INPUTS = RNG.normal(2, 3, (24, 3)).astype(np.float32)
TARGETS = (INPUTS[:, 0] > 2).astype(np.int32)
DATA = fb.federate((INPUTS, TARGETS), np.split(np.arange(24), [3, 10]))
MODEL = fb.models.mlp(3, 2, hidden=(4,), norm="batch")
LOSS = fb.losses.cross_entropy(MODEL.apply)


def statistics(params):
    """Running mean and variance of the hidden layer."""
    return params.norm[0].mean.value, params.norm[0].variance.value


def hidden(params, rows):
    return rows @ np.asarray(params.hidden[0].weight).T + np.asarray(
        params.hidden[0].bias
    )


@pytest.mark.parametrize("counted", [0, 1, 2, 5])
def test_padded_rows_do_not_count(counted):
    """The layer with padding is the layer without it, in float64."""
    with precision("float64"):
        rows = jnp.asarray(RNG.normal(size=(5, 2, 3)))
        mean, variance = Statistic(jnp.full(3, 0.5)), Statistic(jnp.full(3, 2.0))
        mask = jnp.arange(5) < counted

        def run(mean, variance, rows, mask):
            ready = standardize(rows, mean, variance, training=True, mask=mask)
            return (ready[:counted] ** 3).sum(), ready

        slopes, ready = jax.grad(run, (0, 1), has_aux=True)(mean, variance, rows, mask)
        own = np.asarray(rows)[:counted].reshape(-1, 3)
        expected = np.full(3, 0.5), np.full(3, 2.0)
        if counted:
            expected = own.mean(0), own.var(0, ddof=1)
            wanted = (np.asarray(rows) - own.mean(0)) / np.sqrt(own.var(0) + 1e-5)
            np.testing.assert_allclose(ready[:counted], wanted[:counted], rtol=1e-12)
        np.testing.assert_allclose(slopes[0].value, 0.5 - expected[0], rtol=1e-12)
        np.testing.assert_allclose(slopes[1].value, 2.0 - expected[1], rtol=1e-12)


def test_a_single_entry_has_no_variance():
    mean, variance = Statistic(jnp.zeros(2)), Statistic(jnp.ones(2))

    def run(variance):
        rows = jnp.array([[3.0, 4.0]])
        return standardize(rows, mean, variance, training=True).sum()

    assert (jax.grad(run)(variance).value == 0).all()


OPTIMIZERS = {
    "plain": 0.3,
    "adamw": optax.adamw(0.3, weight_decay=0.5),
    "clipped": optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(0.3, 0.9)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_statistics_are_running_means_whatever_the_optimizer(name):
    """With a frozen first layer, in a loop over what the layer sees."""
    rule = OPTIMIZERS[name]
    start = MODEL.init(KEY)
    rate = optax.sgd(rule) if isinstance(rule, float) else rule
    marks = jax.tree.map(lambda _: "go", start)._replace(
        hidden=jax.tree.map(lambda _: "stop", start.hidden)
    )
    stopped = optax.partition({"go": rate, "stop": optax.set_to_zero()}, marks)
    loss = fb.losses.l2(LOSS, 5.0)
    algorithm = fb.algorithms.fedprox(loss, fb.Work(stopped, 4, None), mu=3.0)
    run = fb.simulate(algorithm, start, DATA, KEY, rounds=1, weights="uniform")
    ends = []
    for client in range(3):
        rows = hidden(start, DATA.train.rows(client)[0])
        mean, variance = np.zeros(4), np.ones(4)
        for _ in range(4):
            mean = 0.9 * mean + 0.1 * rows.mean(0)
            variance = 0.9 * variance + 0.1 * rows.var(0, ddof=1)
        ends.append((mean, variance))
    expected = np.mean(ends, axis=0)
    found = statistics(run.complete().shared)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_in_evaluation_rows_do_not_depend_on_each_other():
    params = MODEL.init(KEY)
    every = MODEL.apply(params, INPUTS)
    np.testing.assert_allclose(MODEL.apply(params, INPUTS[:1]), every[:1], rtol=1e-5)
    slope = gradient(LOSS)(params, Batch((INPUTS, TARGETS)))
    assert not any(leaf.any() for leaf in statistics(slope))
    below = params.norm[0]._replace(variance=Statistic(-jnp.ones(4)))
    broken = MODEL.apply(params._replace(norm=(below,)), INPUTS)
    assert jnp.isfinite(broken).all()  # compressed variances may be below 0


def test_statistics_keep_their_precision_where_products_do_not():
    """Running statistics in bfloat16 would stop at 1/128 of their value."""
    low = fb.models.set_products(MODEL, "bfloat16")
    params, rows = MODEL.init(KEY), Batch((INPUTS, TARGETS), key=KEY)
    far = params.norm[0]._replace(mean=Statistic(jnp.full(4, 1e4 + 1)))
    far = params._replace(norm=(far,))
    slopes = [
        statistics(gradient(fb.losses.cross_entropy(one.apply))(far, rows))[0]
        for one in (low, MODEL)
    ]
    np.testing.assert_allclose(*slopes, atol=0.1)


def test_fedbn_keeps_statistics_and_servers_take_the_mean_of_others():
    work = fb.Work(0.1, 3, 4)
    start = MODEL.init(KEY)
    normalization = fb.models.find_part(MODEL, INPUTS, "normalization")
    paths = {path for path in leaves_by_path(start) if path.startswith("norm/")}
    assert (
        set(normalization)
        == paths
        == {*("norm/0/scale", "norm/0/offset", "norm/0/mean", "norm/0/variance")}
    )
    own = fb.algorithms.fedbn(LOSS, work, normalization=normalization)
    run = fb.simulate(own, start, DATA, KEY, rounds=2).complete()
    np.testing.assert_array_equal(statistics(run.shared), statistics(start))
    means = [np.asarray(statistics(run.personal(client))[0]) for client in range(3)]
    assert not np.allclose(means[0], means[1])
    adam = fb.algorithms.fedopt(LOSS, work, optax.adam(0.5))
    plain = fb.fedavg(LOSS, work)
    ends = [
        statistics(fb.simulate(one, start, DATA, KEY, rounds=1).complete().shared)
        for one in (adam, plain)
    ]
    np.testing.assert_allclose(*ends, rtol=1e-6)


def test_alpha_does_not_learn_from_statistics():
    """Where both models have the same weights, alpha has no gradient."""
    ours = MODEL.init(KEY)
    far = ours.norm[0]._replace(mean=Statistic(jnp.full(4, 9.0)))
    own = ours._replace(norm=(far,))
    rows = Batch((INPUTS, TARGETS), key=KEY)
    for mix in (fb.mixing.parameters, fb.mixing.products, fb.mixing.only(["norm"])):
        slope = jax.grad(lambda a, mix=mix: objective(LOSS, mix(a, ours, own), rows))
        assert slope(0.5) == 0
    blend = fb.mixing.outputs(0.5, ours, own)
    slope = jax.grad(lambda both: objective(LOSS, both, rows))(blend)
    seen = hidden(ours, INPUTS).mean(0)
    for one, before in ((slope.shared, 0.0), (slope.personal, 9.0)):
        np.testing.assert_allclose(statistics(one)[0], before - seen, rtol=1e-4)


REFUSED = {
    "pfedme": lambda: fb.algorithms.pfedme(
        LOSS, fb.Work(0.1, 1, 2), lam=1.0, inner_rate=0.1, inner_steps=1
    ),
    "fomaml": lambda: fb.algorithms.fomaml(LOSS, fb.Work(0.1, 1, 2), 0.1),
    "perfedavg": lambda: fb.algorithms.perfedavg(
        LOSS, fb.Work(0.1, 1, 2), inner_rate=0.1
    ),
    "solvers: full gradients": lambda: fb.flix(
        LOSS,
        lambda loss: fb.fedavg(loss, fb.Work(0.1, 1, 2)),
        alpha=0.5,
        local=fb.solvers.lbfgs(LOSS),
    ),
    "loss: noise on gradients of rows": lambda: fb.fedavg(
        fb.transforms.row_noise(LOSS, 1.0, 1.0), fb.Work(0.1, 1, 2)
    ),
    "loss: has no parameter 'key'": lambda: fb.fedavg(
        lambda params, rows: LOSS(params, rows), fb.Work(0.1, 1, 2)
    ),
    "loss: has no parameter 'mask'": lambda: fb.fedavg(
        lambda params, rows, key: LOSS(params, rows, key=key), fb.Work(0.1, 1, None)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_follow_statistics_is_refused_in_one_line(message):
    with pytest.raises(InputError, match=message) as caught:
        fb.simulate(REFUSED[message](), MODEL.init, DATA, KEY, rounds=1).complete()
    assert "\n" not in str(caught.value)


def test_rows_that_no_client_has_leave_statistics():
    """A client without rows takes a step on nothing."""
    params = MODEL.init(KEY)
    shard = DATA.train.shard(0)
    nothing = everything(dataclasses.replace(shard, count=jnp.int32(0)))
    slope = gradient(LOSS)(params, nothing._replace(key=KEY))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(slope))


def test_no_control_variate_follows_statistics():
    """They are not corrected, so that their gaps would add up round by round."""
    work = fb.Work(0.05, 3, None)
    own = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), MODEL.init(KEY))
    made = {
        "scaffnew": fb.algorithms.scaffnew(LOSS, work),
        "compressed": fb.algorithms.compressed_scaffnew(
            LOSS, work, clients=3, copies=2
        ),
        "scafflix": fb.algorithms.scafflix(
            LOSS, work, alpha=0.5, personal=fb.solvers.given(own)
        ),
    }
    for name, algorithm in made.items():
        run = fb.simulate(
            algorithm, MODEL.init, DATA, KEY, rounds=9, weights="uniform"
        ).complete()
        controls = [
            leaf
            for path, leaf in leaves_by_path(run.client(0)).items()
            if "control" in path and path.endswith(("mean", "variance"))
        ]
        assert len(controls) == 2, name
        assert not np.any(controls), name
