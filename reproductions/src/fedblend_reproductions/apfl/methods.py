# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""APFL and the methods it is compared with, all tuned alike.

A label names the model that a row of a table is about.
"""

from typing import Any

import fedblend as fb
from fedblend_reproductions.apfl.runs import Method, Task, decaying

HELD_OUT = 0.1
"""Fraction of a client's training rows that only alpha uses."""
START, ALPHA_RATE = 0.75, 0.001
"""Of an alpha that is learned on held-out rows: mostly shared at first, as the paper
has it, and slow. Larger rates decide in the first rounds, when shared models are
poor."""
JUDGED: dict[str, Any] = {"alpha_rate": ALPHA_RATE, "held_out": HELD_OUT}
PAIRS = tuple(
    (theta, w) for theta in (0.01, 0.003, 0.02, 0.05) for w in (0.05, 0.01, 0.02, 0.1)
)
"""pFedMe's rates: of theta, and of w, whose steps are lambda times that long."""
HIGH_START = 0.9
"""Of one that stops halfway: alpha falls at first, while the shared model is poor, and
has less time to rise again. Chosen on validation rows of A6."""


def fedavg(task: Task, rate) -> fb.Algorithm:
    """FedAvg, and deployed after as many local steps as a round has."""
    return localized(
        task, fb.fedavg(task.loss, fb.Work(decaying(rate), **task.work)), rate
    )


def scaffold(task: Task, rate) -> fb.Algorithm:
    """SCAFFOLD, and deployed after as many local steps as a round has."""
    return localized(
        task, fb.scaffold(task.loss, fb.Work(decaying(rate), **task.work)), rate
    )


def localized(task: Task, algorithm: fb.Algorithm, rate) -> fb.Algorithm:
    """An algorithm whose shared model is fine-tuned before it is deployed."""
    return fb.finetune(algorithm, task.loss, fb.Work(decaying(rate), **task.work))


def alone(task: Task, rate) -> fb.Algorithm:
    """Training alone: no client shares its model."""
    return fb.local_only(task.loss, fb.Work(decaying(rate), **task.work))


def perfedavg(task: Task, rate) -> fb.Algorithm:
    """Per-FedAvg without Hessians; its two rates are the same, and it is deployed after
    as many steps as FedAvg is.
    """
    algorithm = fb.algorithms.perfedavg(
        task.loss,
        fb.Work(decaying(rate), **task.work),
        inner_rate=rate,
        hessian="none",
        adapt_steps=0,
    )
    return localized(task, algorithm, rate)


def pfedme(task: Task, rate) -> fb.Algorithm:
    """Moreau envelopes with the paper's lambda and K; ``rate`` is theta's, and w's."""
    theta, shared = rate
    return fb.algorithms.pfedme(
        task.loss,
        fb.Work(decaying(shared), **task.work),
        lam=15.0,
        inner_rate=theta,
        inner_steps=5,
    )


def fixed(alpha: float):
    """APFL with that weight of the shared model."""

    def build(task: Task, rate) -> fb.Algorithm:
        return fb.apfl(
            task.loss, fb.Work(decaying(rate), **task.work), alpha=alpha, learn="fixed"
        )

    return build


def learned(alpha: float):
    """APFL whose alpha moves by equation (10), from ``alpha``."""

    def build(task: Task, rate) -> fb.Algorithm:
        return fb.apfl(task.loss, fb.Work(decaying(rate), **task.work), alpha=alpha)

    return build


def own_rate(alpha: float):
    """The same, with one rate for the models and one for alpha."""

    def build(task: Task, rate) -> fb.Algorithm:
        models, own = rate
        return fb.apfl(
            task.loss,
            fb.Work(decaying(models), **task.work),
            alpha=alpha,
            alpha_rate=own,
        )

    return build


def held_out(alpha: float):
    """APFL whose alpha is learned on held-out rows."""

    def build(task: Task, rate) -> fb.Algorithm:
        return fb.apfl(
            task.loss, fb.Work(decaying(rate), **task.work), alpha=alpha, **JUDGED
        )

    return build


def handed_back(task: Task, rate) -> fb.Algorithm:
    """The same from a higher alpha; all rows train after half of the rounds."""
    half: dict[str, Any] = {"alpha": HIGH_START, "hand_back": task.rounds // 2}
    return fb.apfl(task.loss, fb.Work(decaying(rate), **task.work), **half, **JUDGED)


def fewer_rows(task: Task, rate) -> fb.Algorithm:
    """Fixed alpha without the held-out rows: the cost of holding them out."""
    held: dict[str, Any] = {"alpha": START, "alpha_rate": 0.0, "held_out": HELD_OUT}
    return fb.apfl(task.loss, fb.Work(decaying(rate), **task.work), **held)


FEDAVG = Method("fedavg", fedavg, {"FedAvg": "shared", "FedAvg, localized": "personal"})
SCAFFOLD = Method(
    "scaffold", scaffold, {"SCAFFOLD": "shared", "SCAFFOLD, localized": "personal"}
)
ALONE = Method("alone", alone, {"alone": "personal"}, alone=True)
PERFEDAVG = Method("perfedavg", perfedavg, {"perFedAvg": "personal"})
PFEDME = Method(
    "pfedme with two rates",
    pfedme,
    {"pFedMe": "personal"},
    lambda task: PAIRS,
)
FIXED = tuple(
    Method(f"apfl {alpha}", fixed(alpha), {f"APFL, alpha {alpha}": "personal"})
    for alpha in (0.25, 0.5, 0.75)
)
LEARNT = Method("apfl learned", learned(0.5), {"APFL, alpha learned": "personal"})
HELD = Method("apfl held-out", held_out(START), {"APFL, alpha held-out": "personal"})
HANDED = Method("apfl handed back 0.9", handed_back, {"APFL, handed back": "personal"})
FEWER = Method("apfl fewer rows", fewer_rows, {"APFL, 0.75, 90 % rows": "personal"})
