# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The work that every peer does, and how it is timed. NumPy only: any peer imports it.

A round of federated averaging: each of 100 clients with 600 examples takes 20 steps of
SGD on batches of 20 rows drawn at random, and the results are averaged. A peer is a
script that offers ``prepare(model, block) -> advance``; ``advance()`` computes
``block`` rounds, waits for them and returns the parameters.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

CLIENTS, EXAMPLES, STEPS, BATCH, RATE = 100, 600, 20, 20, 0.5
LAYERS = {"mlp": (784, 200, 200, 10), "softmax": (784, 10)}

Params = Sequence[tuple]
"""For every layer its weights ``[outputs, inputs]`` and biases ``[outputs]``."""


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of all clients, one client's after the other's."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((CLIENTS * EXAMPLES, 784), np.float32) / 8
    teacher = rng.standard_normal((784, 10), np.float32)
    return inputs, (inputs @ teacher).argmax(axis=1).astype(np.int32)


def first_params(model: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """The initial parameters, the same for every peer."""
    rng = np.random.default_rng(1)
    widths = LAYERS[model]
    return [
        (
            rng.standard_normal((after, before), np.float32) * np.sqrt(2 / before),
            np.zeros(after, np.float32),
        )
        for before, after in pairwise(widths)
    ]


def mean_loss(params: Params) -> float:
    """The mean cross entropy over all rows: shows that the work was done."""
    here, labels = rows()
    layers = [(np.asarray(weight), np.asarray(bias)) for weight, bias in params]
    for weight, bias in layers[:-1]:
        here = np.maximum(here @ weight.T + bias, 0)
    scores = here @ layers[-1][0].T + layers[-1][1]
    scores -= scores.max(axis=1, keepdims=True)
    own = scores[np.arange(len(scores)), labels]
    return float(np.mean(np.log(np.exp(scores).sum(axis=1)) - own))


def peak_megabytes() -> float:
    """The most memory this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(
    prepare: Callable[[], Callable[[], Params | None]],
    *,
    block: int = 1,
    repeats: int = 5,
    hold: bool = False,
) -> None:
    """Time blocks of rounds and print them: JSON, one object a line, a summary last.

    ``prepare()`` gives the function that computes a block. The first block, which
    compiles, is reported apart. With ``hold`` every further block waits for a line on
    standard input, so that peers in several processes can take turns (``turns.py``);
    the end of the input ends it.
    """
    start = time.perf_counter()
    advance = prepare()
    ready = time.perf_counter()
    params = advance()
    first = time.perf_counter() - ready
    print(json.dumps({"setup": ready - start, "first": first}), flush=True)
    seconds = []
    for _ in sys.stdin if hold else range(repeats):
        start = time.perf_counter()
        params = advance()
        seconds.append((time.perf_counter() - start) / block)
        print(json.dumps({"seconds": seconds[-1]}), flush=True)
    summary = {
        "rounds": block * (1 + len(seconds)),
        "seconds": statistics.median(seconds) if seconds else None,
        "first": first,
        "megabytes": round(peak_megabytes()),
        "loss": None if params is None else round(mean_loss(params), 4),
    }
    print(json.dumps(summary), flush=True)


def main(prepare: Callable[..., Callable[[], Params]], **flags: dict) -> None:
    """The command line of a peer: ``prepare(model, block, **flags)``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=LAYERS)
    parser.add_argument("--block", type=int, default=1, help="rounds timed at once")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hold", action="store_true", help="take turns, by stdin")
    for name, how in flags.items():
        parser.add_argument(f"--{name}", **how)
    given = parser.parse_args()
    measure(
        lambda: prepare(given.model, given.block, **{n: vars(given)[n] for n in flags}),
        block=given.block,
        repeats=given.repeats,
        hold=given.hold,
    )
