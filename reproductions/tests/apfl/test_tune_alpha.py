# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Alpha chosen on validation rows, against runs one by one and a choice by hand."""

import dataclasses
import math
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend_reproductions.apfl.tune_alpha import choose, tune

DIM, ALIKE, ROUNDS, KEY = 4, 6, 30, jax.random.key(3)
GRID = (1.0, 0.0, 0.5)
loss = fb.losses.squared_error(lambda params, inputs: inputs @ params)
MEASURE = {"mse": fb.metrics.mean_squared_error(lambda p, x: x @ p)}
start = jnp.zeros(DIM)


@cache
def federated_data() -> fb.FederatedData:
    """Some clients of few rows that follow one rule, then two that follow its opposite.

    The last of those has many rows, the other none to validate on.
    """
    rng = np.random.default_rng(0)
    rule, counts = rng.standard_normal(DIM) * 2, [9] * ALIKE + [2, 300]
    inputs = rng.standard_normal((sum(counts), DIM))
    sign = np.repeat([1] * ALIKE + [-1, -1], counts)
    targets = sign * (inputs @ rule) + 2 * rng.standard_normal(sum(counts))
    rows = inputs.astype(np.float32), targets.astype(np.float32)
    parts = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    return fb.federate(rows, parts, validation=0.3, test=0.3)


@cache
def own_models() -> np.ndarray:
    train = federated_data().train
    solved = [np.linalg.lstsq(*train.rows(i))[0] for i in range(ALIKE + 2)]
    return np.stack(solved).astype(np.float32)


def flix(alpha):
    method = partial(fb.fedavg, work=fb.Work(0.2, steps=1, batch_size=None))
    local = fb.solvers.given(own_models())
    return fb.flix(loss, method, alpha=alpha, local=local)


def apfl(alpha):
    return fb.apfl(
        loss, fb.Work(0.05, steps=3, batch_size=2), alpha=alpha, learn="fixed"
    )


def tuned_on(federated_data, build=flix):
    with pytest.warns(UserWarning, match=r"tune: 1 of 8 clients \(6\) have no finite"):
        return tune(
            build,
            start,
            federated_data,
            KEY,
            rounds=ROUNDS,
            measure=MEASURE,
            alphas=GRID,
        )


@cache
def tuned(build=flix):
    return tuned_on(federated_data(), build)


def held_out(split: str) -> Any:
    return getattr(federated_data(), split)


def alone(alpha, build=flix):
    return fb.simulate(
        build(alpha),
        start,
        federated_data(),
        KEY,
        rounds=ROUNDS,
        every=ROUNDS,
        measure=MEASURE,
        splits=["validation", "test"],
    ).complete()


@pytest.mark.slow
def test_every_alpha_is_the_run_that_it_would_be_alone():
    found = tuned()
    np.testing.assert_array_equal(found.alphas, [0, 0.5, 1])
    run = alone(0.5)
    for split in ("validation", "test"):
        expected = run.measured[0][split]["personal"]["mse"]
        np.testing.assert_allclose(getattr(found, split)[1], expected, rtol=1e-4)
    np.testing.assert_allclose(found.run.personal(0)[1], run.personal(0), rtol=1e-4)


def test_each_client_chooses_on_its_own_rows():
    """The choice again in plain Python, from errors that NumPy measures."""
    found = tuned()
    for client in np.flatnonzero(~found.unsure):
        inputs, targets = held_out("validation").rows(int(client))
        models = np.asarray(found.run.personal(int(client)))
        errors = [math.fsum((inputs @ model - targets) ** 2) for model in models]
        pairs = zip(found.alphas, errors, strict=True)
        best = max(alpha for alpha, error in pairs if error == min(errors))
        assert found.chosen[client] == best
    assert found.chosen[-1] == 0  # many rows of its own, and unlike the others
    assert found.chosen[:ALIKE].max() > 0
    assert len(set(found.chosen)) > 1


def test_a_client_without_validation_rows_takes_what_is_best_for_the_others():
    found = tuned()
    counts = held_out("validation").counts
    np.testing.assert_array_equal(found.unsure, counts == 0)
    assert found.unsure.sum() == 1
    means = found.validation[:, counts > 0].mean(axis=1)
    assert found.common == found.alphas[means.argmin()]
    assert found.chosen[ALIKE] == found.common


def test_test_rows_have_no_part_in_the_choice():
    test = held_out("test")
    inputs, targets = test.examples
    spoiled = dataclasses.replace(test, examples=(inputs, -targets[::-1]))
    other = tuned_on(dataclasses.replace(federated_data(), test=spoiled))
    assert other.test is not None
    np.testing.assert_array_equal(other.chosen, tuned().chosen)
    np.testing.assert_array_equal(other.validation, tuned().validation)
    assert np.nanmax(np.abs(other.test - tuned().test)) > 1


@pytest.mark.slow
def test_apfl_trained_again_with_the_choice_has_the_same_models():
    """Its shared model does not depend on alpha."""
    found = tuned(apfl)
    assert len(set(found.chosen)) > 1
    again = alone(found.chosen, apfl)
    for client in range(ALIKE + 2):
        np.testing.assert_allclose(
            again.personal(client), found.personal(client), rtol=1e-4, atol=1e-5
        )


def test_without_test_rows_there_is_a_choice_all_the_same():
    bare = dataclasses.replace(federated_data(), test=None)
    with pytest.warns(UserWarning, match="they take alpha = 0"):
        found = tune(flix, start, bare, KEY, rounds=0, measure=MEASURE, alphas=[0.0])
    assert found.test is None
    np.testing.assert_array_equal(found.chosen, 0)
    np.testing.assert_allclose(found.personal(3), own_models()[3], rtol=1e-6)


nan = float("nan")


@pytest.mark.parametrize(
    ("values", "higher", "replicas", "common"),
    [
        ([[1, 2], [1, 2], [1, 2]], True, [2, 2], 2),
        ([[1, 2], [1, 2], [0, 3]], True, [1, 2], 2),
        ([[1, 2], [1, 2], [0, 3]], False, [2, 1], 2),
        ([[0, 2], [1, 3], [2, 4]], False, [0, 0], 0),
        ([[3, nan], [2, nan], [2, nan]], False, [2, 2], 2),
        ([[1, nan], [2, nan], [3, nan]], False, [0, 0], 0),
        ([[3, nan], [2, 5], [4, 5]], True, [2, 2], 2),  # the first diverged
        ([[9, nan], [2, 5], [1, 5]], True, [0, 2], 1),
        ([[9, np.inf], [2, 5], [1, 6]], False, [2, 1], 2),
        ([[1, np.inf], [2, np.inf], [3, np.inf]], False, [0, 0], 0),
        ([[1, np.inf], [2, nan], [3, -np.inf]], True, [2, 2], 2),
        ([[nan, 7, 1], [5, nan, 2], [5, nan, 3]], True, [2, 0, 2], 2),
    ],
)
def test_the_rule(values, higher, replicas, common):
    found = choose(np.array(values, float), higher)
    assert (found[0].tolist(), found[1]) == (replicas, common)


def test_clients_whose_validation_rows_are_not_finite_are_named():
    """Also where the measure hides it: what is not a number is of no class."""
    held = held_out("validation")
    inputs, targets = (np.copy(leaf) for leaf in held.examples)
    inputs[held.starts[0], 1] = nan  # of client 0
    targets[held.starts[2]] = -np.inf
    spoiled = dataclasses.replace(held, examples=(inputs, targets))
    on = dataclasses.replace(federated_data(), validation=spoiled, test=None)
    right = fb.metrics.accuracy(lambda p, x: x @ p)
    with pytest.warns(UserWarning, match=r"tune: 3 of 8 clients \(0, 2, 6\) have no"):
        found = tune(
            flix, start, on, KEY, rounds=0, measure={"accuracy": right}, alphas=GRID
        )
    np.testing.assert_array_equal(np.flatnonzero(found.unsure), [0, 2, ALIKE])
    np.testing.assert_array_equal(found.chosen[found.unsure], found.common)
    np.testing.assert_array_equal(np.isnan(found.validation).any(axis=0), found.unsure)


def test_alphas_at_which_a_client_diverged_are_named():
    found = tuned()
    validation = np.copy(found.validation)
    validation[1:, 3] = np.inf, nan
    _, told = found._replace(validation=validation).warnings
    assert told == (
        "tune: 1 of 8 clients (3) have no finite mse at alpha = 0.5, 1, which they "
        "cannot choose"
    )


def lone_class(federated_data):
    """Clients whose validation rows have one class, on which no area is defined."""
    inputs, targets = federated_data.validation.examples
    shards = dataclasses.replace(
        federated_data.validation, examples=(inputs, np.ones_like(targets))
    )
    return dataclasses.replace(federated_data, validation=shards)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"alphas": [0.5, 1.5]}, r"alphas: \[0.5, 1.5\] is not in \[0, 1\]"),
        ({"alphas": []}, r"alphas: \[\] is not"),
        ({"alphas": [nan]}, r"alphas: \[nan\] is not"),
        ({"by": "accuracy"}, r"by: 'accuracy' is not measured; it is one of \['mse'\]"),
        ({"measure": {}}, "by: '' is not measured"),
        (
            {"key": jax.random.split(KEY)},
            "key: 2 keys; a choice is made for one seed",
        ),
        ({"federation": lambda f: dataclasses.replace(f, validation=None)}, "has no v"),
        (
            {
                "federation": lone_class,
                "measure": {"auc": fb.metrics.auc(lambda p, x: x @ p)},
            },
            "by: 'auc' has no value on any client's validation rows",
        ),
    ],
)
def test_what_cannot_be_chosen_is_refused(changed, word):
    usual = {"federation": lambda f: f, "key": KEY, "measure": MEASURE, **changed}
    on = usual.pop("federation")(federated_data())
    key = usual.pop("key")
    with pytest.raises(ValueError, match=word):
        tune(flix, start, on, key, rounds=0, **usual)
