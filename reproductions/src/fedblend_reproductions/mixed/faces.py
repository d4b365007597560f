# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""M3: the smile classifier, as in Figures 1a and 2a."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

import fedblend as fb
from fedblend_reproductions.claims import Claim, Finding, Numbers, Verdict, span
from fedblend_reproductions.datasets import celeba_smile
from fedblend_reproductions.mixed.figures import confident
from fedblend_reproductions.mixed.task import (
    ALGORITHMS,
    Curves,
    Task,
    central_alone,
    clients_alone,
    course,
    mixed_fl,
    oracle,
    with_test,
)
from fedblend_reproductions.plots import legend_above, panels

RATE = 0.005
"""The paper's 0.01 times w_f."""
CLIENTS, COHORT = 80, 20


def described(clients: int, cohort: int) -> str:
    """What is different from the paper, with so many clients and of a round."""
    sees = 5 * cohort
    return (
        "5000 faces of CelebA at 28 x 28 in [-1, 1] where the paper has about 176,000, "
        "and 1000 for testing, half of them smiling. Identities are not known, so "
        f"composite clients are dealt out at random: {clients} of about "
        f"{2500 / clients:.0f} smiling faces, where the paper's have 31, {cohort} a "
        "round where the paper has 100 of 2802; batches of 5 and 2 steps as there, and "
        "central batches by its rule, as many rows as the cohort sees "
        f"({sees} a step; {2 * sees} for one_way)."
    )


DATA = described(CLIENTS, COHORT)


def task(quick: bool, clients: int = CLIENTS, cohort: int = COHORT) -> Task:
    """The paper's task on the faces there are; quickly, half as fine and fewer."""
    faces = celeba_smile()
    rows = 2000 if quick else 5000
    if quick:
        clients, cohort = 20, 5
    inputs, labels = (part[:rows] for part in faces.rows)
    images = _ready(inputs, 2 if quick else 1)
    assert faces.test_rows is not None
    inputs, answers = (part[: rows // 5] for part in faces.test_rows)
    test = _ready(inputs, 2 if quick else 1), answers
    smiling = labels == 1
    federated_data = fb.federate(
        (images[smiling], labels[smiling]),
        fb.partition.iid(int(smiling.sum()), clients).rows,
    )
    model = fb.models.build("mlp", images.shape[1:], 1, hidden=(64,))
    loss = fb.losses.logistic(model.apply)
    return Task(
        with_test(federated_data, test),
        (images[~smiling], labels[~smiling]),
        model,
        loss,
        {"auc": fb.metrics.auc(model.apply), "loss": fb.metrics.mean_loss(loss)},
        weights=(0.5, 0.5),
        cohort=cohort,
        batch_size=5,
        steps=2,
    )


def _ready(images: np.ndarray, fold: int) -> np.ndarray:
    """In [-1, 1]; so many pixels by so many become one."""
    count, height, width, colors = images.shape
    blocks = images.reshape(count, height // fold, fold, width // fold, fold, colors)
    return (2 * blocks.mean(axis=(2, 4)) - 1).astype(np.float32)


NEAR, BELOW = 0.01, 0.1
"""AUC from the oracle's: near it, and far below it."""


class Size(NamedTuple):
    """Clients, those of a round, and how long all methods run."""

    clients: int
    cohort: int
    rounds: int
    points: int


FULL = Size(CLIENTS, COHORT, 600, 20)
PAPER = Size(100, 100, 2000, 20)
"""With the paper's cohort, for which there are just enough faces."""


def check(quick: bool, size: Size = FULL) -> Finding:
    """The three algorithms, the oracle, and either side alone, at two rates."""
    this = task(quick, size.clients, size.cohort)
    algorithms = ALGORITHMS[1:2] if quick else ALGORITHMS
    methods = {how: mixed_fl(this, how) for how in algorithms} | {
        "oracle": oracle(this),
        "clients alone": clients_alone(this),
    }
    if not quick:
        methods["server alone"] = central_alone(this)
    rates = (0.02,) if quick else (RATE, 3 * RATE)
    seeds = 2 if quick else 5
    rounds, points = (60, 2) if quick else (size.rounds, size.points)
    replicas = {
        "rates": np.repeat(rates, seeds).tolist(),
        "seeds": list(range(seeds)) * len(rates),
    }
    found = {
        name: course(this, method, **replicas, rounds=rounds, every=rounds // points)
        for name, method in methods.items()
    }
    at = {
        rate: slice(place * seeds, (place + 1) * seeds)
        for place, rate in enumerate(rates)
    }
    last = {
        name: curves.values["auc"][at[rates[0]], -1] for name, curves in found.items()
    }
    gaps = {name: last[name].mean() - last["oracle"].mean() for name in last}
    slower = {} if quick else {rate: _slower(found, at[rate]) for rate in rates}
    holds = {
        **{
            f"{how} near the oracle": bool(abs(gaps[how]) <= NEAR) for how in algorithms
        },
        "clients alone far below": bool(gaps["clients alone"] <= -BELOW),
        "parallel slower": any(gap > 2 * error for gap, error in slower.values()),
    }
    verdict = Verdict.partly if any(holds.values()) else Verdict.differs
    return Finding(
        verdict=Verdict.reproduced if all(holds.values()) else verdict,
        ours=f"After {rounds} rounds at the rate {rates[0] / this.weights[0]:g} of the "
        "paper, mean AUC on both kinds of faces: "
        + ", ".join(f"{name} {values.mean():.3f}" for name, values in last.items())
        + "".join(
            f". At rate {rate / this.weights[0]:g} parallel training has, in the mean "
            f"over rounds, {gap:+.4f} loss beyond the transfers (error {error:.4f})"
            for rate, (gap, error) in slower.items()
        )
        + ".",
        numbers={
            "rates": rates,
            "rounds": found["oracle"].rounds,
            "curves": {name: curves.values for name, curves in found.items()},
            "auc_last": last,
            "auc_beyond_oracle": gaps,
            "parallel_loss_beyond_transfers": {str(r): v for r, v in slower.items()},
            "holds": holds,
        },
        figures={"auc": _figure(found, at, this.weights[0])},
        why=f"Criterion: all three algorithms within {NEAR} AUC of the oracle, clients "
        f"alone at least {BELOW} below, and parallel training slower (more test loss "
        "in the mean over rounds than the mean of both transfers, by two standard "
        "errors over pairs of seeds) at one of the rates; partly if some: "
        + "; ".join(
            f"{name}: {'yes' if held else 'no'}" for name, held in holds.items()
        )
        + f". {described(size.clients, size.cohort)} All start and "
        f"run alike, {seeds} seeds, bands are 95 % confidence of the mean. The oracle "
        "takes as many steps on all faces in one place, with batches as large as both "
        "sides' together; clients and server alone have the paper's rate on their own "
        "loss. Three times the rate is shown as well, where algorithms differ more.",
    )


def _slower(found: dict[str, Curves], replicas: slice) -> tuple[float, float]:
    """Loss of parallel training beyond the transfers', and its standard error."""
    loss = {how: found[how].values["loss"][replicas].mean(axis=1) for how in ALGORITHMS}
    gaps = loss["parallel"] - (loss["one_way"] + loss["two_way"]) / 2
    return float(gaps.mean()), float(gaps.std(ddof=1) / np.sqrt(len(gaps)))


def _figure(found: dict[str, Curves], at: dict[float, slice], w_f: float) -> Any:
    with panels(2, len(at), width=4.2) as (figure, axes):
        for column, (rate, replicas) in enumerate(at.items()):
            axes[0, column].set_title(f"rate {rate / w_f:g}")
            for row, metric in enumerate(("auc", "loss")):
                for number, (name, curves) in enumerate(found.items()):
                    confident(
                        axes[row, column],
                        curves.rounds,
                        curves.values[metric][replicas],
                        color=f"C{number}",
                        label=name,
                        linestyle="-" if name in ALGORITHMS else "--",
                    )
            axes[0, column].set_ylim(0.4, 1)
            axes[1, column].set_ylim(0.2, 1.2)
            axes[1, column].set_xlabel("rounds")
        axes[0, 0].set_ylabel("AUC, all test faces")
        axes[1, 0].set_ylabel("loss, all test faces")
        legend_above(figure, axes[0, 0], 3 * len(at))
    return figure


def headline(numbers: Numbers) -> str:
    """AUC of the algorithms and of the oracle."""
    means = {name: np.mean(values) for name, values in numbers["auc_last"].items()}
    ours = span([means[how] for how in ALGORITHMS if how in means], ".3f")
    return f"The algorithms reach an AUC of {ours}, the oracle {means['oracle']:.3f}"


M3 = Claim(
    "M3",
    "Smiling faces on clients, the others at the server",
    "All three algorithms reach the AUC of an oracle that has all faces in one place, "
    "above 0.95; clients alone do not (Figure 1a). Parallel training converges slower "
    "than gradient transfer (Figure 2a), since the two gradients differ much.",
    check,
    headline,
    "above 0.95",
)
PAPER_SIZED = M3._replace(check=partial(check, size=PAPER))
