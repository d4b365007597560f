# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Noise of BLT strategies beside the binary tree and independent noise, equal epsilon.

``python correlated_noise.py [errors] [digits] [femnist]`` prints the figures
of docs/privacy.md; without words all of them. FEMNIST is where FEDBLEND_DATA says.

errors: the mean and the largest expected squared error over rounds at equal epsilon,
over the lower bound of any factorization for clients that take part once, the square of
the nuclear norm of the matrix of prefix sums over the number of rounds.

digits, femnist: final test accuracy of the shared model. All mechanisms have the same
rounds and cohort, the epsilon of independent noise, and one grid of local rates and
clips. Each takes part of the clients as suits it: in turns (BLT, independent noise) or
in epochs of whole trees (trees of 4 and 8).

Criterion, fixed before the run: the grid's point of each mechanism has the best mean
accuracy on TUNING seeds; then the means over SEEDS other seeds are compared, paired by
seed. BLT beats the best tree on a set if the 95 % interval (Student) of the mean
difference is above 0; the same for independent noise.
"""

import math
import sys
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import t

import fedblend as fb
from fedblend.theory import blt, privacy
from fedblend_reproductions.dp_ftrl import dp_ftrl, tree_cost

TUNING, SEEDS = range(100, 105), range(10)
TREES = (4, 8)
BUFFERS = 3


class Setting(NamedTuple):
    """A federation, its plan, and the noise of independent rounds."""

    data: fb.FederatedData
    model: Any
    rounds: int
    cohort: int
    noise: float
    delta: float
    rates: tuple[float, ...]
    clips: tuple[float, ...]
    batch_size: int | None
    steps: int


def digits() -> Setting:
    """400 clients with three or four training rows each; the example of the page."""
    found = fb.datasets.load("digits")
    parts = fb.partition.iid(len(found.rows[1]), 400)
    data = fb.federate(found.rows, parts, test=0.2)
    model = fb.models.build("softmax", (8, 8, 1), found.outputs)
    grid = (0.03, 0.1, 0.3, 1.0), (0.2, 0.5)
    return Setting(data, model, 32, 50, 4.0, 1e-4, *grid, None, 5)


def femnist() -> Setting:
    """300 writers of LEAF at 7 x 7, 62 classes: 3,100 parameters, ink on 0."""
    found = fb.datasets.load("femnist")
    images, labels = found.rows
    images = 1 - np.asarray(images).reshape(-1, 7, 4, 7, 4).mean(axis=(2, 4))[..., None]
    parts = fb.partition.by_key(found.keys).rows
    data = fb.federate((images, labels), parts, test=0.2)
    model = fb.models.build("softmax", (7, 7, 1), found.outputs)
    grid = (0.3, 1.0, 3.0), (0.2, 0.5)
    return Setting(data, model, 96, 30, 6.0, 1e-3, *grid, 20, 5)


def mechanisms(of: Setting) -> dict[str, tuple[Any, float, dict[str, int]]]:
    """By name: a transform with its noise, that noise, and how clients take turns.

    All have the epsilon of independent noise, which is printed.
    """
    most = of.data.clients // of.cohort
    cost: dict[str, Any] = {"rounds": of.rounds, "delta": of.delta}
    alone = tree_cost(noise=of.noise, tree=1, epoch=most, **cost)
    print(f"  {alone}, {of.rounds} rounds of {of.cohort}, clients in every {most}th")
    assert alone.epsilon is not None
    usual: dict[str, Any] = {"cohort": of.cohort, "noise_from": "seed"}
    turns = fb.Cohort(of.cohort, separation=most)
    strategy = blt.optimal(rounds=of.rounds, separation=most, buffers=BUFFERS)
    moved = blt.sensitivity(strategy, of.rounds, most)
    often = math.ceil(of.rounds / most)
    noise = of.noise * moved / often**0.5
    spent = privacy.blt_cost(noise=noise, strategy=strategy, separation=most, **cost)
    assert spent.epsilon is not None
    np.testing.assert_allclose(spent.epsilon, alone.epsilon, rtol=1e-6)
    found: dict[str, Any] = {
        "independent": (fb.transforms.dp_fedavg, of.noise, turns, usual),
        "BLT": (fb.transforms.dp_blt, noise, turns, {**usual, "strategy": strategy}),
    }
    for tree in TREES:
        epoch = most // tree * tree
        nodes = -(-of.rounds // epoch) * tree.bit_length()
        noise = of.noise * (nodes / often) ** 0.5
        spent = tree_cost(noise=noise, tree=tree, epoch=epoch, **cost)
        assert spent.epsilon is not None and spent.epsilon <= alone.epsilon * 1.000001
        found[f"trees of {tree}"] = (
            dp_ftrl,
            noise,
            fb.Cohort(of.cohort, epoch=epoch),
            {"cohort": of.cohort, "tree": tree},
        )
    return found


def accuracies(of: Setting, mechanism: Any, rate: float, clip: float, seeds: Any):
    """The final test accuracy with each of these seeds, a mean over clients."""
    transform, noise, turns, options = mechanism
    loss = fb.losses.cross_entropy(of.model.apply)
    work = fb.Work(rate, steps=of.steps, batch_size=of.batch_size)
    run = fb.simulate(
        transform(fb.fedavg(loss, work), clip=clip, noise=noise, **options),
        of.model.init,
        of.data,
        jnp.stack([jax.random.key(seed) for seed in seeds]),
        rounds=of.rounds,
        cohort=turns,
        every=of.rounds,
        splits=("test",),
        measure={"accuracy": fb.metrics.accuracy(of.model.apply)},
    )
    return np.array(
        [one["measures"]["test"]["shared"]["accuracy"]["mean"] for one in run.summary()]
    )


def compared(of: Setting) -> None:
    """Choose each mechanism's point of the grid, and compare on other seeds."""
    means = {}
    for name, mechanism in mechanisms(of).items():
        tried = {
            point: accuracies(of, mechanism, *point, TUNING).mean()
            for point in product(of.rates, of.clips)
        }
        best = max(tried, key=lambda point: tried[point])
        found = accuracies(of, mechanism, *best, SEEDS)
        means[name] = found
        print(
            f"  {name}: noise {mechanism[1]:.3g}, rate {best[0]:g}, clip {best[1]:g}: "
            f"{found.mean():.3f} ± {found.std(ddof=1):.3f}",
            *(f"{rate:g}/{clip:g}: {mean:.3f}" for (rate, clip), mean in tried.items()),
            flush=True,
        )
    for name, others in means.items():
        if name != "BLT":
            gain = means["BLT"] - others
            half = t.ppf(0.975, len(gain) - 1) * gain.std(ddof=1) / len(gain) ** 0.5
            won = "beats" if gain.mean() - half > 0 else "does not beat"
            print(f"  BLT {won} {name}: {gain.mean():+.3f} ± {half:.3f}", flush=True)


def errors() -> None:
    """Expected squared errors over the lower bound."""
    print("rounds, lower bound; mean and largest error over it: independent, tree, BLT")
    for rounds in (32, 128, 512, 2048):
        angles = (2 * np.arange(1, rounds + 1) - 1) * np.pi / (4 * rounds + 2)
        bound = ((0.5 / np.sin(angles)).sum() / rounds) ** 2
        numbers = np.arange(1, rounds + 1)
        nodes = np.array([int(number).bit_count() for number in numbers])
        line = [numbers, nodes * rounds.bit_length()]
        for buffers in (1, 2, 3, 5):
            one = blt.optimal(rounds=rounds, separation=rounds, buffers=buffers)
            moved = blt.sensitivity(one, rounds, rounds) ** 2
            line.append(moved * blt.error_variances(one, rounds))
        ratios = [f"{of.mean() / bound:.2f} {of.max() / bound:.2f}" for of in line]
        print(f"  {rounds}, {bound:.2f}: {' | '.join(ratios)}", flush=True)
    print("over several parts, mean error over that of independent noise:")
    for rounds, apart in ((32, 8), (96, 10), (512, 8), (512, 64), (2048, 64)):
        parts = -(-rounds // apart)
        alone = parts * (rounds + 1) / 2
        one = blt.optimal(rounds=rounds, separation=apart, buffers=BUFFERS)
        moved = blt.sensitivity(one, rounds, apart) ** 2
        ratio = moved * blt.error_variances(one, rounds).mean() / alone
        trees = []
        for tree in (4, 8, 16, 32, 64):
            if tree <= apart:
                epochs = -(-rounds // (apart // tree * tree))
                done = np.arange(1, rounds + 1)
                whole = done // tree * tree.bit_count()
                nodes = whole + [int(rest).bit_count() for rest in done % tree]
                cost = epochs * tree.bit_length() * nodes.mean() / alone
                trees.append(f"trees of {tree} {cost:.2f}")
        print(f"  {rounds} rounds, separation {apart}: BLT {ratio:.3f},", *trees)


if __name__ == "__main__":
    for word in sys.argv[1:] or ("errors", "digits", "femnist"):
        print(word)
        if word == "errors":
            errors()
        else:
            compared({"digits": digits, "femnist": femnist}[word]())
