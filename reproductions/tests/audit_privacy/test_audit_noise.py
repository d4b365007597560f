# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Audits of a node's own noise: below its ledger's epsilon, above it with a bug.

The noise is the operating system's. Where the promise is kept the confidence is 0.9999:
a false alarm in one of 10,000 runs at most.
"""

import sys

import pytest

from fedblend.cli import main, screen
from fedblend.config.config import check
from fedblend.errors import ConfigError
from fedblend.theory.privacy import gaussian_epsilon as epsilon
from fedblend.transforms import noise
from fedblend_federation.client import build
from fedblend_federation.client.ledger import Charge, Ledger
from fedblend_federation.policy.policy import Policy
from fedblend_reproductions.audit_privacy.node import audit_node

POLICY = Policy.model_validate({"protect": {"clip": 0.5, "noise": 4.0}})
DELTA = 1e-3
ROUNDS = 4


@pytest.fixture
def config(tiny):
    return check({**tiny, "run": {"rounds": ROUNDS}}, "audited")


def half_the_noise(monkeypatch):
    own, add = sys.modules["fedblend.transforms.local_dp"], noise.add_on_grid
    monkeypatch.setattr(
        own, "add_on_grid", lambda leaves, std, *rest: add(leaves, std / 2, *rest)
    )


def no_clipping(monkeypatch):
    """The norm of an update is taken for 0."""
    own = sys.modules["fedblend.transforms.local_dp"].trees
    monkeypatch.setattr(own, "sum_squares", lambda tree: 0.0 * own.size(tree))


def other_rows_move_an_answer_by_one_clip(monkeypatch):
    """The ledger forgets the factor 2."""
    protected = build.protect_setup

    def fewer(setup, protect):
        made = protected(setup, protect)
        return made._replace(squared=made.squared / 4)

    monkeypatch.setattr(
        sys.modules["fedblend_reproductions.audit_privacy.node"], "protect_setup", fewer
    )


def test_the_promise_is_that_of_the_ledger(config):
    found = audit_node(config, POLICY, delta=DELTA, trials=24, confidence=0.9999)
    ledger = Ledger()
    for answer in range(ROUNDS):
        ledger.charge("one", str(answer), Charge(answers=1, squared=(2 / 4.0) ** 2))
    assert found.promised == pytest.approx(epsilon(ledger.squared, DELTA))
    assert not found.violated and found.lower <= found.promised
    assert found.games == 16 * 24 * 3 // 4


@pytest.mark.slow
def test_the_lower_bound_is_near_the_promise(config):
    found = audit_node(config, POLICY, delta=DELTA, trials=600, confidence=0.9999)
    assert not found.violated
    assert 0.8 * found.promised <= found.lower <= found.promised


@pytest.mark.parametrize(
    "bug",
    [half_the_noise, no_clipping, other_rows_move_an_answer_by_one_clip],
)
def test_a_planted_bug_is_found(bug, config, monkeypatch):
    bug(monkeypatch)
    found = audit_node(config, POLICY, delta=DELTA, trials=60)
    assert found.violated and found.lower > found.promised


@pytest.mark.parametrize(
    ("policy", "change", "line"),
    [
        ({}, {}, r"policy: protect\.noise is 0; there is no epsilon"),
        (
            {"accept": {"algorithms": ["apfl"]}},
            {},
            r"policy accept\.algorithms: algorithm\.name is fedavg",
        ),
        ({}, {"run": {"rounds": 0}}, r"run\.rounds: 0; without a round"),
    ],
)
def test_what_cannot_be_audited_is_one_line(policy, change, line, tiny):
    protect = {} if not (policy or change) else {"clip": 0.5, "noise": 4.0}
    own = Policy.model_validate({"protect": protect, **policy})
    with pytest.raises(ConfigError, match=line) as error:
        audit_node(check({**tiny, "run": {"rounds": 2}, **change}, "audited"), own)
    assert "\n" not in str(error.value)


def test_the_command_takes_a_policy(tiny, write, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(screen, "compile_cache", lambda: None)
    file = str(write({**tiny, "run": {"rounds": 2}}))
    own = tmp_path / "policy.toml"
    own.write_text("[protect]\nclip = 0.5\nnoise = 4.0\n")
    asked = ["--trials", "8", "--confidence", "0.9999"]
    assert main(["audit-privacy", file, "--policy", str(own), *asked]) == 0
    assert "no violation found" in capsys.readouterr().out
    own.write_text("[protect]\nnoise = 4.0\n")
    assert main(["audit-privacy", file, "--policy", str(own), *asked]) == 2
    assert "protect.noise: is in units of clip" in capsys.readouterr().err
