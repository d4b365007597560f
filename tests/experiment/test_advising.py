# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Which way of Mixed FL is advised, and why."""

import numpy as np
import pytest

from fedblend.experiment.advising import WAYS, Trial, _choice, advise
from fedblend.experiment.config import ConfigError, check
from fedblend.theory.mixed import Noise

CONTENT = {
    "version": 1,
    "name": "mixed",
    "data": {"source": "digits", "partition": "iid", "clients": 3},
    "model": {"name": "softmax"},
    "algorithm": {"name": "fedavg", "rate": 1.0, "steps": 8, "batch_size": 16},
    "run": {"rounds": 8},
    "central": {"how": "parallel", "classes": [8, 9], "steps": 8, "batch_size": 64},
}
CONFIG = check(CONTENT, "here")
NOISE = Noise(np.float64(1), np.float64(2))  # pyright: ignore[reportArgumentType]


def trial(*loss):
    return Trial(np.array(loss), 0.0, 0.0, 0.0)


def choice(**trials):
    return _choice(trials, [3.0, 2.0], NOISE)


@pytest.mark.slow
def test_a_trial_of_all_three_ways():
    found = advise(CONFIG)
    assert list(found.trials) == list(WAYS)
    losses = {how: one.loss.mean() for how, one in found.trials.items()}
    # Eight long steps on losses that disagree: parallel training is off the optimum.
    assert losses["two_way"] < losses["parallel"]
    assert found.how != "parallel"
    assert "the losses disagree" in found.why
    assert found.ratio > 1
    one = found.trials["one_way"]
    assert one.loss.mean() == pytest.approx((one.federated + one.central) / 2)
    assert one.bits_down == 2 * found.trials["parallel"].bits_down


def test_where_ways_are_alike_the_cheaper_is_advised():
    how, why = choice(
        parallel=trial(0.31, 0.29, 0.30),
        one_way=trial(0.30, 0.30, 0.29),
        two_way=trial(0.29, 0.30, 0.30),
    )
    assert how == "parallel"
    assert "cannot be told apart" in why


def test_a_way_that_is_worse_is_not_advised_and_the_cause_is_said():
    how, why = choice(
        parallel=trial(0.41, 0.40, 0.42),
        one_way=trial(0.51, 0.50, 0.52),
        two_way=trial(0.31, 0.30, 0.32),
    )
    assert how == "two_way"
    assert "G^2 up to 3, B^2 up to 2" in why
    assert "sigma_c^2 2" in why
    how, _ = choice(
        parallel=trial(np.nan, np.nan, np.nan), one_way=trial(0.5, 0.5, 0.6)
    )
    assert how == "one_way"
    with pytest.raises(ConfigError, match="all three"):
        choice(parallel=trial(np.inf, 1.0, 1.0))


def test_without_a_loss_at_the_server_there_is_nothing_to_advise():
    alone = {key: value for key, value in CONTENT.items() if key != "central"}
    with pytest.raises(ConfigError, match="central: is missing"):
        advise(check(alone, "here"))
