# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A4: the convolutional network on CIFAR-10, as in Table 1."""

from pathlib import Path

import fedblend as fb
from fedblend.data.partition import federate_dataset
from fedblend_reproductions.apfl import methods, tables
from fedblend_reproductions.apfl.personal_methods import random_pairs
from fedblend_reproductions.apfl.runs import Task, compare
from fedblend_reproductions.cache import Cache
from fedblend_reproductions.claims import Claim, Finding, Numbers, Verdict, lead
from fedblend_reproductions.datasets import cifar10

METHODS = (
    methods.FEDAVG,
    methods.SCAFFOLD,
    methods.ALONE,
    *methods.FIXED,
    methods.LEARNT,
    methods.HELD,
)
QUICK = (methods.FEDAVG, methods.SCAFFOLD, methods.FIXED[1])
PAPER = {
    "APFL, alpha 0.75": "89.33 ± 0.26",
    "APFL, alpha 0.5": "88.74 ± 0.14",
    "APFL, alpha 0.25": "89.04 ± 0.22",
    "APFL, alpha learned": "88.87 ± 0.51",
    "FedAvg": "32.51 ± 0.47",
    "FedAvg, localized": "83.16 ± 0.37",
    "SCAFFOLD": "37.16 ± 0.30",
    "SCAFFOLD, localized": "85.25 ± 0.20",
}
WANTED = 0.05
"""APFL's least lead over localized FedAvg in the paper."""


def task(quick: bool) -> Task:
    """The paper's task; the quick one is linear, on a part of the rows."""
    cifar = cifar10()
    if quick:
        images, labels = cifar.rows
        cifar = cifar._replace(rows=(images[:1000], labels[:1000]))
    clients = 10 if quick else 100
    federated_data = federate_dataset(
        cifar, random_pairs(cifar.rows[1], clients), validation=0.1, test="official"
    )
    shape = (32, 32, 3)
    model = fb.models.softmax(3072, 10) if quick else fb.models.cnn(shape, 10)
    return Task(
        federated_data,
        model,
        fb.losses.cross_entropy(model.apply),
        steps=5 if quick else 10,
        batch_size=20,
        rounds=4 if quick else 100,
        cohort=None,
        rates=(0.03,) if quick else (0.003, 0.01, 0.03, 0.1),
        tuning=4 if quick else 50,
        seeds=2 if quick else 3,
        blocks=2 if quick else 10,
    )


def check(quick: bool, folder: Path) -> Finding:
    """Compare all methods on CIFAR-10, two classes a client."""
    this = task(quick)
    rows = compare(this, QUICK if quick else METHODS, Cache(folder, this.settings()))
    ours = tables.chosen(rows, filter(tables.is_apfl, rows))
    gaps = {
        label: tables.beyond(rows, ours, label)
        for label in rows
        if not tables.is_apfl(label)
    }
    won = [gaps[label][0] > 2 * gaps[label][1] for label in gaps if label in PAPER]
    verdict = Verdict.partly if any(won) else Verdict.differs
    lead = gaps["FedAvg, localized"][0]
    images = this.federated_data.train.total / this.federated_data.clients
    return Finding(
        verdict=Verdict.reproduced if all(won) else verdict,
        ours=f"{ours}, chosen on validation rows, has "
        f"{100 * rows[ours].last.mean():.1f} % in the mean over clients; more than "
        + ", ".join(
            f"{label} by {100 * gap:.1f} (error {100 * error:.1f})"
            for label, (gap, error) in gaps.items()
        )
        + ".",
        numbers={
            "rows": {label: row.numbers() for label, row in rows.items()},
            "apfl_minus": gaps,
            "alphas": tables.alphas(rows),
            "met": {"5 points above localized FedAvg": bool(lead >= WANTED)},
            "settings": this.settings(),
        },
        figures={"rounds": tables.curves({"CIFAR-10": rows})},
        why="Criterion: the APFL that is best on validation rows beats FedAvg and "
        "SCAFFOLD, shared and localized, on test rows by more than two standard errors "
        f"over clients; partly if some of them. {images:.0f} training images a client, "
        "where the paper has up to 500. The gain is over what begins at a shared "
        "model: `alone`, which the paper leaves out, is the one to compare with, and "
        "alpha learned by (10) goes to 0. Two classes a client are far easier than the "
        "ten that the shared model has to tell apart, and it has learned little of "
        "them in 100 rounds. The network is the authors'. Personal models stay some "
        "points below the paper's; in the authors' code clients have one of five pairs "
        "of classes, and are measured before aggregation. Every method has the same "
        f"rates to choose from, on validation rows after {this.tuning} rounds with one "
        f"seed, ties at the end; {this.seeds} other seeds are reported. The paper's "
        "methods have the rate 0.1 untuned (SCAFFOLD 0.05, falling by 5 %). All "
        "clients are measured after aggregation.",
        table=tables.table(rows, PAPER),
    )


def headline(numbers: Numbers) -> str:
    """APFL beside localized FedAvg."""
    gap, _ = numbers["apfl_minus"]["FedAvg, localized"]
    return f"APFL is {lead(gap, 'localized FedAvg')}"


A4 = Claim(
    "A4",
    "A convolutional network on CIFAR-10",
    "CIFAR-10, 2 classes a client, 100 rounds: APFL has 88.7 to 89.3 %, FedAvg 32.5 "
    "and localized 83.2, SCAFFOLD 37.2 and 85.3 (Table 1).",
    check,
    headline,
    "6.17 points ahead",
    resumable=True,
)
