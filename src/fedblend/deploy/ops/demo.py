# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The demonstration of a real federation: a link and four nodes on this machine.

The nodes hold the handwritten digits of the first four clients of ``fedblend demo``,
four classes each; half of them are held out. They talk over Flower with keys and TLS,
as they would over a network. APFL runs, then FLIX.
"""

import csv
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.config import toml
from fedblend.config.config import check
from fedblend.data.datasets import load
from fedblend.data.partition.partitioners import classes_per_client
from fedblend.deploy.ops import submit
from fedblend.deploy.ops.flwr_processes import ended_by_signals
from fedblend.deploy.ops.local_cluster import OneMachine, one_machine
from fedblend.errors import RunError
from fedblend.experiments.demo import CLASSES, CLIENTS
from fedblend.experiments.run_folder import Folder

NODES = ("alice", "bob", "carol", "dave")
MODELS = {"shared": "shared", "alone": "local", "personal": "personal"}
"""What a node may use, and its name in the results."""

_COMMON = """\
version = 1
name = "{name}"

[data]
partition = "nodes"
clients = 4
kind = "classes"
classes = 10
shape = [8, 8, 1]
test = 0.5

[run]
rounds = 6
every = 6
"""
_APFL = """
[model]
name = "softmax"

[algorithm]
name = "apfl"
alpha = 0.5
alpha_rate = 0.001
held_out = 0.2
rate = 0.3
steps = 20
batch_size = 10
"""
_FLIX = """
[model]
name = "softmax"
l2 = 0.01

[algorithm]
name = "flix_local"
alpha = 0.25
rate = 1.0
steps = 20
batch_size = 10
personal = { solver = "lbfgs", tolerance = 1e-3 }
"""
EXPERIMENTS = {
    "apfl": ("APFL", _COMMON.format(name="apfl") + _APFL),
    "flix": ("FLIX", _COMMON.format(name="flix") + _FLIX),
}
"""What each is called, and its configuration, by the name of its folder."""


def demo(out: Path, say: Callable[[str], Any]) -> None:
    """Run the demonstration; whatever ends it, no process and no key is left.

    Args:
        out: the folder for a folder of results of each experiment; must be new.
        say: told a line at a time.

    Raises:
        RunError: results are there already, or something did not come up.
    """
    for name in EXPERIMENTS:
        if (out / name).exists():
            raise RunError(f"{out / name}: exists already; --out names another folder")
    begun = time.monotonic()

    def tell(line: str) -> None:
        say(f"{time.monotonic() - begun:5.0f} s  {line}")

    rows = _rows()
    held = ", ".join(f"{name} {_classes(own)}" for name, own in rows.items())
    say(f"Four nodes hold handwritten digits of four classes each: {held}.")
    with (
        ended_by_signals(),
        tempfile.TemporaryDirectory(prefix="fedblend-demo-") as folder,
        one_machine(Path(folder) / "federation", rows, say=tell) as made,
    ):
        scores = {}
        for name, (title, text) in EXPERIMENTS.items():
            tell(f"{title} begins")
            scores[title] = _run(made, out / name, text, tell)
    say("")
    for line in _table(scores):
        say(line)
    say(sentence(scores))
    say(f"In {out}: {', '.join(EXPERIMENTS)}, each with summary.json and figures.")


def sentence(scores: dict[str, dict[str, np.ndarray]]) -> str:
    """The better method beside the alternatives of a node, in one sentence."""
    best = max(scores, key=lambda title: scores[title]["personal"].mean())
    personal, shared = (scores[best][of].mean() for of in ("personal", "shared"))
    alone = max(score["alone"].mean() for score in scores.values())
    return (
        f"Over the nodes the personal models of {best} are right on {personal:.1%} of "
        f"held-out digits, training alone to its own best round on {alone:.1%}, the "
        "shared model on "
        f"{shared:.1%}; with two dozen digits a node, a few percent mean little."
    )


def _rows() -> dict[str, dict[str, np.ndarray]]:
    inputs, targets = load("digits").rows
    parts = classes_per_client(targets, CLIENTS, CLASSES).rows
    return {
        name: {"inputs": inputs[part], "targets": targets[part]}
        for name, part in zip(NODES, parts, strict=False)
    }


def _classes(rows: dict[str, np.ndarray]) -> str:
    return "".join(str(label) for label in np.unique(rows["targets"]))


def _run(
    made: OneMachine, out: Path, text: str, tell: Callable[[str], None]
) -> dict[str, np.ndarray]:
    """Run an experiment; every node's accuracy with each model."""
    config = check(toml.parse(text, "demo"), "demo")
    submit.open_folder(out, config, made.settings, resume=False)
    last = 0

    def on_step(round: int, rounds: int) -> None:
        nonlocal last
        if round != last:
            last = round
            tell(f"round {round} of {rounds}")

    submit.run_experiment(made.settings, out, on_step=on_step, say=tell)
    with Folder(out).clients.open(newline="") as file:
        lines = list(csv.DictReader(file))
    return {
        model: np.array([float(line[f"test_{name}_accuracy"]) for line in lines])
        for model, name in MODELS.items()
    }


def _table(scores: dict[str, dict[str, np.ndarray]]) -> list[str]:
    head = f"{'accuracy on its own held-out digits':<38}" + "".join(
        f"{model:>10}" for model in MODELS
    )
    lines = [head]
    for title, score in scores.items():
        for place, name in enumerate(NODES):
            cells = "".join(f"{score[model][place]:>10.1%}" for model in MODELS)
            lines.append(f"{title + ', ' + name:<38}{cells}")
    return lines
