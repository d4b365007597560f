# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Clipped updates, against NumPy; C finds its quantile; what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend import compress
from fedblend.transforms.clip import clip_tree
from fedblend.trees import precision

RATE, ROUNDS, NORM = 0.2, 6, 0.15
full: dict[str, Any] = {"steps": 1, "batch_size": None}


def descent(problem):
    return fb.fedavg(problem.loss, fb.Work(RATE, **full))


def by_hand(problem, shares, quantile=None, rate=0.0):
    """Rounds of clipped gradient descent in float64; x and C at the end."""
    matrices, vectors = problems.client_matrices(problem)
    x, bound = np.linspace(0, 0.5, 3), NORM
    for _ in range(ROUNDS):
        steps = -RATE * (matrices @ x - vectors)
        norms = np.linalg.norm(steps, axis=1)
        x = x + shares @ (steps * np.minimum(1, bound / norms)[:, None])
        if quantile is not None:
            bound *= np.exp(-rate * (shares @ (norms <= bound) - quantile))
    return x, bound


def run(problem, algorithm, **settings):
    return fb.simulate(
        algorithm,
        problem.params,
        problem.federated_data,
        jax.random.key(0),
        **{"rounds": ROUNDS, "chunk": 3, "every": ROUNDS, **settings},
    ).complete()


def test_a_fixed_bound_is_numpys():
    with precision("float64"):
        on = problems.quadratics()
        counts = np.asarray(on.federated_data.train.counts)
        done = run(on, fb.transforms.clip(descent(on), NORM))
        expected, _ = by_hand(on, counts / counts.sum())
        np.testing.assert_allclose(done.shared, expected, rtol=1e-10, atol=0)


def test_a_tracked_bound_is_numpys_and_one_number_travels():
    with precision("float64"):
        on = problems.quadratics()
        tracked = fb.transforms.adaptive_clip(descent(on), NORM, quantile=0.3, rate=0.4)
        done = run(on, tracked, weights="uniform")
        expected, bound = by_hand(on, np.full(7, 1 / 7), 0.3, 0.4)
        np.testing.assert_allclose(done.shared, expected, rtol=1e-10, atol=0)
        np.testing.assert_allclose(done.down.extra["adaptive_clip"], bound, rtol=1e-10)
        assert abs(bound / NORM - 1) > 0.1
        assert done.message_bits.up == (3 + 1) * 64


def test_the_norm_is_of_all_leaves_and_short_answers_stay():
    tree = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]]), "kept": None}
    shorter, norm = clip_tree(tree, 2.5)
    assert norm == 5
    np.testing.assert_allclose(shorter["a"], [1.5, 0], rtol=1e-6)
    np.testing.assert_allclose(shorter["b"], [[2.0]], rtol=1e-6)
    for bound in (5.0, 7.0):
        np.testing.assert_array_equal(clip_tree(tree, bound)[0]["a"], tree["a"])
    zero, norm = clip_tree(jnp.zeros(2), 1.0)
    assert norm == 0
    np.testing.assert_array_equal(zero, np.zeros(2))


def test_the_bound_settles_at_the_quantile():
    """Norms of clients are 1 to 50, in a model that does not move."""
    norms = np.arange(1.0, 51.0)
    signs = np.where(np.arange(50) % 2, 1.0, -1.0)[:, None]
    vectors = (norms[:, None] * signs).astype(np.float32)
    federated_data = fb.federate(
        (np.zeros((50, 1, 1), np.float32), vectors), np.arange(50)[:, None]
    )
    on = problems.Problem(federated_data, problems.quadratic_loss, jnp.zeros(1))
    say = fb.algorithms.fedopt(on.loss, fb.Work(1.0, **full), 0.0)
    tracked = fb.transforms.adaptive_clip(say, 1.0, quantile=0.9, rate=0.2)
    reached = run(on, tracked, rounds=200).down.extra["adaptive_clip"]
    assert abs(float(reached) - 45.5) <= 1


def test_what_clients_keep_is_not_clipped():
    on = problems.quadratics()
    alpha = np.linspace(0.2, 0.9, 7)
    apfl = fb.apfl(on.loss, fb.Work(RATE, **full), alpha=alpha, learn="fixed")
    plain, tight = (
        run(on, one, rounds=1) for one in (apfl, fb.transforms.clip(apfl, 1e-3))
    )
    moved = [float(jnp.linalg.norm(one.shared - on.params)) for one in (plain, tight)]
    assert moved[1] <= 1.001e-3 < moved[0]
    jax.tree.map(np.testing.assert_array_equal, tight.client(3), plain.client(3))


@pytest.mark.parametrize("encoder", [fb.transforms.compressed, fb.transforms.diana])
def test_encoders_go_around(encoder):
    on = problems.quadratics()
    tracked = fb.transforms.adaptive_clip(descent(on), NORM)
    encoded = encoder(tracked, compress.natural())
    usual = (encoded, on.params, on.federated_data, jax.random.key(0))
    assert fb.simulate(*usual, rounds=1).message_bits.up == 8 * 4 + 32


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (
            lambda inner: fb.transforms.clip(inner, 0.0),
            "^clip: norm: 0.0 is not .* above 0",
        ),
        (lambda inner: fb.transforms.clip(inner, np.nan), "^clip: norm: nan is not"),
        (
            lambda inner: fb.transforms.adaptive_clip(inner, 1.0, quantile=1.5),
            r"^adaptive_clip: quantile: 1.5 is not in \[0, 1\]",
        ),
        (
            lambda inner: fb.transforms.adaptive_clip(inner, 1.0, rate=-1),
            "^adaptive_clip: rate: -1 is not",
        ),
    ],
)
def test_numbers_out_of_range_are_refused(build, line):
    with pytest.raises(ValueError, match=line):
        build(descent(problems.quadratics()))


def test_what_cannot_be_clipped_is_refused():
    on = problems.quadratics()
    with pytest.raises(ValueError, match=r"^clip: .* are encoded already"):
        run(
            on,
            fb.transforms.clip(
                fb.transforms.compressed(descent(on), compress.rand_k(1)), 1.0
            ),
        )
    alone = fb.local_only(on.loss, fb.Work(RATE, **full))
    with pytest.raises(ValueError, match=r"^adaptive_clip: .* send no update"):
        run(on, fb.transforms.adaptive_clip(alone, 1.0))
    with pytest.raises(ValueError, match=r"^reduction: 'median' .* counts on a mean"):
        run(on, fb.transforms.adaptive_clip(descent(on), 1.0), reduction="median")
