# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Mixed FL's claims on smiling faces."""

import jax
import numpy as np
import pytest

from fedblend_reproductions.mixed import (
    central_batches,
    disagreement,
    faces,
    steps_and_rates,
)
from fedblend_reproductions.mixed.task import (
    central_alone,
    clients_alone,
    course,
    oracle,
)


@pytest.fixture(scope="module")
def this(data_home):
    return faces.task(True)


def test_clients_have_smiling_faces_only_and_are_tested_on_all(this):
    assert (this.federated_data.train.examples[1] == 1).all()
    assert (this.held[1] == 0).all()
    assert len(this.held[1]) + this.federated_data.train.total == 2000
    for client in range(this.federated_data.clients):
        assert 0.4 < this.federated_data.test.rows(client)[1].mean() < 0.6
    assert this.central_batch("one_way") == this.steps * this.central_batch("two_way")


def test_the_oracle_weighs_the_sides_as_the_mixture_does(this):
    uneven = this._replace(weights=(0.75, 0.25))
    rows, weights = oracle(uneven).federated_data.train.examples
    both = [weights[rows[1] == label].sum() / len(weights) for label in (1, 0)]
    np.testing.assert_allclose(both, uneven.weights, rtol=1e-5)
    loss = this.loss(this.model.init(jax.random.key(0)), rows)
    sides = [float(loss[rows[1] == label].mean()) for label in (1, 0)]
    mixture = 0.75 * sides[0] + 0.25 * sides[1]
    assert float((weights * loss).mean()) == pytest.approx(mixture, rel=1e-5)
    rows, weights = central_alone(uneven).federated_data.train.examples
    assert (rows[1] == 0).all() and (weights == 1).all()


@pytest.mark.slow
def test_clients_alone_learn_to_say_smiling_and_nothing_else(this):
    curves = course(
        this, clients_alone(this), rates=[0.02], seeds=[0], rounds=40, every=40
    )
    first, last = curves.values["loss"][0]
    assert last > first + 0.5
    assert curves.values["auc"][0, -1] < 0.65
    assert curves.rounds.tolist() == [0, 40]


@pytest.mark.slow
def test_an_algorithm_comes_near_the_oracle(data_home):
    finding = faces.check(True)
    beyond = finding.numbers["auc_beyond_oracle"]
    assert abs(beyond["one_way"]) < 0.04
    assert beyond["clients alone"] < -0.1
    assert set(finding.figures) == {"auc"}


@pytest.mark.slow
def test_traces_of_disagreement(this):
    case = disagreement.on_rows(this, faces.RATE)
    found = disagreement.traces(case, seeds=1, rounds=2)
    assert found["gap"].shape == (1, 3)
    # 1 + G^2 / |gradient|^2; opposite labels have gradients that oppose each other.
    assert (found["ratio"] > 2).all() and (found["gap"] > 1).all()


@pytest.mark.slow
def test_a_small_central_batch_costs_more_under_one_way(data_home):
    finding = central_batches.check(True)
    lost = finding.numbers["auc_lost"]
    assert lost["one_way"].mean() > lost["two_way"].mean() > 0
    assert set(finding.figures) == {"batches"}


@pytest.mark.slow
def test_more_steps_of_a_smaller_rate(data_home, tmp_path):
    finding = steps_and_rates.check(True, tmp_path)
    assert finding.numbers["losses"]["faces"]["one_way"].shape == (2, 2)
    assert finding.numbers["hurt"] == 0
    assert set(finding.figures) == {"steps"}


def test_a_run_that_is_no_number_is_worse_than_any():
    losses = np.array([[np.inf, 1.0], [0.5, 0.5], [0.5, 0.7]])
    gains = steps_and_rates._gains(losses)
    assert gains[0].tolist() == [np.inf, 0] and gains[1, 0] == pytest.approx(-0.1)
    assert steps_and_rates._counts({"one_way": gains}) == (1, 0)
    assert steps_and_rates._counts({"one_way": -gains[:1]}) == (0, 1)
