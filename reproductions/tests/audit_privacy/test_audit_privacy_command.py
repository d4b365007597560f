# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend audit-privacy``: what it prints, its exit codes, and what it refuses."""

import json

import pytest

from fedblend.cli import main, screen
from fedblend_reproductions.audit_privacy import audit as audits
from fedblend_reproductions.audit_privacy.audit import Audit

KEPT = Audit(
    promised=3.0,
    delta=1e-3,
    adjacency="zero_out",
    lower=2.4,
    any_mechanism=1.2,
    by_accountant=2.4,
    violated=False,
    confidence=0.9,
    trials=40,
    games=180,
    accuracy=0.75,
)
BROKEN = KEPT._replace(lower=5.0, by_accountant=5.0, violated=True)


@pytest.fixture
def file(tiny, write, monkeypatch):
    monkeypatch.setattr(screen, "compile_cache", lambda: None)
    tiny["run"] = {"rounds": 2}
    tiny["privacy"] = {"clip": 0.5, "noise": 4.0, "delta": 1e-3}
    return str(write(tiny))


@pytest.fixture
def found(monkeypatch):
    """The audit finds this, and what it was asked for."""

    def finds(result: Audit) -> dict:
        asked: dict = {}
        monkeypatch.setattr(
            audits, "audit", lambda config, **options: asked.update(options) or result
        )
        return asked

    return finds


def test_a_real_audit_of_a_file(file, capsys):
    asked = ["--trials", "24", "--confidence", "0.9999", "--format", "json"]
    assert main(["audit-privacy", file, *asked]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["trials"] == 24
    assert said["games"] == 6 * (24 - 24 // 4)
    assert 0 <= said["lower"] <= said["promised"]
    assert said["verdict"].startswith("no violation found")


def test_both_epsilons_stand_side_by_side(file, found, capsys):
    asked = found(KEPT)
    options = ["--trials", "40", "--seed", "3", "--canaries", "2"]
    assert main(["audit-privacy", file, *options, "--confidence", "0.9"]) == 0
    asked.pop("on_step")
    assert asked == {"trials": 40, "seed": 3, "canaries": 2, "confidence": 0.9}
    said = " ".join(capsys.readouterr().out.split())
    assert "promised 3 at most, at delta 0.001 (zero out)" in said
    assert "lower bound 2.4 at least, with confidence 0.9" in said
    assert "40 runs, 180 guesses, 75.0% right" in said
    assert "no violation found: this attack shows 80% of the promised" in said


def test_a_violation_is_loud_and_ends_with_1(file, found, capsys):
    found(BROKEN)
    assert main(["audit-privacy", file]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "VIOLATION: epsilon is at least 5, and 3 is promised" in said
    found(BROKEN)
    assert main(["audit-privacy", file, "--format", "json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["violated"] is True
    assert said["verdict"].startswith("VIOLATION")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--confidence", "1"], "--confidence: 1 is not in [0.5, 1)"),
        (["--trials", "3"], "3 is not in the range x>=8"),
        (["--set", "privacy.noise=0"], "no guarantee: there is no noise"),
        (["--set", 'privacy.noise_from="seed"'], "the noise can be recomputed"),
        (["--set", "run.rounds=0"], "run.rounds: 0; without a round"),
    ],
)
def test_what_cannot_be_audited_is_one_line(arguments, line, file, capsys):
    assert main(["audit-privacy", file, *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert line in said.err
    assert said.err.count("\n") == 1


def test_a_file_without_privacy_is_one_line(tiny, write, monkeypatch, capsys):
    monkeypatch.setattr(screen, "compile_cache", lambda: None)
    assert main(["audit-privacy", str(write(tiny))]) == 2
    said = capsys.readouterr().err
    assert "privacy: the table is missing; there is nothing to audit" in said
    assert said.count("\n") == 1
