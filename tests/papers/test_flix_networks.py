# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""F9: images by writer and text by role."""

import numpy as np
import pytest

from fedblend.data.dataset import Dataset
from fedblend.papers.flix import images, text
from fedblend.papers.flix.network_task import ALPHAS, Lane, Score, largest
from fedblend.papers.flix.networks import Chosen, chosen, compared


def score(validation, test, clients=(0.0,)):
    return Score(np.array([0]), np.array([test]), validation, np.array(clients))


def test_rates_are_chosen_on_validation_rows_over_all_seeds():
    scores = {
        Lane(0, 0.5, 1.0, 0): score(0.9, 0.1),
        Lane(0, 0.5, 1.0, 1): score(0.1, 0.9),
        Lane(0, 0.5, 2.0, 0): score(0.6, 0.2),
        Lane(0, 0.5, 2.0, 1): score(0.6, 0.4),
        Lane(1, 0.5, 3.0, 0): score(1.0, 1.0),
        Lane(0, 0.7, 3.0, 0): score(1.0, 1.0),
    }
    best = chosen(scores, 0, 0.5)
    assert best.rate == 2.0
    assert best.test == pytest.approx(0.3)


def test_gaps_weigh_clients_by_their_test_rows():
    """Gaps .5 and 0 on 30 and 10 rows: .375, deviations .125 * 3/4 and .375 / 4."""
    ours = Chosen(1.0, [score(0, 0, [1.0, 0.5, np.nan])])
    other = Chosen(1.0, [score(0, 0, [0.5, 0.5, np.nan])])
    gap, error = compared(ours, other, np.array([30, 10, 0]))
    assert gap == pytest.approx(0.375)
    assert error == pytest.approx(np.hypot(0.125 * 0.75, 0.375 * 0.25))


def test_the_largest_clients_keep_their_test_rows():
    keys, test_keys = np.array(list("abbccc")), np.array(list("abc"))
    rows, test_rows = (np.arange(6), np.arange(6)), (np.arange(3), np.arange(3))
    data = Dataset(rows, "classes", 6, test_rows, keys, test_keys)
    small = largest(data, 2)
    assert small.rows[0].tolist() == [1, 2, 3, 4, 5]
    assert small.keys is not None
    assert small.keys.tolist() == list("bbccc")
    assert small.test_rows is not None
    assert small.test_rows[1].tolist() == [1, 2]


@pytest.mark.slow
def test_images_quick(data_home):
    found = images.check(True)
    numbers, norms = found.numbers, found.numbers["gradient_norms"]
    barely, well = (np.median(norms[rate]) for rate in images.QUICK.own.rates)
    assert 0.9 < barely / np.median(norms["start"]) <= 1
    assert well < 0.6 * np.median(norms["start"])
    best = numbers["flix"]["well"][0.1]
    assert best["test_by_examples"] > 0.7  # ten digits: a guess is right in a tenth
    assert best["test_by_examples"] > numbers["fedavg"]["test_by_examples"] + 0.1
    curve = numbers["flix"]["barely"][0.1]["test_by_examples[seed][record]"][0]
    assert curve[-1] > curve[0] + 0.2
    gap, _ = numbers["flix_minus"]["FedAvg"]
    assert f"({gap:+.4f}, " in found.ours
    assert set(found.figures) == {"rounds", "alphas"}


@pytest.mark.slow
def test_text_quick(data_home):
    found = text.check(True)
    numbers = found.numbers
    ours = [one["test_by_examples"] for one in numbers["flix"]["well"].values()]
    # A blank is a fifth of all characters; pairs tell more.
    assert min(ours) > 0.22
    assert max(ours) > numbers["local_only"]["test_by_examples"]
    assert not numbers["flix_local"]
    assert set(found.figures) == {"rounds", "alphas"}


@pytest.mark.slow
def test_two_seeds_and_flix_with_local_steps(data_home, monkeypatch):
    monkeypatch.setattr(text, "QUICK", text.QUICK._replace(local_rounds=10, seeds=2))
    found = text.check(True)
    stepping = found.numbers["flix_local"]
    assert list(stepping) == list(ALPHAS)
    assert stepping[0.9]["test_by_examples"] > 0.22
    assert "FLIX with local steps 0." in found.ours
    flix = found.numbers["flix"]
    seeds = "test_by_examples[seed][record]"
    counts = {kind: len(flix[kind][0.5][seeds]) for kind in flix}
    assert sorted(counts.values()) == [1, 2]  # only the better x_i have more seeds
    better = max(counts, key=lambda kind: counts[kind])
    for one in (flix[better][0.5], found.numbers["fedavg"]):
        first, second = one["test_by_examples[seed][record]"]
        assert len(first) == len(second) > 2
        assert not np.array_equal(first, second)
        ends = np.mean([first[-1], second[-1]])
        assert one["test_by_examples"] == pytest.approx(ends)
