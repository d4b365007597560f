# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Handwriting by writer: alone, one shared model, or a model of one's own.

Forty writers of FEMNIST hold some 170 characters each, of 62 kinds. Every method
chooses its number on validation rows and is tested on other rows, with three splits.

    python examples/stories/handwriting.py [FOLDER]     figures go to FOLDER
"""

import os
import sys
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import fedblend as fb

TINY = os.environ.get("FEDBLEND_TINY") == "1"
WRITERS, ROUNDS, SEEDS, HIDDEN = (4, 2, 2, 8) if TINY else (40, 100, 3, 64)
OUT = Path(sys.argv[1] if len(sys.argv) > 1 else ".")

# --- data
femnist = fb.datasets.load("femnist")
images, labels = femnist.rows
ink = 1 - images  # paper is 0
by_writer = fb.partition.by_key(femnist.keys, minimum=120)
writers = by_writer.rows[:WRITERS]
splits = [
    fb.federate((ink, labels), writers, validation=0.15, test=0.25, split=seed)
    for seed in range(SEEDS)
]
model = fb.models.mlp(28 * 28, femnist.outputs, hidden=(HIDDEN,))
loss = fb.losses.cross_entropy(model.apply)


def at(rate):
    """A round of a client: ten steps on 20 characters each."""
    return fb.Work(rate, steps=10, batch_size=20)


# --- end


# --- methods
def fedavg(rate):
    """One shared model; as a second choice, fine-tuned by every writer."""
    return fb.finetune(fb.fedavg(loss, at(rate)), loss, at(0.1)._replace(steps=50))


def flix(rate, alpha):
    """Every writer's own model first; then the shared model that mixes best."""
    own = fb.solvers.patient_sgd(loss, at(0.1))
    return fb.flix(
        loss, lambda mixed: fb.fedavg(mixed, at(rate)), alpha=alpha, local=own
    )


def apfl(rate, alpha):
    """Own and shared model at the same time."""
    return fb.apfl(loss, at(rate), alpha=alpha, learn="fixed")


TRIED = {
    fedavg: [(0.1,), (0.3,), (1.0,), (3.0,)],
    flix: list(product((0.3, 1.0), (0.5, 0.9))),
    apfl: list(product((0.3, 1.0), (0.5, 0.9))),
}
# --- end
SETTINGS = {
    "rounds": ROUNDS,
    "every": max(ROUNDS // 10, 1),
    "measure": fb.metrics.standard("classes", loss, model.apply),
}


# --- run
def best_of(method, alone):
    """The method with the values that are best on validation rows, on all splits."""
    trial = fb.simulate(
        lambda values: method(*values),
        model.init,
        splits[0],
        jax.random.key(1),
        cohort=max(WRITERS // 3, 2),
        over=jnp.array(TRIED[method]),
        **{**SETTINGS, "every": ROUNDS, "splits": ["validation"]},
    )
    reached = [
        one["measures"]["validation"]["personal"]["accuracy"]["mean"]
        for one in trial.summary()
    ]
    value = TRIED[method][int(np.argmax(reached))]
    return value, fb.simulate(
        method(*value),
        model.init,
        splits,
        jax.random.split(jax.random.key(0), SEEDS),
        cohort=max(WRITERS // 3, 2),
        local=alone,
        **{**SETTINGS, "splits": ["test"]},
    ).complete()


alone = fb.train_alone(
    fb.local_only(loss, at(0.1)),
    model.init,
    splits,
    jax.random.split(jax.random.key(0), SEEDS),
    **{**SETTINGS, "splits": ["test"]},
)
chosen = {method.__name__: best_of(method, alone) for method in TRIED}
# --- end


def accuracies(run, kind: str) -> np.ndarray:
    """Test accuracy of every writer, the mean over seeds."""
    seeds = [seed["test"][kind]["accuracy"] for seed in run.evidence.measured]
    return np.mean(seeds, axis=0)


METHODS = {
    "alone": accuracies(chosen["fedavg"][1], "local"),
    "FedAvg": accuracies(chosen["fedavg"][1], "shared"),
    "fine-tuned": accuracies(chosen["fedavg"][1], "personal"),
    "FLIX": accuracies(chosen["flix"][1], "personal"),
    "APFL": accuracies(chosen["apfl"][1], "personal"),
}


def table() -> str:
    """The results, a line for each method."""
    lines = [
        "| model of a writer | test accuracy | worst tenth | better off than alone |"
    ]
    lines.append("|---|---|---|---|")
    for name, right in METHODS.items():
        tenth = np.sort(right)[: max(len(right) // 10, 1)].mean()
        better = int((right > METHODS["alone"]).sum())
        off = "" if name == "alone" else f"{better} of {len(right)}"
        lines.append(f"| {name} | {right.mean():.1%} | {tenth:.1%} | {off} |")
    return "\n".join(lines)


def gain_figure() -> Figure:
    """What every writer gains over training alone, by method."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    rng = np.random.default_rng(0)
    for place, right in enumerate(list(METHODS.values())[1:]):
        gain = 100 * (right - METHODS["alone"])
        jitter = rng.uniform(-0.25, 0.25, len(gain))
        axes.scatter(gain, place + jitter, s=14, alpha=0.6, linewidths=0)
        axes.plot([gain.mean()] * 2, [place - 0.35, place + 0.35], color="black")
    axes.axvline(0, color="gray", linewidth=0.8)
    axes.set_yticks(range(4), list(METHODS)[1:])
    axes.invert_yaxis()
    axes.set_xlabel("points of test accuracy gained over training alone")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def letters_figure() -> Figure:
    """The same five characters by eight writers."""
    shown = [femnist.label_names.index(sign) for sign in "147aG"]
    holding = [rows for rows in writers if set(shown) <= set(labels[rows])] or writers
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    grid = figure.subplots(len(shown), min(len(holding), 8), squeeze=False)
    for row, label in zip(grid, shown, strict=True):
        for axes, rows in zip(row, holding, strict=False):
            axes.set_axis_off()
            found = rows[labels[rows] == label]
            if len(found):
                axes.imshow(images[found[0], ..., 0], cmap="gray", vmin=0, vmax=1)
    return figure


print(table())
print(
    f"chosen on validation rows: FedAvg rate {chosen['fedavg'][0][0]:g}; "
    "FLIX rate {:g}, alpha {:g}; ".format(*chosen["flix"][0])
    + "APFL rate {:g}, alpha {:g}; ".format(*chosen["apfl"][0])
    + f"alone {chosen['fedavg'][1].summary()[0]['alone']['rounds']} rounds"
)
loser = int((METHODS["FedAvg"] - METHODS["alone"]).argmin())
found = ", ".join(f"{name} {right[loser]:.1%}" for name, right in METHODS.items())
print(f"the writer who loses most, {by_writer.names[loser]}: {found}")
OUT.mkdir(parents=True, exist_ok=True)
gain_figure().savefig(OUT / "handwriting_gains.png", dpi=120)
letters_figure().savefig(OUT / "handwriting_letters.png", dpi=100)
