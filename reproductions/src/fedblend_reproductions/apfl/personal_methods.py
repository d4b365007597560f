# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A6: APFL beside perFedAvg, pFedMe and FedAvg on MNIST, as in Table 2."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

import fedblend as fb
from fedblend.data.dataset import generator
from fedblend.data.partition import (
    Partition,
    federate_dataset,
    group_rows,
    share_classes,
)
from fedblend_reproductions.apfl import methods, tables
from fedblend_reproductions.apfl.runs import Task, compare
from fedblend_reproductions.cache import Cache
from fedblend_reproductions.claims import Claim, Finding, Numbers, Verdict, least_lead

METHODS = (
    methods.FEDAVG,
    methods.PERFEDAVG,
    methods.PFEDME,
    methods.ALONE,
    *methods.FIXED,
    methods.LEARNT,
    methods.HELD,
    methods.HANDED,
    methods.FEWER,
)
QUICK = (methods.FEDAVG, methods.FIXED[2], *METHODS[-3:])
PAPER = {
    "APFL, alpha 0.75": "98.07 ± 0.10",
    "APFL, alpha 0.5": "98.04 ± 0.08",
    "APFL, alpha 0.25": "97.86 ± 0.09",
    "APFL, alpha learned": "98.10 ± 0.10",
    "FedAvg": "93.81 ± 0.29",
    "FedAvg, localized": "97.75 ± 0.15",
    "perFedAvg": "97.83 ± 0.12",
    "pFedMe": "95.92 ± 0.10",
}
ONE_RATE = {
    "verdict": Verdict.partly,
    "ours": "pFedMe, with its rate of theta tuned and the paper's rate of w, had 95.31 "
    "%, less than APFL, alpha 0.75 (99.03) by 3.72 (error 0.49). All others had the "
    "same rates to choose from as now, and came out up to 0.13 points away.",
    "criterion": "as now.",
}
"""A6 before both rates of pFedMe were tuned."""
FIXED = [label for method in methods.FIXED for label in method.labels]
LEARNT, HELD, HANDED, FEWER = (one for m in METHODS[-4:] for one in m.labels)


def random_pairs(labels: np.ndarray, clients: int) -> Partition:
    """Two classes a client, at random."""
    return fb.partition.classes_per_client(labels, clients, 2)


def fixed_pairs(labels: np.ndarray, clients: int) -> Partition:
    """Pairs of classes, each for an equal block of clients, as in the authors' code.

    With 10 classes and 100 clients, clients 0-19 share classes 0 and 5, clients 20-39
    classes 1 and 6, and so on.
    """
    names, codes = np.unique(labels, return_inverse=True)
    half = len(names) // 2
    pair = np.arange(clients) * half // clients
    both = np.stack([pair, pair + half], axis=1)
    takers = np.repeat(np.arange(clients), 2)
    rng = generator(0, "class pairs")
    owner = share_classes(codes, both.ravel(), takers, rng)
    return Partition(tuple(group_rows(owner, clients)))


def mnist_clients(quick: bool, partition) -> fb.FederatedData:
    """MNIST among 100 clients, or a part of it among 10."""
    mnist = fb.datasets.load("mnist")
    if quick:
        images, labels = mnist.rows
        mnist = mnist._replace(rows=(images[:2000], labels[:2000]))
    parts = partition(mnist.rows[1], 10 if quick else 100)
    return federate_dataset(mnist, parts, validation=0.1, test="official")


def task(quick: bool, partition) -> Task:
    """The paper's task; the quick one is linear, on a part of the rows."""
    federated_data = mnist_clients(quick, partition)
    model = fb.models.softmax(784, 10) if quick else fb.models.mlp(784, 10)
    return Task(
        federated_data,
        model,
        fb.losses.cross_entropy(model.apply),
        steps=5 if quick else 20,
        batch_size=20,
        rounds=4 if quick else 100,
        cohort=None,
        rates=(0.03, 0.1) if quick else (0.01, 0.03, 0.1, 0.3, 1.0),
        tuning=4 if quick else 30,
        seeds=2 if quick else 3,
        blocks=2 if quick else 10,
    )


def check(
    quick: bool,
    folder: Path,
    *,
    partition,
    name: str,
    once: Mapping[str, str] = MappingProxyType({}),
) -> Finding:
    """Compare all methods on MNIST, two classes a client."""
    this = task(quick, partition)
    rows = compare(this, QUICK if quick else METHODS, Cache(folder, this.settings()))
    published = [label for label in rows if label in PAPER]
    ours = tables.chosen(rows, filter(tables.is_apfl, published))
    fixed = [label for label in FIXED if label in rows]
    best = max(fixed, key=lambda label: rows[label].last.mean())
    rivals = {
        label: tables.beyond(rows, ours, label)
        for label in rows
        if not tables.is_apfl(label)
    }
    won = [gap > 2 * error for label, (gap, error) in rivals.items() if label in PAPER]
    verdict = Verdict.partly if any(won) else Verdict.differs
    learned = [label for label in (LEARNT, HELD, HANDED) if label in rows]
    behind = {label: tables.beyond(rows, label, best) for label in learned}
    lead, error = behind.get(LEARNT, (0.0, 0.0))
    costs = tables.beyond(rows, FEWER, FIXED[-1])
    above = rows[best].last.mean() - rows["FedAvg"].last.mean()
    return Finding(
        verdict=Verdict.reproduced if all(won) and lead >= -2 * error else verdict,
        ours=f"{ours}, chosen on validation rows, has "
        f"{100 * rows[ours].last.mean():.2f} % in the mean over clients; more than "
        + ", ".join(
            f"{label} by {100 * gap:.2f} (error {100 * of:.2f})"
            for label, (gap, of) in rivals.items()
        )
        + f". Best of the fixed weights {100 * rows[best].last.mean():.2f} ({best}). "
        + "From it: "
        + ", ".join(f"{label} {tables.points(gap)}" for label, gap in behind.items())
        + f"; 0.75 on 90 % of the rows is {tables.points(costs)} from 0.75 on all.",
        numbers={
            "rows": {label: row.numbers() for label, row in rows.items()},
            "apfl_minus": rivals,
            "alphas": tables.alphas(rows),
            "learned_minus_best_fixed": behind,
            "fewer_rows": costs,
            "met": {
                "best fixed alpha >= 98.7 %": bool(rows[best].last.mean() >= 0.987),
                "3 points above FedAvg": bool(above >= 0.03),
                **{
                    f"{label}: within 0.1 of best fixed": bool(gap >= -0.001)
                    for label, (gap, _) in behind.items()
                },
            },
            "settings": this.settings(),
        },
        figures={"rounds": tables.curves({name: rows}, None if quick else 0.94)},
        why="Criterion: the APFL that is best on validation rows beats every rival of "
        "the paper's on test rows, by more than two standard errors over clients, and "
        "alpha learned by (10) is at most as much behind the best fixed one; partly if "
        "some. (10) moves alpha on the rows that v is fitted to, and there v alone is "
        "best: alphas go to 0, and APFL to training alone. On held-out rows (a tenth) "
        "they stay inside, yet are behind the best fixed one. Not for the lack of the "
        "rows, see 0.75 without them, but for the alphas, which fall while the shared "
        "model is poor and then scatter, each on some 50 rows. Handed back: they start "
        f"at {methods.HIGH_START}, stop after half of the rounds, and all rows are "
        "trained on from then. This was chosen among 13 settings on validation rows of "
        "A6 (docs/alpha.md has them); A6b had no part in it. Every method "
        f"has the same rates to choose from, on validation rows after {this.tuning} "
        f"rounds with one seed, ties at the end; {this.seeds} other seeds are "
        "reported. Rates fall by 1 % a round. perFedAvg is without Hessians and "
        "deployed after as many steps as localized FedAvg. pFedMe has the paper's "
        f"lambda and K, and two rates, of theta and of w: {len(methods.PAIRS)} pairs "
        f"to choose from, where the others have {len(this.rates)} rates"
        f"{_at_an_end(rows)}. `alone`, "
        "training without any federation, is not in the paper. Alpha is the shared "
        "model's weight: the paper's 0.25 is 0.75 here. Test rows are MNIST's own, "
        "shared out as the training rows are; all clients are measured after "
        "aggregation, where the paper's numbers are of those that took part, before "
        "it.",
        table=tables.table(rows, PAPER),
        before={} if quick else once,
    )


def _at_an_end(rows: tables.Rows) -> str:
    """A clause where pFedMe's best rate of w is the largest or smallest tried."""
    tried = [w for _, w in methods.PAIRS]
    chosen = rows["pFedMe"].rate if "pFedMe" in rows else None
    if not isinstance(chosen, tuple) or min(tried) < chosen[1] < max(tried):
        return ""
    return f", and its best w, {chosen[1]:g}, is at an end of those tried"


def headline(numbers: Numbers) -> str:
    """APFL beside its rivals in the paper, and learned beside fixed alpha."""
    rivals = numbers["apfl_minus"].items()
    gap = min(gap for label, (gap, _) in rivals if label in PAPER)
    learned, _ = numbers["learned_minus_best_fixed"].get(LEARNT, (math.nan, math.nan))
    return (
        f"APFL is {least_lead(gap, 'its rivals')}; learned alpha {100 * learned:+.2f} "
        "to the best fixed"
    )


def _claim(name: str, title: str, partition, **once) -> Claim:
    return Claim(
        name,
        title,
        "MNIST, 2 classes a client, MLP, 100 rounds of 20 steps: APFL has 97.9 to 98.1 "
        "%, perFedAvg 97.8, pFedMe 95.9, FedAvg 93.8 and localized 97.75; alpha "
        "learned is best, by 0.03 (Table 2).",
        partial(check, partition=partition, name=title, **once),
        headline,
        "0.27 ahead; learned +0.03",
        resumable=True,
    )


A6 = _claim(
    "A6",
    "Other personal methods, random pairs of classes",
    random_pairs,
    once=ONE_RATE,
)
A6B = _claim("A6b", "Other personal methods, five pairs of classes", fixed_pairs)
