# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The ledger counts once what leaves a node, whatever happens in between."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from malicious import BARE, Attacker, Refused, config, write_node
from typer.testing import CliRunner

from fedblend.cli import app
from fedblend.errors import RunError
from fedblend.theory.privacy import gaussian_epsilon as epsilon
from fedblend_federation.client.ledger import Charge, Ledger, read_ledger
from fedblend_federation.client.node import node_of
from fedblend_federation.policy import policy as policies

ROUNDS = {"run": {"rounds": 3}}


@pytest.mark.parametrize("noise", [0.3, 1.0, 2.0, 20.0])
def test_epsilon_is_that_of_an_independent_accountant(noise):
    accounting = pytest.importorskip("dp_accounting")
    for answers in (1, 50):
        expected = accounting.get_epsilon_gaussian(noise / 2 / answers**0.5, 1e-6)
        found = epsilon(answers * (2 / noise) ** 2, 1e-6)
        assert found == pytest.approx(expected, rel=1e-4)


def test_answers_without_noise_leave_no_guarantee():
    ledger = Ledger()
    ledger.charge("a", "1", Charge(answers=1, rows=10, squared=0.25))
    assert "epsilon" in ledger.lines()[1]
    ledger.charge("b", "1", Charge(answers=1, rows=10, squared=float("inf")))
    assert ledger.lines()[1] == ("answers: no guarantee: 1 answers without noise")


class Killed(BaseException):
    """As if the process were gone."""


def test_a_process_that_dies_at_any_write_answers_alike_and_counts_once(
    tmp_path, monkeypatch
):
    replace, writes = os.replace, 0

    def dying(source, target):
        nonlocal writes
        writes -= 1
        if not writes:
            raise Killed
        replace(source, target)

    monkeypatch.setattr(os, "replace", dying)
    whole = _conversation(Attacker(write_node(tmp_path / "whole", policy=BARE)))
    number, died = 0, True
    while died:
        number += 1
        attacker, died = (
            Attacker(write_node(tmp_path / f"killed{number}", policy=BARE)),
            False,
        )
        writes, found = number, []
        for step in _steps(attacker):
            try:
                found.append(step())
            except Killed:
                died = True
                attacker.node, attacker.begun = node_of(attacker.settings), 0
                found.append(step())
        np.testing.assert_equal(found, whole)
        ledger = read_ledger(attacker.settings.folder)
        assert (ledger.answers, ledger.measures, ledger.experiments) == (2, 1, 1)
    assert number > 15


def _steps(attacker: Attacker) -> list[Callable[[], Any]]:
    """Enrollment, two rounds and a measurement; each message comes twice."""
    return [
        lambda: attacker.begin(config(**ROUNDS)),
        *(partial(attacker.round, number) for number in (0, 0, 1, 1)),
        *(partial(attacker.measure, 2) for _ in range(2)),
    ]


def _conversation(attacker: Attacker) -> list[Any]:
    return [step() for step in _steps(attacker)]


def test_noisy_gradients_are_counted_for_a_row(tmp_path):
    """Two rounds of four steps of 8 of 40 rows, each message twice; then no more."""
    attacker = Attacker(write_node(tmp_path / "node"))
    found = _conversation(attacker)
    np.testing.assert_equal(found[1], found[2])  # the reply that is on disk
    ledger = read_ledger(attacker.settings.folder)
    ((key, steps),) = ledger.row_steps.items()
    noise, share = map(float, key.split())
    assert (noise, steps, ledger.bare_rows) == (0.2, 8, 0)
    assert share == pytest.approx(1 - (1 - 1 / 40) ** 8, abs=1e-6)
    spent = ledger.row_epsilon(1e-6)
    policy = f"[budget]\nrow_epsilon = {spent - 0.01}\n"
    attacker = Attacker(write_node(tmp_path / "frugal", policy=policy))
    attacker.begin(config(**ROUNDS))
    attacker.round(0)
    for _ in range(2):
        with pytest.raises(Refused, match="policy budget"):
            attacker.round(1)
    assert read_ledger(attacker.settings.folder).answers == 1


def test_batches_that_the_server_knows_count_as_if_the_row_were_in_all(tmp_path):
    """It would choose seeds until a row is in every batch; chance bounds nothing."""
    policy = '[accept]\ndiscloses = ["batches"]\n'
    attacker = Attacker(write_node(tmp_path / "node", policy=policy))
    _conversation(attacker)
    ledger = read_ledger(attacker.settings.folder)
    assert ledger.row_steps == {"0.2 1.0": 8}
    assert ledger.row_epsilon(1e-6) == epsilon(8 / 0.2**2, 1e-6)


def test_noise_on_measures_is_counted_and_sent_again_as_it_was(tmp_path):
    policy = "[metrics]\nnoise = 5.0\nround_to = 15\n"
    attacker = Attacker(write_node(tmp_path / "node", policy=policy))
    attacker.begin(config(**ROUNDS))
    first, again, other = (attacker.measure(number) for number in (1, 1, 2))
    assert first == again != other
    ledger = read_ledger(attacker.settings.folder)
    numbers = 2 * sum(len(values) for values in first["test"].values())
    assert (ledger.measures, ledger.unprotected_measures) == (2, 0)
    assert ledger.measures_squared == pytest.approx(numbers / 25)


def test_experiments_are_counted_for_good(tmp_path, monkeypatch):
    monkeypatch.setattr("fedblend_federation.client.ledger.EXPERIMENTS", 2)
    attacker = Attacker(write_node(tmp_path / "node"))
    for _ in range(2):
        attacker.begin(config(**ROUNDS))
    with pytest.raises(Refused, match=r"policy budget: 2 so far; allowed: at most 2"):
        attacker.begin(config(**ROUNDS))
    attacker.ask(
        "enroll", attacker.model(0.0), experiment="experiment2", fields=attacker.terms
    )


def test_an_experiment_with_too_long_a_request_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr(policies.Limits, "operations", 1e12)
    policy = "[limits]\nseconds = 1e-9\n"
    attacker = Attacker(write_node(tmp_path / "node", policy=policy))
    attacker.begin(config(**ROUNDS))
    with pytest.raises(
        Refused, match=r"limits.seconds: .* so far; allowed: at most 1e-09"
    ):
        attacker.round(0)


def test_the_operator_sees_the_ledger(tmp_path):
    settings = write_node(tmp_path / "node")
    attacker = Attacker(settings)
    _conversation(attacker)
    path = str(tmp_path / "node" / "node.toml")
    shown = CliRunner().invoke(app, ["federation", "ledger", path])
    assert shown.exit_code == 0, shown.output
    totals, answers, rows, measures, own = shown.output.splitlines()
    assert totals.startswith("1 experiments, 2 answers from 80 rows, 1 measurements,")
    assert "no guarantee: 2 answers without noise" in answers
    assert "rows: epsilon " in rows
    assert "no guarantee: 1 measurements without noise" in measures
    assert own.startswith("experiment1: 2 answers, 1 measurements,")
    (settings.folder / "ledger.json").write_text("{")
    shown = CliRunner().invoke(app, ["federation", "ledger", path])
    assert isinstance(shown.exception, RunError)
    assert "ledger.json: ledger: the file is damaged" in str(shown.exception)
