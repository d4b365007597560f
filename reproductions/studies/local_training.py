# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Rounds and numbers, counted both ways, of methods with local steps on LIBSVM's data.

Logistic regression with l2, contiguous clients of equal weight, full gradients,
float64, from 0, until ``f - f* <= 1e-8 (f(0) - f*)``; f* by Newton's method in NumPy.
``rounds`` has one table, Scafflix beside gradient descent; ``both`` another, what a
client sends and receives, in numbers of 64 bits, without enrollment. ``+1`` adds a
column of ones, an intercept, to the data::

    python local_training.py rounds [a6a a6a+1 mushrooms+1 w6a ijcnn1]
    python local_training.py both [a6a+1]
"""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend.compress import rand_k
from fedblend.core import Loss
from fedblend.theory import constants, local_training, steps
from fedblend.theory.bounds import Bound
from fedblend.theory.constants import Smoothness

EPS, SEEDS, NUMBER = 1e-8, (0, 1, 2), 64
RATIOS = {"a6a+1": 40, "mushrooms+1": 55}
"""How many times fewer rounds than gradient descent Scafflix has to need."""


class Problem(NamedTuple):
    """A federation, its loss, and what NumPy knows of the optimum."""

    data: fb.FederatedData
    loss: Loss
    known: Smoothness
    signed: list[np.ndarray]
    l2: float
    best: np.ndarray

    @property
    def dim(self) -> int:
        """The number of parameters."""
        return len(self.best)

    def value(self, x) -> float:
        """The mean of f_i(x)."""
        losses = [np.logaddexp(0, -rows @ x).mean() for rows in self.signed]
        return float(np.mean(losses)) + self.l2 / 2 * x @ x

    def gap(self, x) -> float:
        """The distance from the optimal value, as a part of that at 0."""
        least = self.value(self.best)
        return (self.value(x) - least) / (self.value(np.zeros(self.dim)) - least)

    def slopes(self, x) -> np.ndarray:
        """The gradients of f_i(x), of all clients."""
        return (
            np.stack(
                [
                    -(rows / (1 + np.exp(rows @ x))[:, None]).mean(0)
                    for rows in self.signed
                ]
            )
            + self.l2 * x
        )


def problem(name: str, l2: float, clients: int) -> Problem:
    plain, _, intercept = name.partition("+")
    inputs, targets = map(np.asarray, fb.datasets.load(plain).rows)
    if intercept:
        inputs = np.concatenate([inputs, np.ones_like(inputs[:, :1])], axis=1)
    parts = fb.partition.contiguous(len(targets), clients)
    federated = fb.federate((inputs, targets), parts)
    dim = inputs.shape[1]

    def score(params, inputs):
        return inputs @ params

    loss = fb.losses.l2(fb.losses.logistic(score), l2)
    signed = inputs.astype(np.float64) * np.where(targets > 0, 1.0, -1.0)[:, None]
    made = Problem(
        federated,
        loss,
        constants.logistic(federated, l2),
        [signed[part] for part in parts],
        l2,
        np.zeros(dim),
    )
    return made._replace(best=newton(made))


def newton(on: Problem) -> np.ndarray:
    x = np.zeros(on.dim)
    for _ in range(50):
        slope = on.slopes(x).mean(axis=0)
        hessian = on.l2 * np.eye(on.dim)
        for rows in on.signed:
            odds = 1 / (1 + np.exp(rows @ x))
            weighted = rows * (odds * (1 - odds))[:, None]
            hessian += rows.T @ weighted / len(rows) / len(on.signed)
        move = np.linalg.solve(hessian, slope)
        # Twice what is left of f - f*, of a quadratic: far below rounding of f. The
        # gradient itself rounds at some 1e-14, and line searches there take minutes.
        if slope @ move < 1e-24:
            break
        scale = 1.0
        while on.value(x - scale * move) > on.value(x) and scale > 1e-6:
            scale /= 2
        x = x - scale * move
    return x


class Cost(NamedTuple):
    """Until the accuracy is reached: rounds, numbers that a client sends, receives."""

    rounds: int
    up: float
    down: float


def cost(algorithm, on: Problem, *, seed: int = 0, every: int = 1) -> Cost:
    run = fb.simulate(
        algorithm,
        jnp.zeros(on.dim),
        on.data,
        jax.random.key(seed),
        rounds=100_000,
        every=every,
        weights="uniform",
    )
    begin = None
    for record in run:
        bits = run.bits()
        begin = begin or (bits.up.mean(), bits.down.mean())
        if on.gap(np.asarray(run.shared)) <= EPS:
            up, down = bits.up.mean() - begin[0], bits.down.mean() - begin[1]
            return Cost(record.round, up / NUMBER, down / NUMBER)
    raise SystemExit("more than 100,000 rounds")


def descent(on: Problem):
    rate = steps.dgd(1.0, on.known)
    return fb.fedavg(on.loss, fb.Work(rate, steps=1, batch_size=None))


def scafflix(on: Problem, rates: Any = "theory"):
    chosen = local_training.scafflix(1.0, on.known)
    return fb.scafflix(
        on.loss,
        fb.Work(rates, steps=chosen.steps, batch_size=None),
        alpha=1.0,  # x_i does not matter, but for the start
        personal=fb.solvers.given(jnp.zeros((on.data.clients, on.dim))),
        smooth=on.known.smooth,
    )


def bounded(on: Problem) -> int | None:
    """Rounds after which theory promises the accuracy, from 0 and x* itself."""
    chosen, best = local_training.scafflix(1.0, on.known), on.best
    squares = (on.slopes(best) ** 2).sum(axis=1)
    weights = 1 / chosen.rates
    memory = float(chosen.rates @ squares) / (chosen.p**2 * weights.sum())
    top = on.known.smooth.mean() / 2
    start = top * (best @ best + memory)
    first = on.value(np.zeros(on.dim)) - on.value(best)
    return Bound(start, chosen.factor, 0, first).rounds_to(EPS * first)


def rounds_table(names) -> None:
    print("| data | kappa_max | 1/p | gradient descent | Scafflix | fewer | bound |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        on = problem(name, 1e-3, 8)
        kappa = float((on.known.smooth / on.known.convex).max())
        one = cost(descent(on), on, every=5).rounds
        new = [cost(scafflix(on), on, seed=seed).rounds for seed in SEEDS]
        times, most = one / np.mean(new), bounded(on)
        print(
            f"| {name} | {kappa:,.0f} "
            f"| {local_training.scafflix(1.0, on.known).steps} | {one:,} "
            f"| {', '.join(map(str, new))} | {times:.1f} x | {most:,} |",
            flush=True,
        )
        assert times >= RATIOS.get(name, 0) and max(new) <= (most or 0)


def locodl(on: Problem, k: int, masks: str):
    omega = on.dim / k - 1
    chosen = local_training.locodl(1.0, on.known, omega, masks=masks)
    return fb.locodl(
        on.loss,
        fb.Work(float(chosen.rates[0]), steps=chosen.steps, batch_size=None),
        compressor=rand_k(k),
        clients=on.data.clients,
        moved=chosen.moved,
        masks=masks,
    )


def compressed_scaffnew(on: Problem, copies: int):
    chosen = local_training.compressed_scaffnew(1.0, on.known, copies)
    return fb.algorithms.compressed_scaffnew(
        on.loss,
        fb.Work(float(chosen.rates[0]), steps=chosen.steps, batch_size=None),
        clients=on.data.clients,
        copies=copies,
    )


def both_table(name: str) -> None:
    on = problem(name, 0.01, 50)
    diana_rate = steps.diana(1.0, on.known, on.dim / 2 - 1)
    diana = fb.transforms.diana(
        fb.fedavg(on.loss, fb.Work(diana_rate, steps=1, batch_size=None)), rand_k(2)
    )
    equal = 1 / float(on.known.smooth.max())
    print("| method | rounds | up | down | both |")
    print("|---|---|---|---|---|")
    for name, algorithm, every in (
        ("gradient descent", descent(on), 5),
        ("DIANA, rand-2", diana, 10),
        ("Scafflix, equal rates", scafflix(on, equal), 1),
        ("Scafflix, own rates", scafflix(on), 1),
        ("LoCoDL, rand-2, own masks", locodl(on, 2, "own"), 5),
        ("LoCoDL, rand-5, one mask", locodl(on, 5, "one"), 5),
        ("CompressedScaffnew, 3 copies", compressed_scaffnew(on, 3), 1),
        ("CompressedScaffnew, 12 copies", compressed_scaffnew(on, 12), 1),
    ):
        found = cost(algorithm, on, every=every)
        print(
            f"| {name} | {found.rounds:,} | {found.up:,.0f} | {found.down:,.0f} "
            f"| {found.up + found.down:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    what, *chosen = sys.argv[1:] or ["rounds"]
    if what == "both":
        both_table(*chosen or ["a6a+1"])
    else:
        rounds_table(chosen or ["a6a+1", "mushrooms+1", "w6a", "ijcnn1"])
