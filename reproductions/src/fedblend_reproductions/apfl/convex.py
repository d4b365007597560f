# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A1 and A2: softmax regression on MNIST, by classes a client and by participation."""

from pathlib import Path

import fedblend as fb
from fedblend_reproductions.apfl import methods, tables
from fedblend_reproductions.apfl.personal_methods import (
    fixed_pairs,
    mnist_clients,
    random_pairs,
)
from fedblend_reproductions.apfl.runs import Method, Task, compare
from fedblend_reproductions.cache import Cache
from fedblend_reproductions.claims import Claim, Finding, Numbers, Verdict, least_lead

L2 = 1e-4
"""Weight of the penalty, which the paper does not state."""
PARTITIONS = {
    "2 classes": random_pairs,
    "five pairs of classes": fixed_pairs,
    "4 classes": lambda labels, clients: fb.partition.classes_per_client(
        labels, clients, 4
    ),
    "IID": lambda labels, clients: fb.partition.iid(len(labels), clients),
}
LOWEST = 0.84
"""Lowest accuracy in figures; all methods are below in their first rounds."""
HOW = (
    "Every method has the same rates to choose from, on validation rows with one seed, "
    "ties by the others; other seeds are reported, all clients measured on MNIST's own "
    "test rows, shared out as the training rows are. Batches of 20 and a penalty of "
    "1e-4 are ours, the paper does not say; rates fall by 1 % a round. Alpha is the "
    "shared model's weight: the paper's 0.25 is 0.75 here."
)


def task(quick: bool, partition, share: float = 1.0) -> Task:
    """Softmax regression; ``share`` of the clients take part in a round."""
    federated_data = mnist_clients(quick, partition)
    model = fb.models.softmax(784, 10)
    return Task(
        federated_data,
        model,
        fb.losses.l2(fb.losses.cross_entropy(model.apply), L2),
        steps=10,
        batch_size=20,
        rounds=4 if quick else 100,
        cohort=round(share * federated_data.clients),
        rates=(0.1,) if quick else (0.01, 0.03, 0.1, 0.3, 1.0),
        tuning=4 if quick else 100,
        seeds=2 if quick else 3,
        blocks=2 if quick else 20,
    )


def _rows(this: Task, which: tuple[Method, ...], folder: Path, name: str):
    cache = Cache(folder / name.replace(" ", "_"), this.settings())
    return compare(this, which, cache)


def check_classes(quick: bool, folder: Path) -> Finding:
    """APFL and its rivals, from two classes a client to IID."""
    which = (methods.FEDAVG, methods.SCAFFOLD, methods.FIXED[2])
    if not quick:
        which = (methods.FEDAVG, methods.SCAFFOLD, *methods.FIXED, methods.ALONE)
    names = ("2 classes", "IID") if quick else tuple(PARTITIONS)
    groups = {
        name: _rows(task(quick, PARTITIONS[name]), which, folder, name)
        for name in names
    }
    best = {
        name: tables.chosen(rows, filter(tables.is_apfl, rows))
        for name, rows in groups.items()
    }
    gaps = {
        name: {
            label: tables.beyond(rows, best[name], label)
            for label in rows
            if not tables.is_apfl(label)
        }
        for name, rows in groups.items()
    }
    rivals = [*methods.FEDAVG.labels, *methods.SCAFFOLD.labels]
    held = {
        name: all(gaps[name][rival][0] > 2 * gaps[name][rival][1] for rival in rivals)
        for name in names
        if name != "IID"
    }
    held["IID"] = any(gaps["IID"][rival][0] <= 0 for rival in rivals)
    verdict = Verdict.partly if any(held.values()) else Verdict.differs
    return Finding(
        verdict=Verdict.reproduced if all(held.values()) else verdict,
        ours="Test accuracy: "
        + "; ".join(
            f"{name}: {best[name]} {100 * rows[best[name]].last.mean():.2f} %, "
            + ", ".join(
                f"{label} {100 * rows[label].last.mean():.2f}" for label in gaps[name]
            )
            for name, rows in groups.items()
        )
        + ". The claim holds for "
        + (", ".join(name for name in held if held[name]) or "none")
        + ".",
        numbers={
            "apfl_minus": gaps,
            "holds": held,
            "rows": {
                name: {label: row.numbers() for label, row in rows.items()}
                for name, rows in groups.items()
            },
        },
        figures={"rounds": tables.curves(groups, None if quick else LOWEST)},
        why="Criterion: where clients have few classes, the APFL that is best on "
        "validation rows beats FedAvg and SCAFFOLD, shared and localized, by more than "
        "two standard errors over clients; where rows are IID, one of these is at "
        "least as good. `alone` is not in the paper. Where rivals take the largest "
        "rate, 2, 3 and 10 were tried with one seed (FedAvg with 2 classes, 4 and five "
        "pairs, SCAFFOLD with 2 and 4): localized models are worse with each of them, "
        f"shared ones at most 0.4 points better on validation rows. {HOW}",
        table=tables.grouped(groups),
    )


def check_participation(quick: bool, folder: Path) -> Finding:
    """APFL and localized FedAvg, where a part of the clients is in a round."""
    fixed = methods.FIXED[2:] if quick else methods.FIXED
    which = (methods.FEDAVG, *fixed)
    shares = (0.3, 0.7) if quick else (0.3, 0.5, 0.7)
    groups = {
        f"participation {share}": _rows(
            task(quick, random_pairs, share), which, folder, f"share {share}"
        )
        for share in shares
    }
    gaps = {
        name: {
            label: tables.beyond(rows, label, "FedAvg, localized")
            for label in rows
            if tables.is_apfl(label)
        }
        for name, rows in groups.items()
    }
    better = [
        gap > 2 * error for those in gaps.values() for gap, error in those.values()
    ]
    least, *_, most = (rows["FedAvg, localized"] for rows in groups.values())
    gain = tables.beyond({"most": most, "least": least}, "most", "least")
    suffers = gain[0] > 2 * gain[1]
    tried = [abs(most.tried[rate] - least.tried[rate]) for rate in most.tried]
    verdict = Verdict.partly if any(better) else Verdict.differs
    return Finding(
        verdict=Verdict.reproduced if all(better) and suffers else verdict,
        ours=f"APFL beats localized FedAvg in {sum(better)} of {len(better)} cases "
        "(participation, alpha). "
        + "; ".join(
            f"{name}: "
            + ", ".join(
                f"{label} {100 * row.last.mean():.2f} %" for label, row in rows.items()
            )
            for name, rows in groups.items()
        )
        + f". Localized FedAvg gains {tables.points(gain)} points with more "
        "participation; at no rate that was tried does its accuracy on validation rows "
        f"change by more than {100 * max(tried, default=0.0):.2f}.",
        numbers={
            "localized_fedavg_gains": gain,
            "apfl_minus_localized_fedavg": gaps,
            "rows": {
                name: {label: row.numbers() for label, row in rows.items()}
                for name, rows in groups.items()
            },
        },
        figures={"rounds": tables.curves(groups, None if quick else LOWEST)},
        why="Criterion: every alpha beats localized FedAvg at every participation by "
        "more than two standard errors over clients, and localized FedAvg is better "
        "with the most participation than with the least by as much; partly if some of "
        "it. Clients have 2 classes at random. After 100 rounds every client has been "
        "in a round many times; what participation changes is how early APFL's own "
        f"models are any good, as the curves show. {HOW}",
        table=tables.grouped(groups),
    )


def headline_classes(numbers: Numbers) -> str:
    """The smallest lead over a rival where clients have few classes."""
    rivals = [*methods.FEDAVG.labels, *methods.SCAFFOLD.labels]
    gaps = [
        of[rival][0]
        for name, of in numbers["apfl_minus"].items()
        for rival in rivals
        if name != "IID"
    ]
    return f"With few classes a client APFL is {least_lead(min(gaps), 'its rivals')}"


def headline_participation(numbers: Numbers) -> str:
    """In how many cases APFL wins, and what participation changes."""
    groups = numbers["apfl_minus_localized_fedavg"].values()
    won = [gap > 2 * error for of in groups for gap, error in of.values()]
    cost = 100 * numbers["localized_fedavg_gains"][0]
    return (
        f"APFL wins {sum(won)} of {len(won)} cases; less participation costs localized "
        f"FedAvg {cost:.2f} points"
    )


A1 = Claim(
    "A1",
    "Softmax regression, by classes a client",
    "MNIST, 100 clients, regularized softmax regression: with 2 or 4 classes a client "
    "APFL beats FedAvg and SCAFFOLD, shared and localized, best with alpha 0.75; with "
    "IID rows it does not (Figure 2).",
    check_classes,
    headline_classes,
    resumable=True,
)
A2 = Claim(
    "A2",
    "Softmax regression, by participation",
    "With 30, 50 or 70 % of the clients in a round APFL beats localized FedAvg, which "
    "suffers from less participation (Figure 3).",
    check_participation,
    headline_participation,
    resumable=True,
    undecided="the paper draws curves without errors and states neither batch, penalty "
    "nor steps of the localized model; here its accuracy hardly changes with "
    "participation, by less than MNIST's test rows can tell from nothing",
)
