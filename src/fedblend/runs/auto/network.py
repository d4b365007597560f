# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The methods on ``models.tabular``: one network for all, own levels, own heads.

They are trained as a federation trains them, by the rounds of ``network_rounds``; every
method and setting is a call of one compiled program.

Settings are rates and the number of rounds: the best of three rates, stopped where
validation rows are predicted best.
"""

from collections.abc import Callable, Mapping

import jax
import numpy as np

from fedblend.runs.auto.candidates import MOST_ROWS, Candidate
from fedblend.runs.auto.linear import PooledRows, repeat_clients
from fedblend.runs.auto.tuning import AnySplit, Predictions, Table, mean_loss
from fedblend.selection.network_rounds import (
    EVERY,
    Batches,
    draw_batches,
    network_program,
)

SPLITS = 5
"""Splits that networks are trained on, at most."""
ROUNDS = 240
"""The most rounds."""
BATCHES, LEAST, MOST = 16, 128, 1024
"""Rounds in which all rows are read once, and the rows of a round, if it may be so."""
RATES: Mapping[str, tuple[tuple[float, float], ...]] = {
    "network": ((1e-3, 0.0), (3e-3, 0.0), (1e-2, 0.0)),
    "network_level": ((1e-3, 0.03), (3e-3, 0.03), (1e-3, 0.01)),
    "network_head": ((1e-3, 0.003), (3e-3, 0.003), (3e-3, 0.01)),
}
"""The rate of Adam at the server, and that of a client's own part."""
SECONDS = 5.0
"""What the first rate takes, at least: to compile, and to train."""


def rows_of_a_client(rows: int, clients: int) -> int:
    """The rows of a client's batch."""
    return -(-int(np.clip(rows // BATCHES, LEAST, MOST)) // clients)


def _batches(splits: list[AnySplit], rows: int, held: int, size: int) -> Batches:
    """All splits, stacked; ``rows`` and ``held`` are what they are padded to."""

    def pad(values: np.ndarray, most: int) -> np.ndarray:
        return np.pad(values, [(0, most - len(values)), *[(0, 0)] * (values.ndim - 1)])

    def inputs(of: PooledRows, most: int) -> np.ndarray:
        whole = np.hstack([of.inputs[:, 1:], of.ranks])
        return pad(whole.astype(np.float32), most)

    def owner(of: PooledRows, most: int) -> np.ndarray:
        return pad(repeat_clients(of.counts), most)

    each = [
        Batches(
            inputs(split.train, rows),
            pad(split.train.targets.reshape(len(split.train.targets)), rows),
            owner(split.train, rows),
            (split.train.counts / split.train.counts.sum()).astype(np.float32),
            draw_batches(split.train.counts, size, ROUNDS, number),
            inputs(split.held, held),
            owner(split.held, held),
        )
        for number, split in enumerate(splits)
    ]
    return Batches(*map(np.stack, zip(*each, strict=True)))


def evaluate_network(
    table: Table, candidate: Candidate, left: Callable[[], float]
) -> Predictions | None:
    """Tune a method on the network, and predict with it; None without time for it.

    Args:
        table: what is predicted; a setting that is known stays.
        candidate: the method.
        left: the seconds that are left for it; raises if the user asked to stop.
    """
    name, task = candidate.name, table.task
    if left() <= SECONDS or table.tested.federated_data.train.total > MOST_ROWS:
        return None
    chosen, tested = list(table.to_choose[:SPLITS]), list(table.to_test[:SPLITS])
    both = [*chosen, *tested]
    most = max(len(split.train.targets) for split in both)
    held = max(len(split.held.targets) for split in both)
    size = rows_of_a_client(most, len(chosen[0].train.counts))
    inputs = int(np.prod(task.shape))
    program = network_program(task.kind, inputs, task.ranks, task.outputs)
    keys = jax.random.split(jax.random.key(0), len(chosen))

    def train(splits: list[AnySplit], rate: float, own: float) -> list[np.ndarray]:
        """The scores of the held-out rows of each split, [kept, rows, outputs]."""
        left()
        rates = rate, own * (name == "network_level"), own * (name == "network_head")
        found = np.asarray(program(keys, _batches(splits, most, held, size), rates))
        return [
            of[:, : len(split.held.targets)].astype(float)
            for of, split in zip(found, splits, strict=True)
        ]

    def validate(scores: list[np.ndarray], kept: int) -> float:
        now = [of[kept] for of in scores]
        if not all(np.isfinite(of).all() for of in now):
            return np.inf  # the rate was too large
        return mean_loss(task, chosen, now)

    setting, complete = table.settings.get(name), True
    best: tuple[float, list[np.ndarray]] | None = None
    if setting is None:
        for rate, own in RATES[name]:
            if best is not None and left() <= 0:
                complete = False
                break
            scores = train(chosen, rate, own)
            means = [validate(scores, kept) for kept in range(ROUNDS // EVERY)]
            kept = int(np.argmin(means))
            if best is None or means[kept] < best[0]:
                best = means[kept], [of[kept] for of in scores]
                setting = {"rate": rate, "own_rate": own, "rounds": EVERY * (kept + 1)}
                setting["batch_size"] = size
    assert setting is not None
    kept = int(setting["rounds"]) // EVERY - 1

    def final(splits: list[AnySplit]) -> list[np.ndarray]:
        found = train(splits, setting["rate"], setting["own_rate"])
        return [of[kept] for of in found]

    validation = final(chosen) if best is None else best[1]
    return Predictions(setting, complete, validation, final(tested))
