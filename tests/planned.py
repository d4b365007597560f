# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A configuration of FLIX of which everything is known, also in NumPy."""

import copy
from typing import Any

import numpy as np

from fedblend.config import toml
from fedblend.config.build import build
from fedblend.config.config import check
from fedblend.trees import precision

CLIENTS, DIM, L2, EPS, K = 4, 31, 0.1, 1e-3, 8
FLIX: dict[str, Any] = {
    "version": 1,
    "name": "planned",
    "data": {
        "source": "breast_cancer",
        "partition": "contiguous",
        "clients": CLIENTS,
        "test": 0.0,
    },
    "model": {"name": "logistic", "l2": L2},
    "algorithm": {
        "name": "flix",
        "alpha": 0.5,
        "rate": "theory",
        "steps": 1,
        "batch_size": "all",
        "personal": {"solver": "gradient_descent", "tolerance": 1e-9},
    },
    "run": {"rounds": 3, "precision": "float64"},
    "measure": {"local": False},
}
RAND = {"name": "rand_k", "k": K}
DIANA = {**FLIX, "compress": {"how": "diana", "compressor": RAND}}


def changed(content: dict, *settings: str) -> dict:
    content = copy.deepcopy(content)
    for setting in settings:
        toml.put(content, setting)
    return content


class ByHand:
    """The same problem in NumPy: rows, L_i, x_i, and f~."""

    def __init__(self):
        with precision("float64"):
            federated_data = build(check(FLIX, "here")).federated_data
        self.rows = []
        for client in range(CLIENTS):
            inputs, targets = federated_data.train.rows(client)
            inputs = np.append(inputs, np.ones((len(inputs), 1)), axis=1)
            self.rows.append((inputs.astype(float), 2.0 * targets - 1))
        self.L = np.array(
            [np.linalg.svd(a)[1][0] ** 2 / 4 / len(a) + L2 for a, _ in self.rows]
        )
        self.x = np.stack([self._solve(*rows) for rows in self.rows])
        self.weights = self.L / self.L.sum()
        self.average = self.weights @ self.x
        self.V = self.weights @ ((self.x - self.average) ** 2).sum(axis=1)

    def _solve(self, a, y):
        x = np.zeros(a.shape[1])
        for _ in range(30):
            p = 1 / (1 + np.exp(y * (a @ x)))
            gradient = L2 * x - a.T @ (y * p) / len(y)
            bend = L2 * np.eye(len(x)) + (a.T * (p * (1 - p))) @ a / len(y)
            x = x - np.linalg.solve(bend, gradient)
        return x

    def value(self, alpha, shared):
        """f~ at a shared model."""
        places = alpha * shared + (1 - alpha) * self.x
        values = [
            np.logaddexp(0, -y * (a @ x)).mean() + L2 / 2 * x @ x
            for (a, y), x in zip(self.rows, places, strict=True)
        ]
        return float(np.mean(values))

    def gradient(self, alpha: float, x) -> np.ndarray:
        """That of f~ at a shared model."""
        total = np.zeros(DIM)
        for (a, y), own in zip(self.rows, self.x, strict=True):
            here = alpha * x + (1 - alpha) * own
            p = 1 / (1 + np.exp(y * (a @ here)))
            total += alpha * (L2 * here - a.T @ (y * p) / len(y)) / CLIENTS
        return total

    def least(self, alpha: float) -> float:
        """min f~ by gradient descent in NumPy."""
        x, step = self.average, 1 / (alpha**2 * self.L.mean())
        for _ in range(3000):
            x = x - step * self.gradient(alpha, x)
        return self.value(alpha, x)
