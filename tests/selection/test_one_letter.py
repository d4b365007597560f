# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""One letter: the coefficients of mixed models, from sums of squares and products."""

import numpy as np
import pytest

import fedblend as fb
from fedblend.data.dataset import DataError
from fedblend.errors import UserError
from fedblend.runs.auto.linear import PooledRows, flix_models

COUNTS = (40, 25, 60, 31)


def rows(counts=COUNTS, inputs=3, seed=0):
    draw = np.random.default_rng(seed)
    owner = np.repeat(np.arange(len(counts)), counts)
    x = draw.normal(size=(len(owner), inputs))
    own = 1 + draw.normal(size=(len(counts), inputs + 1))
    y = own[owner, 0] + (x * own[owner, 1:]).sum(axis=1) + draw.normal(size=len(owner))
    return x, y, owner


def federation(x, y, owner):
    return fb.federate((x, y), [np.flatnonzero(owner == i) for i in np.unique(owner)])


def henderson(x, y, owner, level, slopes):
    """Coefficients of clients by Henderson's mixed model equations, with all rows.

    [X'X  X'Z      ] [shared]   [X'y]
    [Z'X  Z'Z + W  ] [own   ] = [Z'y]
    """
    fixed = np.column_stack([np.ones(len(y)), x])
    clients, size = owner.max() + 1, fixed.shape[1]
    mixed = np.zeros((len(y), clients * size))
    for row, client in enumerate(owner):
        mixed[row, client * size : (client + 1) * size] = fixed[row]
    both = np.hstack([fixed, mixed])
    weights = np.tile([1 / level, *[1 / slopes] * (size - 1)], clients)
    matrix = both.T @ both + np.diag([*[0.0] * size, *weights])
    found = np.linalg.solve(matrix, both.T @ y)
    return found[:size], found[:size] + found[size:].reshape(clients, size)


def test_coefficients_are_those_of_hendersons_equations():
    """To 1e-6, for own slopes and for own intercepts only."""
    x, y, owner = rows()
    for level, slopes in ((0.7, 0.2), (30.0, 1e-4), (0.5, 1e-12)):
        found = fb.one_letter(
            federation(x, y, owner), level=level, slopes=slopes, standardize=False
        )
        shared, models = henderson(x, y, owner, level, slopes)
        np.testing.assert_allclose(found.shared, shared, atol=1e-6)
        np.testing.assert_allclose(found.coefficients, models, atol=1e-6)


def test_its_limits_are_one_model_for_all_and_training_alone():
    x, y, owner = rows()
    found = fb.one_letter(federation(x, y, owner), level=1.0, slopes=0.1)
    design = np.column_stack([np.ones(len(y)), x])
    pooled = np.linalg.lstsq(design, y, rcond=None)[0]
    np.testing.assert_allclose(found.models(0, 0), np.tile(pooled, (4, 1)), atol=1e-9)
    alone = [
        np.linalg.lstsq(design[owner == i], y[owner == i], rcond=None)[0]
        for i in range(4)
    ]
    for share in (True, False):
        models = found.models(1e9, 1e9, share=share)
        np.testing.assert_allclose(models, alone, atol=1e-6)


def test_errors_are_those_of_models_trained_without_a_fold():
    """Each fold is left out in turn, and predicted from rows."""
    x, y, owner = rows()
    data = federation(x, y, owner)
    found = fb.one_letter(data, level=0.7, slopes=0.2, standardize=False)
    expected = np.zeros(4)
    parts = [data.train.rows(i) for i in range(4)]
    folds = [np.arange(len(targets)) % 5 for _, targets in parts]
    for fold in range(5):
        kept = [np.flatnonzero(of != fold) for of in folds]
        inputs, targets = (
            np.concatenate([part[k][at] for part, at in zip(parts, kept, strict=True)])
            for k in range(2)
        )
        where = np.repeat(np.arange(4), [len(at) for at in kept])
        models = henderson(inputs, targets, where, 0.7, 0.2)[1]
        for client, (inputs, targets) in enumerate(parts):
            out = folds[client] == fold
            scores = models[client, 0] + inputs[out] @ models[client, 1:]
            expected[client] += ((scores - targets[out]) ** 2).sum() / len(targets)
    np.testing.assert_allclose(found.errors[0], expected, rtol=1e-6)


def test_flix_and_l2gd_follow_from_the_same_letter():
    x, y, owner = rows()
    found = fb.one_letter(
        federation(x, y, owner), level=1.0, slopes=1.0, standardize=False
    )
    design = np.column_stack([np.ones(len(y)), x])
    expected = flix_models(
        "regression", PooledRows(design, y, np.array(COUNTS)), 1, alpha=0.4, l2=0.05
    )
    np.testing.assert_allclose(found.flix(0.4, 0.05), expected, atol=1e-7)
    # The gradient of  mean_i (f_i(x_i) + lam / 2 |x_i - mean|^2)  is zero.
    models = found.l2gd(0.3)
    for client, model in enumerate(models):
        own, targets = design[owner == client], y[owner == client]
        slope = own.T @ (own @ model - targets) / len(targets)
        slope += 0.3 * (model - models.mean(axis=0))
        np.testing.assert_allclose(slope, 0, atol=1e-10)


def test_units_constants_and_copies_of_inputs_change_no_prediction():
    """An input times 1e6, one of a large mean, a constant one, and one twice."""
    x, y, owner = rows()
    before = fb.one_letter(federation(x, y, owner))
    worse = np.column_stack([1e6 * x[:, 0], x[:, 1] + 1e3, x[:, 2], 0 * y + 7])
    after = fb.one_letter(federation(worse, y, owner))
    assert (before.level, before.slopes) == (after.level, after.slopes)
    scores = [
        found.coefficients[owner, 0] + (inputs * found.coefficients[owner, 1:]).sum(1)
        for inputs, found in ((x, before), (worse, after))
    ]
    np.testing.assert_allclose(*scores, atol=1e-6)
    twice = fb.one_letter(federation(x[:, [0, 1, 2, 2]], y, owner), level=1.0, slopes=0)
    once = fb.one_letter(federation(x, y, owner), level=1.0, slopes=0)
    np.testing.assert_allclose(
        twice.coefficients[:, 3:].sum(axis=1), once.coefficients[:, 3], atol=1e-9
    )


def test_rows_that_a_matrix_reveals_are_refused():
    x, y, owner = rows((40, 19, 30))
    with pytest.raises(DataError, match="client '1' has 3 rows in a fold, fewer than"):
        fb.one_letter(federation(x, y, owner))
    assert fb.one_letter(federation(x, y, owner), folds=4).numbers == 4 * 15
    # A client with a single row is predicted by the others where it is left out.
    x, y, owner = rows((40, 1, 30))
    found = fb.one_letter(federation(x, y, owner), fewest_rows=0)
    assert np.isfinite(found.errors).all()


def test_what_is_no_number_is_refused():
    x, y, owner = rows()
    x[50, 1] = np.nan
    with pytest.raises(DataError, match="client '1' has values that are not finite"):
        fb.one_letter(federation(x, y, owner))
    with pytest.raises(UserError, match="folds: 1 is not 2 or more"):
        fb.one_letter(federation(x, y, owner), folds=1, level=1.0)


def test_one_client_alone_gets_its_own_regression():
    x, y, owner = rows((40,))
    found = fb.one_letter(federation(x, y, owner))
    design = np.column_stack([np.ones(40), x])
    expected = np.linalg.lstsq(design, y, rcond=None)[0]
    np.testing.assert_allclose(found.coefficients[0], expected, atol=1e-9)


def test_amounts_of_sharing_that_have_no_model_are_refused():
    found = fb.one_letter(
        fb.federate((np.eye(40)[:, :2], np.arange(40.0)), np.split(np.arange(40), 2)),
        level=1.0,
        slopes=1.0,
    )
    for bad in (lambda: found.flix(0.5, 0.0), lambda: found.l2gd(0.0)):
        with pytest.raises(ValueError, match=r"0\.0 is not a number above 0"):
            bad()
