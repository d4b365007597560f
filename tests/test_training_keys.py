# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Losses with a key: who gets which, that evaluation has none, and resumed runs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.core import Batch
from fedblend.losses import compose, gradient, objective, select_named
from fedblend.simulation import checkpoint

KEY = jax.random.key(0)
DATA = fb.federate(np.ones((12, 2), np.float32), np.arange(12).reshape(3, 4))
WORK = fb.Work(1.0, steps=1, batch_size=2)


def draws(params, rows, key):
    """Its gradient is a number drawn by the key; it must not be evaluated."""
    return jnp.full(len(rows), params * jax.random.uniform(key))


def run_of(loss, work=WORK, **settings):
    return fb.simulate(fb.local_only(loss, work), jnp.zeros(()), DATA, KEY, **settings)


def test_each_client_round_and_step_has_its_own_key():
    """Each client's own model is minus the sum of what it drew so far."""
    first, second = (run_of(draws, rounds=rounds).complete() for rounds in (1, 2))
    twice = run_of(draws, WORK._replace(steps=2), rounds=1).complete()
    seen = set()
    for client in range(3):
        one = -float(first.personal(client))
        later = -float(second.personal(client)) - one
        step = -float(twice.personal(client)) - one
        seen |= {round(number, 5) for number in (one, later, step)}
        assert all(0 < number < 1 for number in (one, later, step))
    assert len(seen) == 9


def test_a_resumed_run_draws_the_same(tmp_path):
    whole = run_of(draws, rounds=4, every=2)
    run = iter(stopped := run_of(draws, rounds=4, every=2))
    next(run)
    checkpoint.save(tmp_path / "here", stopped, {})
    resumed = run_of(draws, rounds=4, every=2)
    checkpoint.restore(tmp_path / "here", resumed)
    for run in (whole, resumed):
        run.complete()
    assert whole.personal(1) == resumed.personal(1) != stopped.personal(1)


def test_evaluation_has_no_key():
    rows = jnp.ones((3, 2))

    def loss(params, rows, key, mask):
        assert key is None and mask is None
        return jnp.full(len(rows), params)

    assert fb.metrics.mean_loss(loss)(2.0, Batch(rows)) == 2.0


def test_named_parameters_are_found_through_wrappers():
    values = {"key": 1, "mask": 2}
    found = partial(select_named, **values)
    assert found(draws) == {"key": 1}
    assert found(lambda key, mask: 0) == {}  # the first two are what they are
    assert found(lambda params, rows, **more: 0) == {}
    assert found(max) == {}
    wrapped = fb.losses.l2(compose(lambda params: 2 * params, draws), 0.5)
    assert found(wrapped) == found(jax.jit(wrapped)) == {"key": 1}
    assert found(fb.losses.cross_entropy(fb.models.softmax(2, 3).apply)) == {}
    dropping = fb.models.mlp(2, 3, dropout=0.5)
    for model in (
        dropping,
        fb.models.set_products(dropping, "bfloat16"),
        fb.models.ensemble(dropping, 2),
    ):
        assert found(fb.losses.multilabel(model.apply)) == values
    params, rows = jnp.float32(0.5), jnp.ones((3, 2))
    slope = gradient(wrapped)(params, Batch(rows, key=KEY))
    np.testing.assert_allclose(slope, 2 * jax.random.uniform(KEY) + 0.25, rtol=1e-6)


def test_dropout_keeps_the_mean_and_leaves_evaluation():
    model = fb.models.mlp(6, 4, hidden=(300,), dropout=0.4)
    params, rows = model.init(KEY), jax.random.normal(KEY, (2, 6))
    plain = fb.models.mlp(6, 4, hidden=(300,)).apply(params, rows)
    np.testing.assert_array_equal(model.apply(params, rows), plain)
    seeds = jax.random.split(jax.random.key(7), 400)
    drawn = jax.vmap(lambda key: model.apply(params, rows, key=key))(seeds)
    deviation = drawn.std(0) / np.sqrt(len(seeds))
    assert (jnp.abs(drawn.mean(0) - plain) < 5 * deviation).all()
    features = model.features
    assert features is not None
    dropped = features(params, rows, key=seeds[0])
    kept = (dropped != 0).sum() / (features(params, rows) != 0).sum()
    assert abs(kept - 0.6) < 0.1


def test_rows_under_noise_have_keys_of_their_own():
    """Clipping nothing and without noise it is the mean of each row's gradient."""
    private = fb.transforms.row_noise(draws, clip=1e6, noise=0.0)
    batch = Batch(jnp.ones((4, 2)), key=KEY)
    found = jax.grad(lambda params: objective(private, params, batch))(jnp.float32(1))
    each = [jax.random.uniform(jax.random.fold_in(KEY, place)) for place in range(4)]
    np.testing.assert_allclose(found, np.mean(each), rtol=1e-6)


def test_dropout_that_a_loss_switches_off_in_training_is_a_warning():
    net, batch = (
        fb.models.mlp(2, 3, dropout=0.5),
        Batch((jnp.ones((4, 2)), jnp.ones(4, int))),
    )
    params, inner = net.init(KEY), fb.losses.cross_entropy(net.apply)

    def wrapper(params, rows):
        return 2 * inner(params, rows)

    training = batch._replace(key=KEY)
    with pytest.warns(
        UserWarning, match=r"^loss: has no parameter 'key', so dropout of"
    ):
        gradient(wrapper)(params, training)
    # These warn of nothing, which would be an error here.
    objective(wrapper, params, batch)
    gradient(inner)(params, training)
    gradient(fb.losses.cross_entropy(fb.models.mlp(2, 3).apply))(params, training)
