# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The demonstration of a real federation: a link and four nodes on this machine.

The handwritten digits are dealt to forty clients, four classes each; the nodes are the
first four of them, and half of the digits are held out. Messages travel over Flower
with keys and TLS, as over a network. APFL runs, then FLIX.
"""

import csv
import fcntl
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.config.config import Config, difference, loads
from fedblend.config.config import load as load_config
from fedblend.data.datasets import load
from fedblend.data.partition.partitioners import classes_per_client
from fedblend.errors import RunError
from fedblend.runs.run_folder import Folder
from fedblend_federation.flower.processes import interrupted_by_sigterm
from fedblend_federation.ops import experiments
from fedblend_federation.ops.local_cluster import LocalCluster, local_cluster
from fedblend_federation.ops.templating import template

NODES = ("alice", "bob", "carol", "dave")
CLIENTS, CLASSES = 40, 4
MODELS = {"shared": "shared", "alone": "local", "personal": "personal"}
"""Models that a node may use, by title, with their names in the results."""

UNFINISHED = ".unfinished"
"""A file in the folder of a demonstration that has not come to its end."""
EXPERIMENTS = {"apfl": "APFL", "flix": "FLIX"}
"""Titles, by the name of a folder; ``templates`` has their configurations."""

POLICY = template("policy.toml").replace("discloses = []", 'discloses = ["own_models"]')
"""That of ``init``, and FLIX's nodes send a model of their own at enrollment."""


def demo(out: Path, show: Callable[[str], Any]) -> None:
    """Run the demonstration; whatever ends it, no process and no key is left.

    Args:
        out: the folder for a folder of results of each experiment; must be new.
        show: called with each line of output.

    Raises:
        RunError: results are there already, or something did not come up.
    """
    started = time.monotonic()

    def log(line: str) -> None:
        show(f"{time.monotonic() - started:5.0f} s  {line}")

    rows = _rows()
    held = ", ".join(f"{name} {_classes(own)}" for name, own in rows.items())
    show(f"Four nodes hold handwritten digits of four classes each: {held}.")
    with (
        interrupted_by_sigterm(),
        _alone_in(out),
        tempfile.TemporaryDirectory(prefix="fedblend-demo-") as folder,
        local_cluster(
            Path(folder) / "federation", rows, policy=POLICY, log=log
        ) as cluster,
    ):
        scores = {}
        for name, title in EXPERIMENTS.items():
            log(f"{title} begins")
            scores[title] = _run(cluster, out / name, name, log)
    show("")
    for line in _table(scores):
        show(line)
    show(sentence(scores))
    show(f"In {out}: {', '.join(EXPERIMENTS)}, each with summary.json and figures.")


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


def config_of(name: str) -> Config:
    """The configuration of an experiment of the demonstration."""
    return loads(template(f"demo_{name}.toml"), "demo")


@contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Have a folder to itself; what an interrupted demonstration left is removed.

    The mark stays if this one is interrupted, or killed.
    """
    mark = out / UNFINISHED
    marked = mark.exists()
    out.mkdir(parents=True, exist_ok=True)
    with open(mark, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{out}: a demonstration is running there") from None
        try:
            for name in EXPERIMENTS:
                _check_left(out / name, config_of(name), marked)
        except RunError:
            mark.unlink()
            raise
        for name in EXPERIMENTS:
            shutil.rmtree(out / name, ignore_errors=True)
        yield
        mark.unlink()


def _check_left(place: Path, config: Config, marked: bool) -> None:
    """Refuse to remove results, or anything of others."""
    folder = Folder(place)
    if not place.exists() or not any(place.iterdir()):
        return
    unfinished = folder.config.exists() and (marked or not folder.summary.exists())
    if not unfinished or difference(load_config(folder.config), config):
        raise RunError(f"{place}: exists already; --out names another folder")


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
    cluster: LocalCluster, out: Path, name: str, log: Callable[[str], None]
) -> dict[str, np.ndarray]:
    """Run an experiment; every node's accuracy with each model."""
    config = config_of(name)
    experiments.open_folder(out, config, cluster.settings, resume=False)
    last = 0

    def on_step(round: int, rounds: int) -> None:
        nonlocal last
        if round != last:
            last = round
            log(f"round {round} of {rounds}")

    experiments.run_experiment(cluster.settings, out, on_step=on_step, log=log)
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
