# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Mixed FL's claim on movies: the task, its methods, and what they cost."""

from typing import Any

import jax
import numpy as np
import pytest

from fedblend_reproductions.mixed import disagreement, movies, recommendation
from fedblend_reproductions.mixed.dual_encoder import dual_encoder, spreadout
from fedblend_reproductions.mixed.fedselect import count_rows
from fedblend_reproductions.mixed.movie_runs import Setting, choose


@pytest.fixture(scope="module")
def this(data_home):
    return movies.task(True)


def test_users_are_apart_and_test_rows_dealt_out(this):
    test = this.federated_data.test
    assert (
        this.federated_data.clients == 40
        and this.federated_data.train.counts.min() >= 19
    )
    assert test.counts[:2].tolist() == [200, 200] and test.counts[2:].sum() == 0
    whole = np.concatenate([test.rows(0)[1], test.rows(1)[1]])
    np.testing.assert_array_equal(whole, test.examples[1])
    assert len(np.unique(whole)) > 100  # not the next few ratings of one user
    validation = this.federated_data.validation
    assert validation.counts.tolist() == test.counts.tolist()
    assert (validation.examples[1] != test.examples[1]).mean() > 0.9


def test_users_train_validate_or_test_as_many_as_in_the_paper():
    sides = movies.split(6040)
    assert [len(side) for side in sides] == [3865, 483, 484]
    assert len(set(np.concatenate(sides))) == 4832


def test_pairs_and_products_are_one_function():
    params = dual_encoder(30).init(jax.random.key(1))
    forms = (movies.spreadout_of_pairs, spreadout)
    values, gradients = zip(
        *(jax.value_and_grad(form)(params, 1e-3) for form in forms),
        strict=True,
    )
    assert float(values[0]) == pytest.approx(float(values[1]), rel=1e-5)
    small = [gradient.embedding[1:] for gradient in gradients]
    np.testing.assert_allclose(*small, atol=1e-4 * np.abs(small[0]).max())


@pytest.mark.slow
def test_with_one_step_the_server_may_as_well_push_apart(this):
    """Then one_way under select takes the very steps of everything on clients."""
    single = this._replace(steps=1, cohort=4)
    replica = [(2.0, 1e-3)], [0]
    methods = movies.baseline(single, False), movies.mixed_fl(single, "one_way", False)
    whole, some = (
        movies.followed(single, one, *replica, rounds=3, every=3) for one in methods
    )
    np.testing.assert_allclose(some["loss"], whole["loss"], rtol=1e-4)
    assert whole["loss"][0][-1] < whole["loss"][0][0] - 0.01
    assert whole["up"] == whole["down"] == 4 * 63520
    rows = count_rows(this.federated_data, ("0", "1"), 1).counts
    # Twice 16 numbers a row and the dense layer come down, the numbers of rows go up.
    low, high = ((4 * (32 * edge + 272)) for edge in (rows.min(), rows.max()))
    assert low <= some["down"] <= high
    low, high = ((4 * (17 * edge + 272 + 1)) for edge in (rows.min(), rows.max()))
    assert low <= some["up"] <= high


def test_lambda_is_the_baselines_and_rates_are_everybodys_own(this, monkeypatch):
    """By recall on validation users, given here; one replica diverged."""
    recalls = {"baseline": [0.1, 0.4, 0.3, None], "one_way": [0.2, 0.1]}
    asked = {}
    methods: Any = {name: name for name in recalls}
    empty: Any = lambda name, measure: measure()  # noqa: E731

    def followed(of, method, pairs, seeds, *, rounds, every, split):
        assert (of, rounds, split) == (this, 7, "validation")
        asked[method] = pairs
        return {"recall@10": [[0.9, value] for value in recalls[method]]}

    monkeypatch.setattr(movies, "followed", followed)
    setting = Setting(False, (1.0, 2.0), (0.1, 0.2), 7, 9, 3, 1, 1)
    chosen = choose(this, setting, methods, empty)
    assert asked["baseline"] == [(1.0, 0.1), (1.0, 0.2), (2.0, 0.1), (2.0, 0.2)]
    assert asked["one_way"] == [(1.0, 0.2), (2.0, 0.2)]
    assert chosen["baseline"].pair == chosen["one_way"].pair == (1.0, 0.2)
    recalls["one_way"].reverse()
    chosen = choose(this, setting, methods, empty)
    assert chosen["one_way"].pair == (2.0, 0.2)


@pytest.mark.slow
def test_what_pushes_apart_disagrees_by_lambdas_scale(this):
    """The server's gradient, and with it G^2, is small where lambda is."""
    first = [
        disagreement.traces(disagreement.on_movies(this, strength), 1, 0)["gap"][0, 0]
        for strength in (1e-6, 1.0)
    ]
    assert 0 < first[0] < first[1]


@pytest.mark.slow
def test_the_claim_is_checked_quickly_and_resumed(data_home, tmp_path, monkeypatch):
    finding = recommendation.check(True, tmp_path)
    assert finding.numbers["bytes_saved"]["one_way"] > 0.98
    flops = finding.numbers["flops"]["typical"]
    assert flops["pairs"] > 3952**2 * 16 * 2
    assert flops["one_way"] < flops["products"] / 10
    assert set(finding.figures) == {"recall", "costs"}
    assert [len(row) for row in finding.table] == [6] * 4
    monkeypatch.setattr(movies, "followed", None)  # all is cached
    again = recommendation.check(True, tmp_path)
    assert again.ours == finding.ours
