# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FLIX written out in NumPy, in float64, with loops: what the theory is checked on.

A problem is a list of clients; a client gives value, gradient and Hessian at a point.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest

import fedblend as fb
from fedblend.data.datasets.built_in import quadratics
from fedblend.data.federated import FederatedData, federate
from fedblend.data.partition import contiguous
from fedblend.theory import constants
from fedblend.theory.constants import MixtureConstants, mixture
from fedblend_reproductions.datasets.download import PUBLIC_SETS, data_home

UNEQUAL = np.array([0.9, 0.5, 0.2, 0.7, 1.0, 0.05])
"""Weights of the shared model that all differ, for six clients."""


class Quadratic(NamedTuple):
    """``1/2 x^T A x - b^T x``."""

    A: np.ndarray
    b: np.ndarray

    def value(self, x):
        return 0.5 * x @ self.A @ x - self.b @ x

    def gradient(self, x):
        return self.A @ x - self.b

    def hessian(self, x):
        return self.A


class Logistic(NamedTuple):
    """``mean log(1 + exp(-y a^T x)) + l2/2 |x|^2``, y = -1 or 1."""

    inputs: np.ndarray
    signs: np.ndarray
    l2: float

    def value(self, x):
        losses = np.logaddexp(0, -self.signs * (self.inputs @ x))
        return losses.mean() + 0.5 * self.l2 * x @ x

    def chances(self, x):
        return 1 / (1 + np.exp(self.signs * (self.inputs @ x)))

    def gradient(self, x):
        pull = self.signs * self.chances(x) / len(self.signs)
        return -self.inputs.T @ pull + self.l2 * x

    def hessian(self, x):
        p = self.chances(x)
        curved = self.inputs * (p * (1 - p) / len(p))[:, None]
        return self.inputs.T @ curved + self.l2 * np.eye(len(x))


class Case(NamedTuple):
    """Federated data, its clients' functions, their minimizers and their constants."""

    federated_data: FederatedData
    clients: list[Any]
    personal: np.ndarray
    smoothness: constants.Smoothness


def newton(function, start, steps=50):
    """The minimizer of a convex function, to machine precision."""
    x = start
    for _ in range(steps):
        gradient = function.gradient(x)
        step = np.linalg.solve(function.hessian(x), gradient)
        x = x - step
        if np.linalg.norm(gradient) < 1e-12:
            break
    return x


def quadratic_case(clients=6, dim=4, condition=8.0, seed=0) -> Case:
    federated_data, _ = quadratics(clients, dim, seed, condition, rows=2)
    rows = [federated_data.train.rows(i) for i in range(clients)]
    functions = [Quadratic(A.mean(axis=0), b.mean(axis=0)) for A, b in rows]
    personal = np.stack([np.linalg.solve(f.A, f.b) for f in functions])
    return Case(
        federated_data, functions, personal, constants.quadratics(federated_data)
    )


def logistic_case(name: str, clients: int, l2=0.1) -> Case:
    data = fb.datasets.load(name, intercept=True, dtype="float64")
    federated_data = federate(data.rows, contiguous(len(data.rows[1]), clients))
    functions = []
    for client in range(clients):
        inputs, targets = federated_data.train.rows(client)
        functions.append(Logistic(inputs, np.where(targets > 0, 1.0, -1.0), l2))
    start = np.zeros(functions[0].inputs.shape[1])
    personal = np.stack([newton(f, start) for f in functions])
    smoothness = constants.logistic(federated_data, l2)
    return Case(federated_data, functions, personal, smoothness)


class Mixed(NamedTuple):
    """f~: the mean over clients of f_i at alpha_i x + (1 - alpha_i) x_i."""

    case: Case
    alpha: np.ndarray

    def places(self, x):
        return self.alpha[:, None] * x + (1 - self.alpha)[:, None] * self.case.personal

    def value(self, x):
        pairs = zip(self.case.clients, self.places(x), strict=True)
        return np.mean([f.value(place) for f, place in pairs])

    def gradients(self, x):
        pairs = zip(self.case.clients, self.places(x), self.alpha, strict=True)
        return np.stack([a * f.gradient(place) for f, place, a in pairs])

    def gradient(self, x):
        return self.gradients(x).mean(axis=0)

    def hessian(self, x):
        pairs = zip(self.case.clients, self.places(x), self.alpha, strict=True)
        return np.mean([a * a * f.hessian(place) for f, place, a in pairs], axis=0)

    def solve(self):
        """The minimizer of f~ and its value."""
        best = newton(self, self.case.personal.mean(axis=0))
        return best, self.value(best)


def known_of(case: Case, alpha) -> MixtureConstants:
    return mixture(alpha, case.smoothness, case.personal)


def mixed(case: Case, alpha) -> Mixed:
    return Mixed(case, np.broadcast_to(np.asarray(alpha, float), len(case.clients)))


def descend(function: Mixed, x, step, rounds):
    """All iterates of gradient descent, the first one included."""
    iterates = [x]
    for _ in range(rounds):
        x = x - step * function.gradient(x)
        iterates.append(x)
    return iterates


def rand_k(rng, vectors, k):
    """k entries of every row, scaled by d/k, each row drawn on its own."""
    clients, dim = vectors.shape
    chosen = np.argsort(rng.random((clients, dim)), axis=1)[:, :k]
    sent = np.zeros_like(vectors)
    rows = np.arange(clients)[:, None]
    sent[rows, chosen] = vectors[rows, chosen] * dim / k
    return sent


def dcgd(function: Mixed, x, step, rounds, k, rng):
    """All iterates of compressed gradient descent."""
    iterates = [x]
    for _ in range(rounds):
        x = x - step * rand_k(rng, function.gradients(x), k).mean(axis=0)
        iterates.append(x)
    return iterates


def diana(function: Mixed, x, step, rounds, k, memory_rate, rng, start="zero"):
    """All iterates of DIANA, and the memories h_i at each of them."""
    memory = function.gradients(x) * (start == "gradient")
    pairs = [(x, memory)]
    for _ in range(rounds):
        sent = rand_k(rng, function.gradients(x) - memory, k)
        x = x - step * (memory + sent).mean(axis=0)
        memory = memory + memory_rate * sent
        pairs.append((x, memory))
    return pairs


@pytest.fixture(scope="session")
def quadratic() -> Case:
    return quadratic_case()


@pytest.fixture(scope="session")
def real():
    """A function from a name to a problem; skips where its file is missing."""
    known: dict[tuple[str, int], Case] = {}

    def case(name: str, clients: int) -> Case:
        if not PUBLIC_SETS[name].usable:
            pytest.skip(f"{name} is not in {data_home()}; see FEDBLEND_DATA")
        if (name, clients) not in known:
            known[name, clients] = logistic_case(name, clients)
        return known[name, clients]

    return case
