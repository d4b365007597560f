# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Mixed FL's claim on movies: the task, its methods, and what they cost."""

import jax
import numpy as np
import pytest

import fedblend as fb
from fedblend.papers.mixed import movies, recommendation
from fedblend.wrap.rows import used_rows


@pytest.fixture(scope="module")
def this(data_home):
    return movies.task(True)


def test_users_are_apart_and_test_rows_dealt_out(this):
    test = this.federation.test
    assert this.federation.clients == 40 and this.federation.train.counts.min() >= 19
    assert test.counts[:2].tolist() == [200, 200] and test.counts[2:].sum() == 0
    whole = np.concatenate([test.rows(0)[1], test.rows(1)[1]])
    np.testing.assert_array_equal(whole, test.examples[1])
    assert len(np.unique(whole)) > 100  # not the next few ratings of one user


def test_pairs_and_products_are_one_function():
    params = fb.models.dual_encoder(30).init(jax.random.key(1))
    ways = (movies.spreadout_of_pairs, fb.models.spreadout)
    values, slopes = zip(
        *(jax.value_and_grad(way)(params) for way in ways), strict=True
    )
    assert float(values[0]) == pytest.approx(float(values[1]), rel=1e-5)
    small = [slope.embedding[1:] for slope in slopes]
    np.testing.assert_allclose(*small, atol=1e-4 * np.abs(small[0]).max())


def test_with_one_step_the_server_may_as_well_push_apart(this):
    """Then one_way under select takes the very steps of everything on clients."""
    single = this._replace(steps=1, cohort=4)
    settings = {"rate": 2.0, "seeds": 1, "rounds": 3, "every": 3}
    methods = movies.baseline(single, False), movies.way(single, "one_way", False)
    whole, some = (movies.followed(single, one, **settings) for one in methods)
    np.testing.assert_allclose(some["loss"], whole["loss"], rtol=1e-4)
    assert whole["loss"][0][-1] < whole["loss"][0][0] - 0.01
    assert whole["up"] == whole["down"] == 4 * 63520
    rows = used_rows(this.federation, ("0", "1"), 1).counts
    # Twice 16 numbers a row and the dense layer come down, the numbers of rows go up.
    low, high = ((4 * (32 * edge + 272)) for edge in (rows.min(), rows.max()))
    assert low <= some["down"] <= high
    low, high = ((4 * (17 * edge + 272 + 1)) for edge in (rows.min(), rows.max()))
    assert low <= some["up"] <= high


@pytest.mark.slow
def test_the_claim_is_checked_quickly_and_resumed(data_home, tmp_path, monkeypatch):
    finding = recommendation.check(True, tmp_path)
    assert finding.numbers["bytes_saved"]["one_way"] > 0.98
    flops = finding.numbers["flops"]["typical"]
    assert flops["pairs"] > 3952**2 * 16 * 2
    assert flops["one_way"] < flops["products"] / 10
    assert set(finding.figures) == {"recall", "costs"}
    assert [len(row) for row in finding.table] == [6] * 4
    monkeypatch.setattr(movies, "followed", None)  # all is kept
    again = recommendation.check(True, tmp_path)
    assert again.ours == finding.ours
