# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Two nodes that differ in one test row, and a server that guesses which it asks.

Its models have scores that are not finite above a value of a column, where the node has
one row or none. Guesses are right no more often than the noise of metrics allows.
"""

import json
from math import sqrt
from typing import Any

import jax
import numpy as np
import pytest
from malicious import COLUMNS, Attacker, config, make_rows, write_node
from scipy.stats import binomtest, norm

LARGEST, ALLOWED, NOISE, BOUND = 3e38, 5.0, 4.0, 10.0
PLAYS = 200
"""In each of both worlds."""


@pytest.fixture(autouse=True)
def many_measurements(monkeypatch):
    monkeypatch.setattr("fedblend_federation.client.ledger.MEASURES", 1000)


def world(home, game: dict[str, Any], odd: float | None) -> Attacker:
    """A node, of whose test rows one has this first value instead of its own."""
    policy = (
        f"[metrics]\nnoise = {NOISE}\nround_to = 9\nbound = {BOUND}\n"
        f"names = {game['names']}\ntotal = 1000\n"
    )
    attacker = Attacker(write_node(home, policy=policy))
    numbers = game["kind"] == "regression"
    data = {"kind": game["kind"], "labels": None if numbers else ["ill", "well"]}
    text = config(data=data, model=game["model"], measure={"metrics": game["names"]})
    inputs, targets = make_rows(0)
    state: Any = targets / 4 if numbers else np.array(["ill", "well"])[targets]

    def write() -> None:
        rows = [
            ",".join([*map(str, row), str(own)])
            for row, own in zip(inputs.tolist(), state, strict=True)
        ]
        lines = [",".join([*COLUMNS, "state"]), *rows]
        (home / "rows.csv").write_text("\n".join(lines))

    write()
    attacker.begin(text)
    if odd is None:
        return attacker
    tested = attacker.executor.setup.splits["test"].examples[0][0]
    inputs[np.abs(inputs - np.asarray(tested)).sum(axis=1).argmin(), 0] = odd
    write()
    again = Attacker(attacker.settings)
    again.begun = 1
    again.begin(text)
    return again


def overflowing(attacker: Attacker) -> Any:
    """Scores that are infinite, or the difference of infinite ones, above ALLOWED.

    All weights of the first value are large; further layers subtract what they make.
    """
    model = attacker.model(0.0)
    first, *others = [leaf for leaf in jax.tree.leaves(model) if leaf.ndim == 2]
    first[:, 0] = LARGEST / ALLOWED
    for leaf in others:
        leaf[:] = (1e-38, -1e-38)
    return model


GAMES: dict[str, dict[str, Any]] = {
    "NaN": {
        "kind": "classes",
        "model": {"name": "mlp", "hidden": [2]},
        "names": ["loss", "accuracy"],
    },
    "NaN of numbers": {
        "kind": "regression",
        "model": {"name": "mlp", "hidden": [2]},
        "names": ["mae", "mse", "loss"],
    },
    "infinite": {
        "kind": "classes",
        "model": {"name": "softmax"},
        "names": ["log_loss", "brier"],
    },
}


@pytest.mark.parametrize("name", GAMES)
def test_a_row_that_is_not_finite_is_told_by_no_more_than_the_noise(name, tmp_path):
    game, names = GAMES[name], GAMES[name]["names"]
    seen = []
    for number, odd in enumerate((None, 2 * ALLOWED)):
        one = world(tmp_path / str(number), game, odd)
        first, setup = one.measure(0, overflowing(one)), one.executor.setup
        written = (one.settings.folder / one.experiment / "measures.json").read_text()
        measured = json.loads(written)
        counts = {name: split.total for name, split in setup.splits.items()}
        again = (
            one.node.permissions().disclose(measured, counts) for _ in range(PLAYS - 1)
        )
        seen += [shown.get("test", {}).get("shared", {}) for shown in (first, *again)]
    assert [sorted(shown) for shown in seen] == [sorted(names)] * 2 * PLAYS
    units = [{"accuracy": -1, "brier": 1}.get(name, 1 / BOUND) for name in names]
    scores = np.array([[shown[name] for name in names] for shown in seen]) @ units
    guesses = scores > scores.mean()
    right = int((guesses == np.repeat([False, True], PLAYS)).sum())
    # Of the best test between two Gaussians, in as many numbers.
    most = norm.cdf(sqrt(len(names)) / NOISE / 2)
    rate = binomtest(right, 2 * PLAYS).proportion_ci(0.999, "exact")
    assert rate.low <= most, right
