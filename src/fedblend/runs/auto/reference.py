# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What users have without a federation: boosted trees of scikit-learn.

*Own trees* are trained by each client on its own rows. A client with few rows keeps its
linear model, whose predictions its trees start from nothing to beat.

*Pooled trees* are trained on the rows of all clients in one place, with and without the
client as an input; a federation cannot have them. A pooled linear model needs no line:
FedAvg's model is the optimum on all rows, and own intercepts are the client column.

The number of trees is chosen on validation rows, for all clients together.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from fedblend.data.dataset import NUMBERS
from fedblend.runs.auto.candidates import ALONE, OWN_TREES, Candidate
from fedblend.runs.auto.linear import repeat_clients
from fedblend.runs.auto.tuning import (
    AnySplit,
    Predictions,
    Table,
    mean_loss,
    predict,
)

SPLITS = 5
"""Splits that trees are trained on, at most."""
FEW = 40
"""A client with fewer rows to train on keeps its linear model."""
STAGES = (10, 20, 40, 80)
"""Numbers of trees that are compared."""
SPEED = 2e8
"""Values that a tree reads in a second; a split has four times so many trees."""
TREES = {"early_stopping": False, "max_iter": STAGES[-1], "max_leaf_nodes": 15}
SMALL_TREES = {"max_leaf_nodes": 6, "min_samples_leaf": 10, "max_bins": 63}
MOST_CATEGORIES = 255
"""Of a column of categories in scikit-learn's trees."""


def evaluate_trees(
    table: Table, candidate: Candidate, left: Callable[[], float]
) -> Predictions | None:
    """Train boosted trees, and predict with them; None without time for it.

    Args:
        table: what is predicted.
        candidate: own trees, or pooled ones.
        left: the seconds that are left; raises if the user asked to stop.
    """
    own, validation, test = candidate.name == OWN_TREES, [], []
    pairs = zip(table.to_choose[:SPLITS], table.to_test[:SPLITS], strict=False)
    needed = 4 * STAGES[-1] * table.to_choose[0].train.inputs.size / SPEED
    for chosen, tested in pairs:
        if left() <= needed:
            break
        train = _own if own else _score_pooled
        validation.append(train(table, chosen))
        test.append(train(table, tested))
    if len(validation) < min(2, len(table.to_choose)):
        return None
    few = table.to_choose[: len(validation)]
    variants = [
        [each[place] for each in validation] for place in range(len(validation[0]))
    ]
    means = [mean_loss(table.task, few, scores) for scores in variants]
    best = int(np.argmin(means))
    setting = {"trees": STAGES[best % len(STAGES)]}
    if not own:
        setting["client_column"] = best // len(STAGES)
    complete = len(validation) == min(SPLITS, len(table.to_choose))
    return Predictions(setting, complete, variants[best], [each[best] for each in test])


def _score_pooled(table: Table, split: AnySplit) -> list[np.ndarray]:
    """Scores of the held-out rows: by every number of trees, then with the client."""
    parts = split.train, split.held
    owners = [repeat_clients(of.counts) for of in parts]
    found: list[np.ndarray] = []
    for client in (False, True):
        train, held = (of.inputs[:, 1:] for of in parts)
        options: dict[str, Any] = {}
        if client and len(parts[0].counts) <= MOST_CATEGORIES:
            train, held = (
                np.column_stack([rows, owner])
                for rows, owner in zip((train, held), owners, strict=True)
            )
            options["categorical_features"] = [train.shape[1] - 1]
        found += _boost(table, train, parts[0].targets, held, options)
    return found


def _own(table: Table, split: AnySplit) -> list[np.ndarray]:
    """Scores of the held-out rows by every number of trees of their own client."""
    linear = predict(table.task, ALONE, [split], table.settings[ALONE])[0]
    found = [linear.copy() for _ in STAGES]
    train, held = split.train, split.held
    for here, there in zip(train.clients, held.clients, strict=True):
        targets = train.targets[here]
        if len(targets) < FEW or there.start == there.stop:
            continue
        if table.task.kind != "regression" and len(np.unique(targets)) < 2:
            continue
        rows = train.inputs[here, 1:], held.inputs[there, 1:]
        scores = _boost(table, rows[0], targets, rows[1], SMALL_TREES)
        for stage, of in zip(found, scores, strict=True):
            stage[there] = of
    return found


def _boost(
    table: Table,
    train: np.ndarray,
    targets: np.ndarray,
    held: np.ndarray,
    options: dict[str, Any],
) -> list[np.ndarray]:
    """Scores [rows, outputs] by the trees of each of ``STAGES``."""
    from sklearn.ensemble import (
        HistGradientBoostingClassifier,
        HistGradientBoostingRegressor,
    )

    kind, settings = table.task.kind, {**TREES, **options}
    make = HistGradientBoostingClassifier
    if kind in NUMBERS:
        make = HistGradientBoostingRegressor
        settings["loss"] = "poisson" if kind == "counts" else "squared_error"
    trees = make(random_state=0, **settings)

    def scores() -> Iterator[np.ndarray]:
        if isinstance(trees, HistGradientBoostingRegressor):
            for means in trees.staged_predict(held):
                yield np.log(means)[:, None] if kind == "counts" else means[:, None]
            return
        for chances in trees.staged_predict_proba(held):
            odds = np.log(np.clip(chances, 1e-6, 1))
            if table.task.outputs == 1:
                yield odds[:, 1:] - odds[:, :1]
                continue
            whole = np.full((len(held), table.task.outputs), np.log(1e-6))
            whole[:, np.asarray(trees.classes_)] = odds
            yield whole

    with threadpool_limits(1):  # tables are small: threads would wait for each other
        trees.fit(train, targets.reshape(len(targets)))
        each = enumerate(scores(), 1)
        return [of for stage, of in each if stage in STAGES]
