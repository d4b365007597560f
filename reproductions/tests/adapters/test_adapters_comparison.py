# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Who is harmed: by rows that say so in all splits, and not by chance in one."""

import numpy as np
import pytest
from scipy.stats import t

import fedblend as fb
from fedblend_reproductions.adapters import comparison
from fedblend_reproductions.claims import plain

LOSS = fb.metrics.mean_loss(lambda params, rows: rows)
SPLITS, CLIENTS, ROWS = 3, 4, 12
NAMES = ["a", "b", "c", "d"]


def result(losses):
    return plain({"test": [np.asarray(split) for split in losses]})


@pytest.fixture
def shared():
    return np.random.default_rng(0).uniform(1, 5, (SPLITS, CLIENTS, ROWS))


def test_a_gain_of_one_split_is_student_s_interval_of_paired_rows(shared):
    own = shared + np.random.default_rng(1).normal(0.1, 0.2, shared.shape)
    found = comparison.gain_of(LOSS, result(own[:1]), result(shared[:1]))
    gaps = (shared - own)[0]
    half = t.ppf(0.975, ROWS - 1) * gaps.std(axis=1, ddof=1) / np.sqrt(ROWS)
    # 1e-4: results are stored with six digits, and t is read from a table.
    np.testing.assert_allclose(found.value, gaps.mean(axis=1), atol=1e-4)
    np.testing.assert_allclose(found.high, gaps.mean(axis=1) + half, atol=1e-4)


def test_the_better_alternative_decides(shared):
    """Client 0 loses to the shared model, 1 to training alone, 2 to none."""
    alone, own = shared.copy(), shared.copy()
    noise = np.random.default_rng(2).normal(0, 0.01, shared.shape)
    alone[:, 1] -= 0.5
    own[:, 0] += 0.5
    own[:, 2] -= 0.5
    own[:, 3] += noise[:, 3] - noise[:, 3].mean()
    alone[:, 0] += 0.9
    found = comparison.harm(
        LOSS,
        result(own + noise),
        {"shared": result(shared), "alone": result(alone)},
        NAMES,
    )
    assert found.names == ["a", "b"]
    assert (found.harmed, found.helped) == (2, 1)


def test_one_split_may_name_a_client_that_several_do_not(shared):
    """Its rows say so in the first split, and the contrary in the others."""
    own = shared + np.array([0.5, -0.4, -0.3])[:, None, None]
    own += np.random.default_rng(3).normal(0, 0.01, shared.shape)
    found = comparison.harm(LOSS, result(own), {"shared": result(shared)}, NAMES)
    assert found.in_first_split == CLIENTS
    assert found.harmed == 0


def test_rows_that_a_client_does_not_have_are_left_out(shared):
    some = shared.copy()
    some[:, 0, 5:] = np.nan
    stored = result(some)
    assert stored["test"][0][0][5] is None
    means = comparison.client_means(stored)
    np.testing.assert_allclose(means[:, 0], some[:, 0, :5].mean(axis=1), rtol=1e-5)
