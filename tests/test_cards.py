# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark cards run, and what they find can be read."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
ABOUT = {
    "versions": {"jax": "1"},
    "hardware": {"device": "cpu", "backend": "cpu", "cores": 2},
    "commit": "abc",
    "date": "2026-01-01T00:00:00",
}


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.slow
@pytest.mark.usefixtures("benchmarks")
def test_a_card_that_is_ended_early_is_extrapolated_and_says_so(tmp_path):
    import card_page
    import card_runs
    import card_tasks

    card = dataclasses.replace(card_tasks.CARDS["G"].tiny(), shape=(3,), rounds=10)
    found = card_runs.timed(card, limit=0.0)
    assert found["rounds"] == 1
    assert found["extrapolated"]
    assert found["seconds_of_card"] > found["seconds"]["total"]
    parts = [found["seconds"][part] for part in card_page.PARTS]
    assert sum(parts) == pytest.approx(found["seconds"]["total"])


@pytest.mark.usefixtures("benchmarks")
def test_the_page_and_the_comparison_say_what_the_files_say(tmp_path):
    import card_page
    import card_tasks

    seconds = dict.fromkeys(card_page.PARTS, 1.0)
    card = {
        "title": "a card",
        "settings": card_tasks.CARDS["A"].settings(),
        "seconds": seconds | {"total": 5.0},
        "seconds_of_card": 15.0,
        "rounds": 500,
        "ms_a_round": 2.0,
        "store": "host",
        "extrapolated": True,
        "peers": {"vmap": {"failure": "no compiler"}},
    }
    failed = {"title": "another", "failure": "no room"}
    old = ABOUT | {"cards": {"A": card, "E": failed}}
    faster = card | {"seconds_of_card": 7.5, "ms_a_round": 1.0}
    new = ABOUT | {"cards": {"A": faster, "E": failed}}
    (tmp_path / "speed").mkdir()
    (tmp_path / "speed" / "two_cores.json").write_text(json.dumps(old))
    (tmp_path / "benchmarks.md").write_text("# Guide\n\n## Cards measured\n\nOld.\n")
    card_page.write(tmp_path / "speed", tmp_path / "benchmarks.md")
    page = (tmp_path / "benchmarks.md").read_text()
    assert page.startswith("# Guide\n") and "Old." not in page
    for said in (
        "500 rounds, extrapolated",
        "| 15.0 | 20.0 |",
        "no compiler",
        "no room",
    ):
        assert said in page
    assert card_page.comparison(old, new)[-1].startswith(
        "| A | 0.50 | 1.00 | 1.00 | 0.50 |"
    )


@pytest.mark.usefixtures("benchmarks")
def test_the_cards_have_the_numbers_of_weights_that_they_name():
    import jax

    import card_runs
    import card_tasks

    def weights(name):
        model = card_runs.model_of(card_tasks.CARDS[name])
        leaves = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
        return sum(leaf.size for leaf in leaves)

    assert weights("A") == 1_626_442
    assert weights("D-CNN") == 62_006  # 6-16-120-84, as in PyTorch's tutorial
    assert weights("F") == 582_026  # 32-64-512
    assert weights("G") == weights("E") == 199_210


@pytest.mark.slow
def test_all_cards_run_tiny(tmp_path):
    command = [sys.executable, FOLDER / "cards.py", "--tiny", "--out", tmp_path]
    subprocess.run(command, check=True)
    found = json.loads((tmp_path / "cards.json").read_text())["cards"]
    assert not [name for name, of in found.items() if "failure" in of]
