# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The alpha of APFL's bound: its algebra, its limits, and what stands in for what."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import problems
from fedblend_reproductions.apfl.generalization import (
    Sides,
    label_distances,
    plug_in,
    sides,
)
from fedblend_reproductions.flix.clusters import label_signatures

KNOWN: dict[str, Any] = {
    "shared_loss": 0.3,
    "local_loss": np.array([0.1, 0.2]),
    "distance": np.array([0.0, 1.5]),
    "counts": np.array([40, 960]),
    "dimension": 7.0,
    "constant": 0.5,
    "delta": 0.1,
    "largest": 3.0,
    "lipschitz": 2.0,
    "disagreement": np.array([0.05, 0.0]),
}


def alpha(**changed) -> np.ndarray:
    return sides(**{**KNOWN, **changed}).alpha


def test_the_formula_written_out():
    root = (7 + np.log(10)) ** 0.5
    g = [0.3 + 0.5 * root / 1000**0.5, 0.3 + 3 * 1.5 + 0.5 * root / 1000**0.5]
    low = [0.1 + 2 * 0.5 * root / 40**0.5 + 2 * 0.05, 0.2 + 2 * 0.5 * root / 960**0.5]
    found = sides(**KNOWN)
    np.testing.assert_allclose(found.shared, g, rtol=1e-14)
    np.testing.assert_allclose(found.local, low, rtol=1e-14)
    paper = np.array(g) / (np.array(g) + np.array(low))  # the weight of the local model
    np.testing.assert_allclose(found.alpha, 1 - paper, rtol=1e-14)


def test_no_alpha_of_a_fine_grid_has_a_lower_bound():
    found = sides(**KNOWN)
    grid = np.linspace(0, 1, 1001)
    tried = np.stack([found.bound(one) for one in grid])
    assert (found.bound(found.alpha) <= tried.min(axis=0)).all()
    np.testing.assert_allclose(grid[tried.argmin(axis=0)], found.alpha, atol=6e-4)


def test_the_least_bound_is_between_the_better_model_and_twice_it():
    found = sides(**KNOWN)
    better = np.minimum(found.shared, found.local)
    least = found.bound(found.alpha)
    assert (better < least).all()
    assert (least < 2 * better).all()
    np.testing.assert_allclose(found.bound(0.0), 2 * found.local)
    np.testing.assert_allclose(found.bound(1.0), 2 * found.shared)


def test_alike_clients_with_few_rows_share_all():
    counts = np.array([1, 10**10])
    assert alpha(counts=counts, distance=0.0, shared_loss=0.0)[0] > 0.999


def test_clients_far_from_the_others_share_nothing():
    assert alpha(distance=2.0, largest=1e6).max() < 1e-5


def test_many_rows_lead_to_no_sharing_only_if_nothing_else_is_left():
    """Which the text of the paper overlooks."""
    counts = np.array([10**14, 10**14])
    left = {"counts": counts, "distance": 0.0, "disagreement": 0.0}
    np.testing.assert_allclose(alpha(**left, local_loss=0.3), 0.5, atol=1e-5)
    assert alpha(**left, local_loss=0.0).max() < 1e-5


def test_nothing_known_against_either_shares_all():
    np.testing.assert_array_equal(Sides(np.zeros(2), np.zeros(2)).alpha, 1.0)


@pytest.mark.parametrize(
    ("name", "more", "sign"),
    [
        ("shared_loss", 0.5, -1),
        ("local_loss", np.array([0.4, 0.4]), 1),
        ("distance", np.array([0.3, 2.0]), -1),
        ("largest", 5.0, -1),
        ("lipschitz", 3.0, 1),
        ("disagreement", np.array([0.1, 0.1]), 1),
        ("counts", np.array([20, 480]), 1),  # half the rows: sqrt(2) on either side
        ("counts", np.array([20, 980]), 1),
    ],
)
def test_which_way_alpha_moves(name, more, sign):
    moved = sign * (alpha(**{name: more}) - alpha())
    assert moved[0 if name in ("lipschitz", "counts") else 1] > 0
    assert moved[0] >= 0
    assert name == "counts" or moved[1] >= 0


def test_distances_of_labels():
    counts = np.array([[6, 2, 0], [1, 1, 2]])
    mean = np.array([0.5, 0.25, 0.25])
    by_hand = [
        np.abs(mean - [0.75, 0.25, 0]).sum(),
        np.abs(mean - [0.25, 0.25, 0.5]).sum(),
    ]
    np.testing.assert_allclose(label_distances(counts), by_hand, rtol=1e-15)
    alike = np.array([[2, 4], [1, 2], [5, 10]])
    np.testing.assert_allclose(label_distances(alike), 0, atol=1e-15)
    many = label_distances(np.eye(50))
    np.testing.assert_allclose(many, 2 * (1 - 1 / 50))


def test_distances_of_the_labels_of_a_federation():
    on = problems.classes()
    labels = [
        on.federated_data.train.rows(i)[1] for i in range(on.federated_data.clients)
    ]
    counts = np.stack([np.bincount(own, minlength=3) for own in labels])
    shares = label_signatures(on.federated_data, 3).values
    np.testing.assert_allclose(
        label_distances(shares), label_distances(counts), atol=1e-6
    )


def test_what_stands_in_for_what():
    """Losses and disagreement by NumPy, on clients of one to four rows."""
    on = problems.classes()
    clients = on.federated_data.clients
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((clients + 1, 2, 3)).astype(np.float32)
    bias = rng.standard_normal((clients + 1, 3)).astype(np.float32)
    together, alone, apart = [], [], []
    for client in range(clients):
        inputs, labels = on.federated_data.train.rows(client)
        ours, own = (inputs @ weights[i] + bias[i] for i in (-1, client))
        for scores, losses in ((ours, together), (own, alone)):
            chances = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
            losses.append(-np.log(chances[np.arange(len(labels)), labels]).mean())
        apart.append(np.abs(ours - own).sum(axis=1).mean())
    rest: dict[str, Any] = {"dimension": 9, "constant": 0.2, "largest": 4.0}
    found = plug_in(
        on.loss,
        problems.scores,
        on.federated_data,
        problems.Linear(jnp.asarray(weights[-1]), jnp.asarray(bias[-1])),
        problems.Linear(jnp.asarray(weights[:-1]), jnp.asarray(bias[:-1])),
        distance=0.7,
        chunk=3,
        **rest,
    )
    counts = on.federated_data.train.counts
    exact = sides(
        float(np.mean(together)), np.array(alone), 0.7, counts,
        disagreement=np.array(apart), **rest,
    )  # fmt: skip
    np.testing.assert_allclose(found.shared, exact.shared, rtol=1e-5)
    np.testing.assert_allclose(found.local, exact.local, rtol=1e-5)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"delta": 1.0}, r"delta: 1.0 is not in \(0, 1\)"),
        ({"distance": 2.5}, r"distance: 2.5 is not in \[0, 2\]"),
        ({"local_loss": -0.1}, "local_loss: -0.1 is not a"),
        ({"shared_loss": float("nan")}, "shared_loss: nan is not a number"),
        ({"counts": np.array([0, 5])}, "counts: 0 is not at least 1 row"),
        ({"local_loss": np.ones(3)}, "local_loss: an array of 3 is not"),
    ],
)
def test_what_makes_no_sense_is_refused(changed, word):
    with pytest.raises(ValueError, match=word):
        alpha(**changed)


def test_a_client_without_labels_is_refused():
    with pytest.raises(ValueError, match="counts: client 1 has no rows of any class"):
        label_distances(np.array([[1, 2], [0, 0]]))
