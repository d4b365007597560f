# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of long claims, cached: used again, left out, or missed."""

import json

import pytest

from fedblend_reproductions.cache import Cache, NotCached, available, read_only
from fedblend_reproductions.claims import Claim, Finding, Verdict, reproduce
from fedblend_reproductions.page import Part, page


def claim(asked, needed=()):
    """A claim of two parts, of which only ``asked`` are asked for."""

    def check(quick, folder):
        store = Cache(folder, {"seeds": 1})
        found = available(asked, lambda name: store(name, lambda: len(name)), needed)
        return Finding(Verdict.partly, str(found), found, {})

    return Claim("X5", "Fifth", "it holds", check, lambda numbers: "1", resumable=True)


def shown(found):
    return page("A paper", "the command", Part([claim([])], [found], "figures"))


def test_what_is_not_cached_is_left_out_and_never_measured(tmp_path):
    reproduce([claim(["one"])], tmp_path)
    with read_only():
        (found,) = reproduce([claim(["one", "three"])], tmp_path)
        with pytest.raises(NotCached, match=r"three\.json: is not there"):
            reproduce([claim(["one", "three"], needed=["three"])], tmp_path)
    assert found["numbers"] == {"one": 3}
    (found,) = reproduce([claim(["one", "three"])], tmp_path)
    assert found["numbers"] == {"one": 3, "three": 5}


def test_a_part_in_other_settings_is_measured_again(tmp_path):
    for settings, wanted in (({"seeds": 1}, 1), ({"seeds": 1}, 1), ({"seeds": 2}, 3)):
        calls = iter((wanted,))
        assert Cache(tmp_path, settings)("part", lambda: next(calls)) == wanted  # noqa: B023
        with read_only():
            assert Cache(tmp_path, settings)("part", list) == wanted


def test_a_result_of_cached_parts_says_what_measured_them(tmp_path):
    (found,) = reproduce([claim(["one"])], tmp_path)
    here = {"commit": found["commit"], "device": found["device"]}
    assert found["measured_by"] == [here]
    words = "Cached parts: a GPU at commit 12345678."
    assert words not in shown(found)
    part = tmp_path / "cached" / "X5" / "one.json"
    stored = json.loads(part.read_text())
    stored |= {"commit": "1234567890", "device": "a GPU"}
    part.write_text(json.dumps(stored))
    (found,) = reproduce([claim(["one"])], tmp_path)
    assert words in shown(found)


def test_the_seconds_of_a_resumed_claim_are_those_of_its_last_parts(tmp_path):
    (first,) = reproduce([claim(["one"])], tmp_path)
    (second,) = reproduce([claim(["one"])], tmp_path)
    words = "the parts that were not cached"
    assert words not in shown(first)
    assert words in shown(second)
