# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Results of claims, whatever they are about: what is written, and what stays."""

import json

import numpy as np
import pytest

import fedblend
from fedblend_reproductions.claims import (
    Claim,
    Finding,
    Verdict,
    commit,
    read_entries,
    refresh,
    reproduce,
    span,
)
from fedblend_reproductions.plots import banded, panels


def measured(quick):
    with panels(1, 1) as (figure, axes):
        banded(axes[0, 0], [0, 1], np.array([[1.0, 2.0], [3.0, 4.0]]), label="two")
    numbers = {"curve": np.array([1.0, np.inf]), 0.5: {"k": np.int32(3)}}
    return Finding(Verdict.partly, "2 | 3", numbers, {"curve": figure}, "one seed")


def broken(quick):
    raise RuntimeError("no such thing")


def headline(numbers):
    return f"{len(numbers)} numbers"


CLAIMS = [
    Claim("X1", "First", "it rises", measured, headline),
    Claim("X2", "Second", "it falls", broken, headline),
]


def by(criterion, verdict):
    def check(quick):
        return Finding(verdict, f"found by {criterion}", {}, {}, criterion=criterion)

    return Claim("X4", "Fourth", "it is more", check, headline, undecided="few rows")


def test_numbers_and_figures(tmp_path):
    (found,) = reproduce(CLAIMS[:1], tmp_path, quick=True)
    on_disk = json.loads((tmp_path / "X1.json").read_text())
    assert on_disk == found == read_entries(tmp_path, CLAIMS)[0]
    assert on_disk["numbers"] == {"curve": [1.0, None], "0.5": {"k": 3}}
    assert (tmp_path / "X1_curve.png").read_bytes().startswith(b"\x89PNG")


def test_an_earlier_result_stays_beside_the_new_one(tmp_path):
    before = {"verdict": "reproduced", "criterion": "it rose", "ours": "4"}
    claim = CLAIMS[0]._replace(
        check=lambda quick: measured(quick)._replace(before=before)
    )
    (found,) = reproduce([claim], tmp_path)
    assert found["before"] == before


def test_results_stay_when_a_later_claim_fails(tmp_path):
    with pytest.raises(RuntimeError, match="no such thing"):
        reproduce(CLAIMS, tmp_path)
    assert [found["claim"] for found in read_entries(tmp_path, CLAIMS)] == ["X1"]


def test_a_changed_criterion_leaves_both_verdicts(tmp_path):
    reproduce([by("at least", Verdict.reproduced)], tmp_path)
    for _ in range(2):  # and both stay when the claim is measured again
        (found,) = reproduce([by("within 1", Verdict.differs)], tmp_path)
        assert found["before"]["verdict"] == "reproduced"
        assert found["before"]["criterion"] == "at least"
    assert found["criterion"] == "within 1"


def test_sentences_of_a_claim_are_refreshed_and_numbers_stay(tmp_path):
    claim = by("at least", Verdict.partly)
    (found,) = reproduce([claim], tmp_path)
    refresh(tmp_path, [claim._replace(title="Better", undecided="no time")])
    assert read_entries(tmp_path, [claim]) == [
        {**found, "title": "Better", "undecided": "no time"}
    ]


def test_results_carry_the_commit(tmp_path, monkeypatch):
    (found,) = reproduce([by("at least", Verdict.partly)], tmp_path)
    assert found["commit"] == commit()
    monkeypatch.setenv("PATH", "")  # no git, as in a copy without its repository
    monkeypatch.setenv("FEDBLEND_COMMIT", "abc")
    assert commit() == "abc"
    monkeypatch.delenv("FEDBLEND_COMMIT")
    assert commit() is None


def test_an_installed_fedblend_does_not_hide_the_commit(monkeypatch):
    """It may lie outside of the repository of the reproductions."""
    here = commit()
    if here is None:
        pytest.skip("not in a repository")
    monkeypatch.setattr(fedblend, "__file__", "/elsewhere/fedblend/__init__.py")
    there = commit()
    assert there is not None
    assert there.partition("+")[0] == here.partition("+")[0]


def test_a_span_of_equal_values_is_one_value():
    assert span([0.12, 0.11], ".1f") == "0.1"
