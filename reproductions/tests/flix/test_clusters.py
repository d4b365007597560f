# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Local models from clusters of clients, against closed forms and scikit-learn."""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend_reproductions.flix import clusters

KEY = jax.random.key(5)
DIM, ROWS, TEST_ROWS = 6, 8, 200
loss = fb.losses.squared_error(lambda params, inputs: inputs @ params)
start = jnp.zeros(DIM)


class Hidden(NamedTuple):
    """Clients of two hidden groups, whose rows follow opposite linear rules."""

    federated_data: fb.FederatedData
    truth: np.ndarray
    group: np.ndarray


@cache
def hidden(clients=12, seed=0) -> Hidden:
    rng = np.random.default_rng(seed)
    rule = rng.standard_normal(DIM)
    rule *= 3 / np.linalg.norm(rule)
    group = rng.permutation(np.arange(clients) % 2)
    truth = np.where(group[:, None] == 0, rule, -rule)
    inputs = rng.standard_normal((clients, ROWS + TEST_ROWS, DIM))
    noise = rng.standard_normal((clients, ROWS + TEST_ROWS))
    targets = np.einsum("crd,cd->cr", inputs, truth) + noise

    def flat(low, high):
        rows = inputs[:, low:high].reshape(-1, DIM), targets[:, low:high].reshape(-1)
        parts = np.split(np.arange(len(rows[1])), clients)
        return tuple(leaf.astype(np.float32) for leaf in rows), parts

    rows, parts = flat(0, ROWS)
    test_rows, test_parts = flat(ROWS, ROWS + TEST_ROWS)
    federated_data = fb.federate(
        rows, parts, test_rows=test_rows, test_partition=test_parts
    )
    return Hidden(federated_data, truth, group)


def least_squares(federated_data, members) -> np.ndarray:
    rows = [federated_data.train.rows(client) for client in members]
    inputs = np.concatenate([own for own, _ in rows]).astype(float)
    targets = np.concatenate([own for _, own in rows]).astype(float)
    return np.linalg.lstsq(inputs, targets, rcond=None)[0]


def descent(members):
    del members
    return fb.fedavg(loss, fb.Work(0.2, steps=1, batch_size=None))


def trained(federated_data, assignment, rounds, signatures=None):
    return clusters.train(
        descent,
        loss,
        start,
        federated_data,
        assignment,
        KEY,
        rounds=rounds,
        signatures=signatures,
    )


@cache
def found():
    on = hidden()
    signatures = clusters.gradient_signatures(loss, start, on.federated_data, KEY)
    groups = clusters.kmeans(signatures.values, 2, KEY)
    return groups, trained(on.federated_data, groups.assignment, 200, signatures)


def test_the_hidden_groups_are_found():
    groups, _ = found()
    first = hidden().group[0]
    np.testing.assert_array_equal(groups.assignment, hidden().group != first)


def test_models_of_groups_are_the_groups_least_squares():
    groups, models = found()
    for group in (0, 1):
        members = np.flatnonzero(groups.assignment == group)
        best = least_squares(hidden().federated_data, members)
        for member in members:
            np.testing.assert_allclose(models.models[member], best, atol=1e-4)


def test_they_are_nearer_to_the_truth_than_each_clients_own():
    on, (_, models) = hidden(), found()
    own = np.stack([least_squares(on.federated_data, [i]) for i in range(12)])
    far = np.linalg.norm(own - on.truth, axis=1).mean()
    near = np.linalg.norm(models.models - on.truth, axis=1).mean()
    assert near < far / 2


def test_norms_are_those_of_each_clients_own_gradient():
    _, models = found()
    for client in range(12):
        inputs, targets = hidden().federated_data.train.rows(client)
        gradient = inputs.T @ (inputs @ models.models[client] - targets) / ROWS
        np.testing.assert_allclose(
            models.norms[client], np.linalg.norm(gradient), rtol=1e-4
        )
    assert models.norms.min() > 0.1


def test_all_that_travels_is_counted():
    _, models = found()
    model, signature = 32 * DIM, 32 * DIM
    np.testing.assert_array_equal(models.bits_up, signature + 200 * model)
    np.testing.assert_array_equal(models.bits_down, (1 + 200 + 1) * model)


def test_flix_with_them_has_the_lower_test_loss():
    on, (_, models) = hidden(), found()
    own = np.stack([least_squares(on.federated_data, [i]) for i in range(12)])

    def test_loss(personal):
        algorithm = fb.flix(
            loss,
            lambda mixed: fb.fedavg(mixed, fb.Work(0.5, steps=1, batch_size=None)),
            alpha=0.3,
            local=fb.solvers.given(jnp.asarray(personal, jnp.float32)),
        )
        run = fb.simulate(
            algorithm,
            start,
            on.federated_data,
            KEY,
            rounds=100,
            every=100,
            measure={"loss": fb.metrics.mean_loss(loss)},
            splits=["test"],
        )
        return run.complete().summary()["measures"]["test"]["personal"]["loss"]["mean"]

    assert test_loss(models.models) < 0.7 * test_loss(own)


def test_every_client_alone_is_the_pure_local_model():
    """To what gradient descent reaches in the flattest direction of eight rows."""
    on = hidden(clients=3).federated_data
    models = trained(on, np.arange(3), 4000).models
    for client in range(3):
        np.testing.assert_allclose(
            models[client], least_squares(on, [client]), atol=1e-2
        )


def test_all_in_one_group_is_the_pooled_model():
    on = hidden(clients=3).federated_data
    models = trained(on, np.zeros(3, int), 400).models
    np.testing.assert_allclose(
        models, np.tile(least_squares(on, range(3)), (3, 1)), atol=1e-4
    )


def test_signatures_are_directions_of_gradients():
    """On as many axes as parameters all angles stay; fewer axes are fewer numbers."""
    on = hidden().federated_data
    values = clusters.gradient_signatures(loss, start, on, KEY, size=99).values
    gradients = []
    for client in range(12):
        inputs, targets = on.train.rows(client)
        gradients.append(-inputs.T @ targets)
    directions = np.stack(
        [gradient / np.linalg.norm(gradient) for gradient in gradients]
    )
    np.testing.assert_allclose(values @ values.T, directions @ directions.T, atol=1e-5)
    short = clusters.gradient_signatures(loss, start, on, KEY, size=2)
    assert short.values.shape == (12, 2)
    assert (short.bits_up, short.bits_down) == (2 * 32, DIM * 32)


def test_label_signatures_are_shares_of_classes():
    labels = np.array([0, 0, 1, 2, 2, 2, 2])
    on = fb.federate((np.zeros((7, 1)), labels), [np.arange(3), np.arange(3, 7)])
    shares = clusters.label_signatures(on, 4)
    np.testing.assert_allclose(
        shares.values, [[2 / 3, 1 / 3, 0, 0], [0, 0, 1, 0]], rtol=1e-6
    )
    assert (shares.bits_up, shares.bits_down) == (4 * 32, 0)


@pytest.mark.parametrize("k", [1, 2, 5, 9])
@pytest.mark.parametrize("seed", [0, 1])
def test_kmeans_is_as_good_as_that_of_scikit_learn(k, seed):
    from sklearn.cluster import KMeans

    rng = np.random.default_rng(seed)
    centers = rng.standard_normal((5, 3)) * 3
    points = centers[rng.integers(5, size=80)] + rng.standard_normal((80, 3))
    theirs = KMeans(k, n_init=20, random_state=0).fit(points)  # pyright: ignore
    ours = clusters.kmeans(points, k, KEY, restarts=20)
    assert ours.inertia == pytest.approx(theirs.inertia_, rel=0.01)
    means = [points[ours.assignment == group].mean(axis=0) for group in range(k)]
    inertia = np.square(points - np.stack(means)[ours.assignment]).sum()
    assert ours.inertia == pytest.approx(inertia)


def test_groups_are_counted_by_first_member_and_none_is_empty():
    points = np.array([[5.0], [5.0], [0.0], [5.0], [0.0]])
    two = clusters.kmeans(points, 2, KEY).assignment
    assert two.tolist() == [0, 0, 1, 0, 1]
    assert sorted(clusters.kmeans(points, 5, KEY).assignment) == [0, 1, 2, 3, 4]
    assert set(clusters.kmeans(points, 4, KEY).assignment) == {0, 1, 2, 3}


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="k: 6 is not between 1 and the 5 clients"):
        clusters.kmeans(np.zeros((5, 2)), 6, KEY)
    on = hidden().federated_data
    with pytest.raises(ValueError, match="size: 0 is not a whole number"):
        clusters.gradient_signatures(loss, start, on, KEY, size=0)
    with pytest.raises(ValueError, match=r"assignment: shape \(3,\) is not that of"):
        trained(on, np.zeros(3, int), 1)
