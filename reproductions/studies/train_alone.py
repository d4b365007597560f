# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What training alone finds, compared with a dense search of rates and rounds.

Four problems of docs/measures.md on which training alone once stopped too early. Every
one is trained by ``fb.train_alone`` at its rate and with a tuned one, and by a search
of all rates and all rounds up to ten times those of the run; the best mean accuracy on
the same validation rows is what either could have found.

    python train_alone.py rare digits femnist mnist

Needs MNIST and FEMNIST where FEDBLEND_DATA says; one problem takes a minute or more.
"""

import argparse
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend.simulation.result import still_improving

FACTORS = (0.1, 1 / 3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0)
"""Multiples of the rate that are searched, up to ``FASTEST``."""
FASTEST = 3.0
LONGER = 10
"""How many times the rounds of the run are searched."""


class Problem(NamedTuple):
    """Splits of a federation with validation rows, its model, the work of a round."""

    splits: list[fb.FederatedData]
    model: Any
    rate: float
    steps: int
    rounds: int


def rare() -> Problem:
    """Whether a digit is a 7, of 20 clients: one class has a tenth of the rows."""
    inputs, labels = fb.datasets.load("digits").rows
    parts = fb.partition.iid(len(labels), 20, 0)
    rows = (inputs, (labels == 7).astype(np.int32))
    data = [fb.federate(rows, parts, validation=0.4, split=one) for one in range(3)]
    return Problem(data, fb.models.build("softmax", (8, 8, 1), 2), 0.03, 5, 50)


def digits() -> Problem:
    """Digits of 20 clients at a rate that is far too small."""
    rows = fb.datasets.load("digits").rows
    parts = fb.partition.iid(len(rows[1]), 20, 0)
    data = [fb.federate(rows, parts, validation=0.4, split=one) for one in range(3)]
    return Problem(data, fb.models.build("softmax", (8, 8, 1), 10), 0.0003, 5, 50)


def femnist() -> Problem:
    """Characters of 20 writers of LEAF at 14 x 14, softmax regression."""
    dataset = fb.datasets.load("femnist")
    inputs = dataset.rows[0].reshape(-1, 14, 2, 14, 2, 1).mean((2, 4))
    parts = list(fb.partition.by_key(dataset.keys))[:20]
    data = fb.federate((inputs, dataset.rows[1]), parts, validation=0.3)
    return Problem([data], fb.models.build("softmax", (14, 14, 1), 62), 0.1, 10, 50)


def mnist() -> Problem:
    """Digits of 20 clients with 250 rows each to train on, 250 to validate; an MLP."""
    rows = fb.datasets.load("mnist").rows
    parts = np.split(np.random.default_rng(0).permutation(len(rows[1]))[:10_000], 20)
    data = fb.federate(rows, parts, validation=0.5)
    model = fb.models.build("mlp", (28, 28, 1), 10, hidden=(64,))
    return Problem([data], model, 0.01, 5, 50)


PROBLEMS = {of.__name__: of for of in (rare, digits, femnist, mnist)}


def compare(problem: Problem) -> list[tuple[str, ...]]:
    """Lines of the table: what was chosen, its accuracy, seconds, a warning."""
    splits, model, rate, steps, rounds = problem
    loss = fb.losses.cross_entropy(model.apply)

    def alone(factor: Any) -> fb.Algorithm:
        return fb.local_only(loss, fb.Work(rate * factor, steps=steps, batch_size=10))

    settings: dict[str, Any] = {
        "rounds": rounds,
        "measure": fb.metrics.standard("classes", loss, model.apply),
        "splits": ["validation"],
    }
    keys, found = jax.random.split(jax.random.key(0), len(splits)), []
    for name, algorithm in {"its rate": alone(1.0), "tuned": alone}.items():
        begun = time.perf_counter()
        run = fb.train_alone(algorithm, model.init, splits, keys, **settings).complete()
        seconds = time.perf_counter() - begun
        budget = run.budget
        assert budget is not None
        warned = "warned" if still_improving(budget._asdict()) else ""
        accuracy = _accuracies(run, range(len(splits)))[-1]
        line = (f"{budget.rounds} of {budget.tried}", f"{budget.rate:.3g}")
        found.append((name, *line, f"{accuracy:.1%}", f"{seconds:.1f} s", warned))
    longer: dict[str, Any] = {"rounds": LONGER * rounds, "every": rounds // 25}
    searched = [factor for factor in FACTORS if factor * rate <= FASTEST]
    run = fb.simulate(
        alone,
        model.init,
        splits * len(searched),
        jnp.tile(keys, len(searched)),
        over=np.repeat(searched, len(splits)),
        **(settings | longer),
    ).complete()
    places = np.arange(len(searched) * len(splits)).reshape(len(searched), -1)
    curves = [_accuracies(run, of) for of in places.tolist()]
    best = max(range(len(searched)), key=lambda place: max(curves[place]))
    at = int(np.argmax(curves[best])) * run.every
    line = (f"{at} of {run.rounds}", f"{searched[best]:.3g}")
    return [*found, ("search", *line, f"{max(curves[best]):.1%}", "", "")]


def _accuracies(run: fb.Run, replicas: Iterable[int]) -> list[float]:
    """The mean over clients and seeds after every block."""
    return [
        float(
            np.mean(
                [of.measures["validation"]["personal"]["accuracy"].mean for of in block]
            )
        )
        for block in zip(*map(run.history, replicas), strict=True)
    ]


if __name__ == "__main__":
    fb.compile_cache()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", default=list(PROBLEMS), metavar="PROBLEM")
    for name in parser.parse_args().names:
        for line in compare(PROBLEMS[name]()):
            print(" | ".join((name, *line)), flush=True)
