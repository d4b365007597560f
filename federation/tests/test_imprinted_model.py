# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A first layer of thresholds that puts single rows into differences of its gradients.

Unit k is on for the rows beyond a threshold t_k in one direction, and all units weigh
the same afterwards: the gradients of units k and k + 1 differ by the rows between t_k
and t_(k + 1). Of one row, weights over intercepts are that row.

Reference: Fowl, Geiping, Czaja, Goldblum, Goldstein, "Robbing the Fed", ICLR 2022.
"""

from typing import Any

import malicious
import numpy as np
import pytest
from malicious import BARE, WIDTH, Attacker, config, make_rows, write_node
from scipy.stats import norm

from fedblend_federation.message import ENROLLED

FOUND = 1e-3
"""The largest distance from a row, over its norm, at which it counts as found."""


def imprinted(attacker: Attacker, units: int) -> Any:
    model = attacker.model(0.0)
    # So small that several steps change the model little, beside its gradients.
    small, direction = 1e-6, np.full(WIDTH, WIDTH**-0.5)
    # Rows are those of two classes around 0 and 1 in every column.
    levels = norm.ppf((np.arange(units) + 0.5) / units, np.sqrt(WIDTH) / 2, 1.5)
    (layer,), last = model.hidden, model.last
    layer.weight[:], layer.bias[:] = small * direction, -small * levels
    last.weight[0], last.weight[1] = 1e-4, -1e-4
    return model


def update_of(attacker: Attacker, units: int) -> tuple[np.ndarray, np.ndarray]:
    """Changes of the first layer's weights and intercepts."""
    shared = imprinted(attacker, units)
    payload = attacker.executor.message._replace(shared=shared, round=None)
    reply = attacker.ask("round", payload, round=0, base=ENROLLED)
    by_shape = {array.shape: array for array in reply.arrays.values()}
    return by_shape[units, WIDTH], by_shape[units,]


def rows_found(
    weights: np.ndarray, intercepts: np.ndarray, rows: np.ndarray, near=FOUND
) -> int:
    """How many of the rows are among the differences of neighboring units."""
    apart, between = np.diff(weights, axis=0), np.diff(intercepts)
    known = np.abs(between) > 1e-20
    candidates = apart[known] / between[known, None]
    if not len(candidates):
        return 0
    gaps = np.linalg.norm(rows[:, None] - candidates[None], axis=2).min(axis=1)
    return int((gaps < near * np.linalg.norm(rows, axis=1)).sum())


def begin(
    home, policy: str | None, steps: int, units: int, seed=0, rate=1e-6
) -> Attacker:
    attacker = Attacker(write_node(home, seed, policy=policy))
    work = {"name": "fedavg", "rate": rate, "steps": steps, "batch_size": "all"}
    attacker.begin(
        config(
            algorithm=work,
            model={"name": "mlp", "hidden": [units]},
            run={"rounds": 1, "precision": "float64"},
        )
    )
    return attacker


@pytest.mark.parametrize("steps", [1, 5, 20])
def test_one_message_holds_most_rows_and_noise_for_rows_hides_them(tmp_path, steps):
    units, rows = 400, make_rows(0)[0]
    for policy in (BARE, None):
        home = tmp_path / ("noisy" if policy is None else "bare")
        found = rows_found(*update_of(begin(home, policy, steps, units), units), rows)
        assert found > 25 if policy is BARE else found <= 1


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 5, 20])
def test_625_rows_are_hidden(tmp_path, steps, monkeypatch):
    monkeypatch.setattr(malicious, "ROWS", 1000)
    units, rows = 3000, make_rows(0)[0]
    for policy in (BARE, None):
        home = tmp_path / ("noisy" if policy is None else "bare")
        found = rows_found(*update_of(begin(home, policy, steps, units), units), rows)
        print(f"{steps} steps, {home.name}: {found} of 625")
        assert found > 300 if policy is BARE else found <= 1


def test_the_sum_of_five_nodes_hides_their_rows(tmp_path):
    """What a secure sum opens is this sum, and nothing but the noise is in its way."""
    units, rows = 1500, np.concatenate([make_rows(seed)[0] for seed in range(5)])
    for policy in (BARE, None):
        home = tmp_path / ("noisy" if policy is None else "bare")
        answers = [
            update_of(begin(home / str(seed), policy, 1, units, seed), units)
            for seed in range(5)
        ]
        weights, intercepts = (
            np.sum(one, axis=0) for one in zip(*answers, strict=True)
        )
        found = rows_found(weights, intercepts, rows)
        assert found > 100 if policy is BARE else found <= 1


@pytest.mark.slow
def test_thousands_of_steps_average_the_noise(tmp_path, monkeypatch):
    """A limit: in one message a model that stands still is asked 10,000 times."""
    units, rows, small = 60, make_rows(0)[0], imprinted

    def strong(attacker, units):
        model = small(attacker, units)
        model.last.weight[0], model.last.weight[1] = 1.0, -1.0
        return model

    monkeypatch.setitem(globals(), "imprinted", strong)
    for steps, least, most in ((20, 0, 1), (10_000, 5, 40)):
        attacker = begin(tmp_path / str(steps), None, steps, units, rate=1e-14)
        update = update_of(attacker, units)
        assert rows_found(*update, rows) <= 1
        assert least <= rows_found(*update, rows, near=0.05) <= most
