# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Which Mixed FL method is advised, and why."""

import numpy as np
import pytest

from fedblend.config.config import check
from fedblend.errors import ConfigError
from fedblend_reproductions.mixed import advise as advise_module
from fedblend_reproductions.mixed.advise import METHODS, Trial, advise, choice

CONTENT = {
    "version": 1,
    "name": "mixed",
    "data": {"source": "digits", "partition": "iid", "clients": 2},
    "model": {"name": "softmax"},
    "algorithm": {"name": "fedavg", "rate": 1.0, "steps": 8, "batch_size": "all"},
    "run": {"rounds": 8},
    "central": {"how": "parallel", "classes": [8, 9], "steps": 8},
}


def trial(*loss, start=2.3):
    return Trial(np.full(len(loss), start), np.array(loss), 0.0, 0.0, 0.0)


def chosen(**trials):
    return choice(trials, central_batch=16)


def test_where_methods_are_alike_the_cheaper_is_advised():
    how, why = chosen(
        parallel=trial(0.31, 0.29, 0.30),
        one_way=trial(0.30, 0.30, 0.29),
        two_way=trial(0.29, 0.30, 0.30),
    )
    assert how == "parallel"
    assert "cannot be told apart" in why


def test_without_noise_a_difference_that_is_nothing_is_none():
    least = trial(0.3, 0.3, 0.3)
    assert chosen(parallel=trial(0.3001, 0.3001, 0.3001), one_way=least)[0] == (
        "parallel"
    )
    assert chosen(parallel=trial(0.301, 0.301, 0.301), one_way=least)[0] == "one_way"


def test_a_method_that_is_worse_is_not_advised_and_the_cause_is_said():
    how, why = chosen(
        parallel=trial(0.41, 0.40, 0.42),
        one_way=trial(0.51, 0.50, 0.52),
        two_way=trial(0.31, 0.30, 0.32),
    )
    assert how == "two_way"
    assert why.endswith("a larger central.batch_size may help one_way")


def test_wild_seeds_do_not_make_a_method_as_good_as_the_best():
    how, why = chosen(parallel=trial(0.1, 0.1, 2.2), one_way=trial(0.30, 0.30, 0.31))
    assert how == "one_way"
    assert "parallel (0.8) ends higher" in why


def test_a_loss_that_ends_higher_does_not_look_equal_and_rounding_is_none():
    low = {"start": 1e4 + 1.0}
    how, why = chosen(parallel=trial(1e4 + 0.5, 1e4 + 0.5, **low),
                      one_way=trial(1e4, 1e4, **low))  # fmt: skip
    assert how == "one_way"
    assert "one_way (10000) has" in why and "parallel (10000.5) ends higher" in why
    how, why = chosen(parallel=trial(0.3 + 1e-9, 0.3 + 1e-9, start=0.3 + 1e-9),
                      one_way=trial(0.3, 0.3, start=0.3))  # fmt: skip
    assert how == "parallel" and "higher" not in why


def faked(monkeypatch, losses):
    """Trials are these functions of the rate's multiples, and nothing is computed."""

    def replicas(config, built, how, rounds, asked):
        del config, built, rounds
        return trial(*[losses[how](factor) for factor, _ in asked])

    monkeypatch.setattr(advise_module, "_replicas", replicas)
    return advise(check(CONTENT, "here"))


def crash(factor):
    raise MemoryError(f"at {factor}\nand so on")


def test_each_method_is_judged_at_its_own_best_rate(monkeypatch):
    found = faked(
        monkeypatch,
        {
            "parallel": lambda factor: 0.5 + abs(factor - 1),
            "one_way": lambda factor: 0.4 + abs(factor - 4),
            "two_way": lambda factor: 0.45 + abs(factor - 0.25),
        },
    )
    assert [found.trials[how].factor for how in METHODS] == [1.0, 4.0, 0.25]
    assert found.how == "one_way"


def test_what_diverges_or_crashes_is_out_and_the_rest_is_kept(monkeypatch):
    found = faked(
        monkeypatch,
        {
            "parallel": lambda factor: 6.7e25 if factor > 0.25 else 2.4,
            "one_way": crash,
            "two_way": lambda factor: np.nan if factor > 1 else 2.2 - factor,
        },
    )
    assert found.how == "two_way"
    assert found.trials["two_way"].factor == 1.0
    assert found.trials["parallel"].failed == "ends above its start at all of 5 rates"
    assert found.trials["one_way"].failed == "MemoryError: at 0.25"
    assert "parallel and one_way are out" in found.why
    with pytest.raises(
        ConfigError, match=r"^central: no method works; parallel: Memory"
    ):
        faked(monkeypatch, dict.fromkeys(METHODS, crash))


def test_without_a_loss_at_the_server_there_is_nothing_to_advise():
    alone = {key: value for key, value in CONTENT.items() if key != "central"}
    with pytest.raises(ConfigError, match="central: is missing"):
        advise(check(alone, "here"))
