# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What is written of claims, whatever they are about."""

import json

import numpy as np
import pytest

from fedblend_reproductions.cache import Cache, NotKept, alone, present
from fedblend_reproductions.claims import (
    Claim,
    Finding,
    Verdict,
    commit,
    read_entries,
    refresh,
    reproduce,
)
from fedblend_reproductions.page import page
from fedblend_reproductions.plots import banded, panels


def measured(quick):
    with panels(1, 1) as (figure, axes):
        banded(axes[0, 0], [0, 1], np.array([[1.0, 2.0], [3.0, 4.0]]), label="two")
    numbers = {"curve": np.array([1.0, np.inf]), 0.5: {"k": np.int32(3)}}
    return Finding(Verdict.partly, "2 | 3", numbers, {"curve": figure}, "one seed")


def broken(quick):
    raise RuntimeError("no such thing")


CLAIMS = [
    Claim("X1", "first", "it rises", measured),
    Claim("X2", "second", "it falls", broken),
]


def test_numbers_figures_and_page(tmp_path):
    (found,) = reproduce(CLAIMS[:1], tmp_path, quick=True)
    on_disk = json.loads((tmp_path / "X1.json").read_text())
    assert on_disk == found == read_entries(tmp_path, CLAIMS)[0]
    assert on_disk["numbers"] == {"curve": [1.0, None], "0.5": {"k": 3}}
    assert (tmp_path / "X1_curve.png").read_bytes().startswith(b"\x89PNG")
    text = page("A paper", "the command", [found], "figures")
    assert "| X1 first | it rises | 2 \\| 3 | partly reproduced |" in text
    assert "(figures/X1_curve.png)" in text
    assert "one seed" in text
    assert "--quick" in text


def test_what_was_found_before_stands_beside(tmp_path):
    before = {"verdict": "reproduced", "criterion": "it rose", "ours": "4"}
    claim = CLAIMS[0]._replace(
        check=lambda quick: measured(quick)._replace(before=before)
    )
    (found,) = reproduce([claim], tmp_path)
    assert found["before"] == before
    text = page("A paper", "the command", [found], "figures")
    assert "| partly reproduced (before: reproduced) |" in text
    assert "Before (reproduced): 4 Criterion: it rose" in text


def test_what_was_found_is_kept_when_a_later_claim_fails(tmp_path):
    with pytest.raises(RuntimeError, match="no such thing"):
        reproduce(CLAIMS, tmp_path)
    assert [found["claim"] for found in read_entries(tmp_path, CLAIMS)] == ["X1"]


def test_a_resumed_claim_does_not_pass_its_last_part_off_as_all_of_its_time(tmp_path):
    def kept(quick, folder):
        folder.mkdir(parents=True, exist_ok=True)
        return measured(quick)

    claim = Claim("X3", "third", "it stays", kept, resumable=True)
    (first,) = reproduce([claim], tmp_path)
    (second,) = reproduce([claim], tmp_path)
    words = "not kept from earlier runs"
    assert words not in page("A paper", "the command", [first], "figures")
    assert words in page("A paper", "the command", [second], "figures")


def by(criterion, verdict):
    def check(quick):
        return Finding(verdict, f"found by {criterion}", {}, {}, criterion=criterion)

    return Claim("X4", "fourth", "it is more", check, undecided="rows are missing")


def test_a_changed_criterion_leaves_both_verdicts(tmp_path):
    reproduce([by("at least", Verdict.reproduced)], tmp_path)
    for _ in range(2):  # and so it stays when the claim is measured again
        (found,) = reproduce([by("within 1", Verdict.differs)], tmp_path)
        assert found["before"]["verdict"] == "reproduced"
        assert found["before"]["criterion"] == "at least"
    text = page("A paper", "the command", [found], "figures")
    assert "| not reproduced (before: reproduced) |" in text
    assert "Before (reproduced): found by at least" in text
    assert "within 1" in text
    assert "It cannot be decided here: rows are missing." in text


def test_what_is_reproduced_is_not_undecided(tmp_path):
    found = reproduce([by("at least", Verdict.reproduced)], tmp_path)
    assert "rows are missing" not in page("A paper", "the command", found, "figures")


def test_sentences_of_a_claim_are_written_anew_and_numbers_stay(tmp_path):
    claim = by("at least", Verdict.partly)
    (found,) = reproduce([claim], tmp_path)
    refresh(tmp_path, [claim._replace(title="better", undecided="time is missing")])
    assert read_entries(tmp_path, [claim]) == [
        {**found, "title": "better", "undecided": "time is missing"}
    ]


def test_results_carry_the_commit(tmp_path, monkeypatch):
    (found,) = reproduce([by("at least", Verdict.partly)], tmp_path)
    assert found["commit"] == commit()
    monkeypatch.setenv("PATH", "")  # no git, as in a copy without its repository
    monkeypatch.setenv("FEDBLEND_COMMIT", "abc")
    assert commit() == "abc"
    monkeypatch.delenv("FEDBLEND_COMMIT")
    assert commit() is None


def kept_claim(asked, needed=()):
    """A claim of two parts, of which only ``asked`` are asked for."""

    def check(quick, folder):
        store = Cache(folder, {"seeds": 1})
        found = present(asked, lambda name: store(name, lambda: len(name)), needed)
        return Finding(Verdict.partly, str(found), found, {})

    return Claim("X5", "fifth", "it is kept", check, resumable=True)


def test_what_is_not_kept_is_left_out_and_never_measured(tmp_path):
    reproduce([kept_claim(["one"])], tmp_path)
    with alone():
        (found,) = reproduce([kept_claim(["one", "three"])], tmp_path)
        with pytest.raises(NotKept, match=r"three\.json: is not there"):
            reproduce([kept_claim(["one", "three"], needed=["three"])], tmp_path)
    assert found["numbers"] == {"one": 3}
    (found,) = reproduce([kept_claim(["one", "three"])], tmp_path)
    assert found["numbers"] == {"one": 3, "three": 5}


def test_a_result_of_kept_parts_says_what_measured_them(tmp_path):
    (found,) = reproduce([kept_claim(["one"])], tmp_path)
    here = {"commit": found["commit"], "device": found["device"]}
    assert found["measured_by"] == [here]
    words = "measured on a GPU, commit abc"
    assert words not in page("A paper", "the command", [found], "figures")
    part = tmp_path / "kept" / "X5" / "one.json"
    told = {**json.loads(part.read_text()), "commit": "abc", "device": "a GPU"}
    part.write_text(json.dumps(told))
    (found,) = reproduce([kept_claim(["one"])], tmp_path)
    assert words in page("A paper", "the command", [found], "figures")
