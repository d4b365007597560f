# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Logistic regression as in the paper's convex experiments, and its solution.

Four LIBSVM datasets, cut in contiguous pieces; client i has ``f_i(x) = mean log(1 +
exp(-y a^T x)) + l2/2 |x|^2``. Pure local models and optimal values are solved apart
from the library, by Newton's method in NumPy float64.
"""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend import theory
from fedblend.core import Algorithm, Loss
from fedblend.data.federated import FederatedData
from fedblend.trees import precision
from fedblend_reproductions.datasets import libsvm

NAMES = ("mushrooms", "a6a", "w6a", "ijcnn1")
L2 = 0.1
SOLVED = 1e-10
"""The gradient norm at which Newton's method stops."""
STOPPED = 1e-3
"""That of pure local models without a penalty, which may have no minimizer."""
POINTS = 64
"""Points whose values are computed side by side; bounds the memory it takes."""


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """The clients of a dataset.

    ``signed`` has a row ``y a`` for every example, ``owner`` its client, ``weight`` its
    part in the mean over clients of means over rows. ``personal`` are the pure local
    models and ``norms`` the gradient norms they were stopped at.
    """

    name: str
    l2: float
    federated_data: FederatedData
    loss: Loss
    smoothness: theory.Smoothness
    signed: np.ndarray
    owner: np.ndarray
    weight: np.ndarray
    personal: np.ndarray
    norms: np.ndarray

    @property
    def dim(self) -> int:
        """The length of x."""
        return self.signed.shape[1]

    @property
    def clients(self) -> int:
        """The number of clients, n."""
        return len(self.personal)

    def mixture(self, alpha) -> theory.MixtureConstants:
        """The constants of f~."""
        return theory.mixture(alpha, self.smoothness, self.personal)


class Optimum(NamedTuple):
    """x*, f~(x*), and the gradient norm there."""

    point: np.ndarray
    value: float
    residual: float


@cache
def problem(
    name: str, clients: int, l2: float = L2, intercept: bool = False
) -> Problem:
    """A dataset of ``NAMES`` on so many clients, with their pure local models.

    With a penalty those are minimizers. Without, they are where gradient descent from 0
    with the step 1/L_i first has a gradient norm of ``STOPPED``. The intercept, if any,
    is one more column, penalized like the others.
    """
    data = libsvm(name, intercept, dtype="float64")
    inputs, targets = data.rows
    pieces = fb.partition.contiguous(len(targets), clients)
    federated_data = fb.federate(data.rows, pieces)
    inputs, targets = federated_data.train.examples
    counts = federated_data.train.counts
    owner = np.repeat(np.arange(clients), counts)
    zeros = np.zeros((clients, inputs.shape[1]))
    blank = Problem(
        name=name,
        l2=l2,
        federated_data=federated_data,
        loss=fb.losses.l2(fb.losses.logistic(_scores), l2),
        smoothness=theory.constants.logistic(federated_data, l2),
        signed=np.where(targets > 0, 1.0, -1.0)[:, None] * inputs,
        owner=owner,
        weight=1 / (clients * counts[owner]),
        personal=zeros,
        norms=zeros[:, 0],
    )
    personal, norms = _minimizers(blank) if l2 > 0 else _stopped(blank)
    return dataclasses.replace(blank, personal=personal, norms=norms)


def _scores(params: jax.Array, inputs: jax.Array) -> jax.Array:
    return inputs @ params


def _minimizers(of: Problem) -> tuple[np.ndarray, np.ndarray]:
    found = []
    for client in range(of.clients):
        rows = of.signed[of.owner == client]
        each = np.ones(len(rows))
        found.append(_newton(rows, each / len(rows), 0 * each, of.l2, np.zeros(of.dim)))
    points = np.stack([one.point for one in found])
    return points, np.array([one.residual for one in found])


def _stopped(of: Problem) -> tuple[np.ndarray, np.ndarray]:
    smooth = of.smoothness.smooth
    local = fb.solvers.gradient_descent(
        of.loss, smooth, tolerance=STOPPED, most=100_000
    )
    with precision("float64"):
        alone = fb.flix(of.loss, descent(1.0), alpha=1.0, local=local, smooth=smooth)
        run = fb.simulate(
            alone, jnp.zeros(of.dim), of.federated_data, jax.random.key(0), rounds=0
        ).complete()
        states = [run.client(client) for client in range(of.clients)]
    return (
        np.stack([np.asarray(state.personal) for state in states]),
        np.array([float(state.norm) for state in states]),
    )


def descent(step) -> Callable[[Loss], Algorithm]:
    """Distributed gradient descent, as a function of the loss."""
    return lambda loss: fb.fedavg(loss, fb.Work(step, steps=1, batch_size=None))


def values(of: Problem, alpha, points: np.ndarray) -> np.ndarray:
    """f~ at points [..., dim], for an alpha or one for every client."""
    rows, offset, own, alpha = _mixed(of, alpha)
    flat = points.reshape(-1, of.dim)
    found = []
    for first in range(0, len(flat), POINTS):
        some = flat[first : first + POINTS]
        squares = (alpha**2).mean() * (some**2).sum(axis=1)
        squares += 2 * some @ (alpha @ own) / of.clients + (own**2).sum() / of.clients
        losses = np.logaddexp(0, -(rows @ some.T + offset[:, None]))
        found.append(of.weight @ losses + of.l2 / 2 * squares)
    return np.concatenate(found).reshape(points.shape[:-1])


def _mixed(of: Problem, alpha):
    """The margin of an example of client i is ``alpha_i y a^T x + (1-alpha_i) y a^T
    x_i``: rows, offsets, ``(1-alpha_i) x_i``, and alpha_i of every client.
    """
    alpha = np.broadcast_to(np.asarray(alpha, np.float64), of.clients)
    own = (1 - alpha)[:, None] * of.personal
    offset = np.einsum("rd,rd->r", of.signed, own[of.owner])
    return alpha[of.owner, None] * of.signed, offset, own, alpha


@cache
def optimum(of: Problem, alpha: float | tuple[float, ...]) -> Optimum:
    """The minimizer of f~, for an alpha or one for every client."""
    rows, offset, own, alphas = _mixed(of, alpha)
    bend, middle = of.l2 * (alphas**2).mean(), of.l2 * (alphas @ own) / of.clients
    found = _newton(rows, of.weight, offset, bend, middle)
    return found._replace(value=float(values(of, alpha, found.point[None])[0]))


def _newton(rows, weight, offset, bend, middle, most: int = 200) -> Optimum:
    """The minimum of ``weight @ log(1 + exp(-margins)) + bend/2 |x|^2 + middle @ x``
    with ``margins = rows @ x + offset``; steps are halved until they descend.
    """

    def at(x):
        margins = rows @ x + offset
        value = weight @ np.logaddexp(0, -margins) + (bend / 2 * x + middle) @ x
        wrong = np.exp(-np.logaddexp(0, margins))  # 1/(1 + exp(margin))
        return value, bend * x + middle - rows.T @ (weight * wrong), wrong

    x = np.zeros(rows.shape[1])
    value, gradient, wrong = at(x)
    for _ in range(most):
        if np.linalg.norm(gradient) <= SOLVED:
            break
        hessian = (rows.T * (weight * wrong * (1 - wrong))) @ rows
        # Columns that are all zero have no curvature without a penalty.
        hessian += (bend + 1e-14 * np.trace(hessian)) * np.eye(len(x))
        step = np.linalg.solve(hessian, gradient)
        for length in 0.5 ** np.arange(30):
            new = at(x - length * step)
            if new[0] <= value or np.linalg.norm(new[1]) < np.linalg.norm(gradient):
                break
        x = x - length * step
        value, gradient, wrong = new
    return Optimum(x, float(value), float(np.linalg.norm(gradient)))
