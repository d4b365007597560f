# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What an operator has done to answers: cut, noisy, and never twice the same noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.core import Down
from fedblend.experiment.federation.guard import guarded, secret_key
from fedblend.experiment.federation.policy import Protect
from fedblend.runtime.flower.node import Refusal

LOSS = fb.sources.quadratic_loss
SECRET = jax.random.key(7)


@pytest.fixture(scope="module")
def shard():
    federation, _ = fb.sources.quadratics(clients=3, dim=4)
    return federation.train.shard(1)


def answer(algorithm, shard, round=0, at=5.0):
    down = Down(jnp.full(4, at), jnp.asarray(round, jnp.int32))
    up, _ = algorithm.client(down, (), shard, jax.random.key(0))
    return np.asarray(up.delta)


def noisy(experiment="one", secret=SECRET):
    plain = fb.fedavg(LOSS, 0.1, steps=2, batch_size=None)
    return guarded(plain, Protect(clip=0.5, noise=2.0), secret, experiment)


def test_answers_are_cut_to_the_length_and_short_ones_left(shard):
    plain = fb.fedavg(LOSS, 0.1, steps=2, batch_size=None)
    free = answer(plain, shard)
    full = float(np.linalg.norm(free))
    for clip in (0.5 * full, 2 * full):
        cut = answer(guarded(plain, Protect(clip=clip), SECRET, "one"), shard)
        wanted = free * min(clip, full) / full
        np.testing.assert_allclose(cut, wanted, rtol=1e-5)


def test_noise_is_the_nodes_own_of_the_experiment_and_of_the_round(shard):
    usual = answer(noisy(), shard)
    np.testing.assert_array_equal(usual, answer(noisy(), shard))
    others = [
        answer(noisy("two"), shard),
        answer(noisy(), shard, round=1),
        answer(noisy(secret=jax.random.key(8)), shard),
    ]
    for other in others:
        assert np.abs(usual - other).max() > 0.1


def test_noise_has_the_size_that_was_asked_for(shard):
    clean = guarded(
        fb.fedavg(LOSS, 0.1, steps=2, batch_size=None),
        *(Protect(clip=0.5), SECRET, "one"),
    )
    mean = answer(clean, shard)
    drawn = jax.vmap(
        lambda round: (
            noisy()
            .client(Down(jnp.full(4, 5.0), round), (), shard, jax.random.key(0))[0]
            .delta
        )
    )(jnp.arange(4000))
    spread = np.asarray(drawn) - mean
    assert spread.std() == pytest.approx(1.0, rel=0.02)
    assert np.abs(spread.mean(axis=0)).max() < 0.07


def test_what_clipping_does_not_bound_is_refused(shard):
    scaffold = fb.scaffold(LOSS, 0.1, steps=2, batch_size=None)
    strict = guarded(scaffold, Protect(clip=1.0), SECRET, "one")
    params = jnp.zeros(4)
    _, state = strict.enroll(params, shard, jax.random.key(0))
    hello = fb.core.Heard((), jnp.ones(()), jnp.ones((), jnp.int32))
    down, _ = strict.start(params, hello, None, jax.random.key(0))
    with pytest.raises(Refusal, match="says more than a change"):
        strict.client(down, state, shard, jax.random.key(0))
    local = fb.pure_local.gradient_descent(LOSS, 5.0, most=3)
    flix = fb.flix(
        LOSS,
        lambda loss: fb.fedavg(loss, 0.1, steps=1, batch_size=None),
        alpha=0.5,
        local=local,
    )
    with pytest.raises(Refusal, match="at enrolment"):
        guarded(flix, Protect(clip=1.0), SECRET, "one").enroll(
            params, shard, jax.random.key(0)
        )


def test_the_secret_is_drawn_once_and_for_the_owner_alone(tmp_path):
    path = tmp_path / "secret"
    first, second = (jax.random.key_data(secret_key(path)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert path.stat().st_mode & 0o077 == 0
    other = jax.random.key_data(secret_key(tmp_path / "other"))
    assert not np.array_equal(first, other)
