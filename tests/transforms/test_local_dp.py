# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Local differential privacy: clipped updates, and noise that never repeats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fedblend as fb
from fedblend.core import Down, Up, Wire
from fedblend.transforms.local_dp import local_dp, secret_noise

LOSS = fb.datasets.quadratic_loss
PLAIN = fb.fedavg(LOSS, fb.Work(0.1, steps=2, batch_size=None))


@pytest.fixture(scope="module")
def shard():
    federated_data, _ = fb.datasets.quadratics(clients=3, dim=4)
    return federated_data.train.shard(1)


def update(algorithm, shard, at=5.0):
    down = Down(jnp.full(4, at), jnp.zeros((), jnp.int32))
    up, _ = algorithm.client(down, (), shard, jax.random.key(0))
    return np.asarray(up.delta)


def test_updates_are_clipped_and_short_ones_left(shard):
    free = update(PLAIN, shard)
    full = float(np.linalg.norm(free))
    for clip in (0.5 * full, 2 * full):
        cut = update(local_dp(PLAIN, clip), shard)
        wanted = free * min(clip, full) / full
        np.testing.assert_allclose(cut, wanted, rtol=1e-5)


@pytest.mark.parametrize("at", [np.nan, np.inf, 3e38, 1e30])
def test_an_update_that_is_not_finite_or_overflows_becomes_zero(at, shard):
    np.testing.assert_array_equal(update(local_dp(PLAIN, 0.5), shard, at), 0)


def test_noise_is_normal_with_this_deviation_and_new_every_time():
    change = {"a": jnp.full((300, 50), 2.0), "b": jnp.zeros(5, jnp.bfloat16)}
    first, second = (secret_noise(Up(change), std=1.0).delta for _ in range(2))
    assert jax.tree.map(jnp.shape, first) == jax.tree.map(jnp.shape, change)
    assert first["a"].dtype == np.float32
    assert first["b"].dtype == jnp.bfloat16
    one, other = (drawn["a"].ravel() - 2.0 for drawn in (first, second))
    assert stats.kstest(one, "norm").pvalue > 1e-6
    assert one.std() == pytest.approx(1.0, rel=0.05)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.05
    assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 0.05


def test_what_clipping_does_not_bound_is_refused(shard):
    scaffold = fb.scaffold(LOSS, fb.Work(0.1, steps=2, batch_size=None))
    strict = local_dp(scaffold, 1.0)
    params = jnp.zeros(4)
    _, state = strict.enroll(params, shard, jax.random.key(0))
    join = fb.Aggregate((), jnp.ones(()), jnp.ones((), jnp.int32))
    down, _ = strict.start(params, join, None, jax.random.key(0))
    with pytest.raises(ValueError, match="sends more than an update"):
        strict.client(down, state, shard, jax.random.key(0))
    local = fb.solvers.gradient_descent(LOSS, 5.0, most=3)
    flix = fb.flix(
        LOSS,
        lambda loss: fb.fedavg(loss, fb.Work(0.1, steps=1, batch_size=None)),
        alpha=0.5,
        local=local,
    )
    with pytest.raises(ValueError, match="at enrollment"):
        local_dp(flix, 1.0).enroll(params, shard, jax.random.key(0))
    asking = PLAIN._replace(wire=Wire(ask=lambda client, shard: shard.count))
    with pytest.raises(ValueError, match="which part of the model"):
        local_dp(asking, 1.0).wire.ask((), shard)
    encoding = local_dp(fb.transforms.compressed(PLAIN, fb.compress.rand_k(1)), 1.0)
    with pytest.raises(ValueError, match="sends encoded updates"):
        encoding.client(down._replace(extra={}), (), shard, jax.random.key(0))
