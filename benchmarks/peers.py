# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""All peers on the same work, taking turns, as one table: ``make bench``.

A peer that cannot be started is left out, with a line that says why.
"""

import argparse
import os
from pathlib import Path

from turns import HERE, PYTHON, Peer, take_turns

OURS = "fedblend"
DEVICES = max(n for n in (1, 2, 4, 5, 10, 20) if n <= len(os.sched_getaffinity(0)))
"""Parts into which the cores, and the 100 clients, divide evenly."""


def own_python(name: str) -> Path:
    """The interpreter of a peer's own environment, if it has one here."""
    own = HERE.parent / name / "bin" / "python"
    return own if own.exists() else PYTHON


def start(model: str, block: int) -> list[Peer]:
    """Those peers that start."""
    torch, fedjax = own_python(".venv-torch"), own_python(".venv-fedjax")
    spread = ("--devices", DEVICES)
    wanted = [
        (OURS, PYTHON, "engine.py"),
        (f"{OURS}, its own model", PYTHON, "engine.py", "--shipped"),
        ("JAX by hand", PYTHON, "handwritten.py"),
        (f"JAX by hand, {DEVICES} devices", PYTHON, "handwritten.py", *spread),
        ("FedJAX", fedjax, "fedjax_round.py"),
        ("PyTorch, a loop", torch, "torch_loop.py"),
        ("Flower's simulation", torch, "flower_simulation.py"),
    ]
    started = []
    for name, python, script, *options in wanted:
        peer = Peer(name, python, script, model, "--hold", "--block", block, *options)
        if peer.failure is None:
            started.append(peer)
        else:
            print(f"{name} is left out of {model}: {peer.failure}")
    return started


def table(models: list[str], repeats: int, block: int) -> None:
    lines = [
        "| work | peer | s a round | to fedblend | least s | to fedblend "
        "| first block s | peak MB | loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for model in models:
        peers = start(model, block)
        found = take_turns(peers, repeats)
        ours = next(
            (f for p, f in zip(peers, found, strict=True) if p.name == OURS), found[0]
        )
        for peer, this in zip(peers, found, strict=True):
            summary = this.summary
            lines.append(
                f"| {model} | {peer.name} | {this.median:.4f} "
                f"| {this.ratio_to(ours):.2f} "
                f"| {this.least:.4f} | {this.least / ours.least:.2f} "
                f"| {summary['first']:.1f} "
                f"| {summary['megabytes']} | {summary['loss']:.3f} |"
            )
    print("\n".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["mlp", "softmax"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--block", type=int, default=5, help="rounds timed at once")
    given = parser.parse_args()
    table(given.models, given.repeats, given.block)
