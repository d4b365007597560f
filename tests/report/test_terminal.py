# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
import io

import pytest
from rich.console import Console

from fedblend.report.tables import human_bits
from fedblend.report.terminal import show
from fedblend.report.verdict import sentences
from fedblend.stats.gains import GainSummary

NOBODY = GainSummary(0, 0, 0, 0, 1, 2, 4, 0, 0, 1, 3, 0.1, -0.1, 0.3)


def printed(summaries, width=100, **more):
    console = Console(file=io.StringIO(), width=width)
    show({"runs": summaries, **more}, console)
    return console.file.getvalue()  # pyright: ignore


@pytest.fixture
def summaries(rows):
    bits = {
        "up": 4000,
        "down": 2_000_000,
        "up_per_client": {"least": 1, "mean": 1000.0, "most": 1},
        "down_per_client": {"least": 1, "mean": 500_000.0, "most": 1},
        "last_broadcast": 0,
    }
    return [
        {**row, "bits": bits, "seconds": 1.5, "compile_seconds": 2.0}
        for row in rows[-2:]
    ]


def test_a_finished_run_is_shown_with_all_there_is_to_know(summaries):
    text = printed(summaries)
    assert "test rows after round 4, mean of 2 seeds" in text
    for heading in ("mean", "weighted", "spread", "worst tenth", "worst"):
        assert heading in text
    # Personal accuracy: 0.8 + 0.015 over clients + 0.04 after 4 rounds + 0.0005.
    assert "0.8555" in text
    assert "up 4 kbit (1 kbit a client), down 2 Mbit (500 kbit a client)" in text
    assert "compiling 2.00 s" in text


def test_the_verdict_is_that_of_the_page(summaries):
    assert "clearly" not in printed(summaries)
    harmed = {"test": {"accuracy": {"than_local": NOBODY._asdict()}}}
    text = " ".join(printed(summaries, harmed=harmed).split())
    _, lines = sentences({"runs": summaries, "harmed": harmed})
    assert len(lines) == 4 and all(line in text for line in lines)
    unseen = [{**one, "unseen": {**one, "clients": 2}} for one in summaries]
    more = {"harmed": harmed, "unseen": {"harmed": harmed}}
    text = " ".join(printed(unseen, **more).split())
    assert "test rows of 2 unseen clients after round 4" in text
    assert "Unseen clients: Of 4 clients, 2 are clearly better off" in text


def test_what_is_not_finite_is_said(summaries):
    lost = NOBODY._replace(clients=0, helped=0, not_finite=3, unmatched=1)._asdict()
    lost |= {"mean_gain": None, "mean_gain_low": None, "mean_gain_high": None}
    text = printed(summaries, harmed={"test": {"accuracy": {"than_local": lost}}})
    assert "The models of 3 clients are broken" in text
    assert "nan" not in text


def test_an_unfinished_run_is_shown_from_its_rows(rows):
    text = printed(rows[:2])
    assert "after round 0" in text
    assert "nan" not in text


def test_nothing_is_wider_than_the_console(summaries):
    for width in (40, 80):
        text = printed(summaries, width)
        assert max(len(line) for line in text.splitlines()) <= width


@pytest.mark.parametrize(
    "bits, said",
    [
        (0, "0 bit"),
        (999, "999 bit"),
        (999.6, "1 kbit"),
        (1_248_000, "1.25 Mbit"),
        (5e15, "5e+03 Tbit"),
    ],
)
def test_bits_are_readable(bits, said):
    assert human_bits(bits) == said
