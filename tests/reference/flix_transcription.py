# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The FLIX paper's algorithms 1 to 3 in NumPy loops, literally; nothing of fedblend.

Gasanov, Khaled, Horváth and Richtárik, FLIX (first named FedMix). A client is an object
with ``gradient``, ``smooth`` (L_i) and ``best`` (x_i, its minimizer). Compressors are
given: ``sent(vector, k, i)`` is C_i(vector) in round k.
"""

import numpy as np


class Quadratic:
    """``f_i(x) = 1/2 x^T A x - b^T x``."""

    def __init__(self, matrix, vector):
        self.matrix, self.vector = matrix, vector
        self.smooth = np.linalg.eigvalsh(matrix)[-1]
        self.best = np.linalg.solve(matrix, vector)

    def gradient(self, x):
        return self.matrix @ x - self.vector


class Logistic:
    """``f_i(x) = 1/k_i sum_j log(1 + exp(-y_j a_j^T x)) + l2/2 |x|^2``."""

    def __init__(self, inputs, signs, l2):
        self.inputs, self.signs, self.l2 = inputs, signs, l2
        rows, dim = inputs.shape
        self.smooth = np.linalg.eigvalsh(inputs.T @ inputs)[-1] / (4 * rows) + l2
        x = np.zeros(dim)
        for _ in range(30):
            p = 1 / (1 + np.exp(signs * (inputs @ x)))
            hessian = inputs.T @ (inputs * (p * (1 - p))[:, None]) / rows
            x = x - np.linalg.solve(hessian + l2 * np.eye(dim), self.gradient(x))
        self.best = x

    def gradient(self, x):
        total = np.zeros_like(x)
        for a, y in zip(self.inputs, self.signs, strict=True):
            total += -y * a / (1 + np.exp(y * (a @ x)))
        return total / len(self.signs) + self.l2 * x


def mixed_gradient(client, alpha, x):
    """``grad [f_i(T_i(x))] = alpha_i grad f_i(alpha_i x + (1 - alpha_i) x_i)``."""
    return alpha * client.gradient(alpha * x + (1 - alpha) * client.best)


def smoothness(clients, alpha):
    """``L_alpha = 1/n sum alpha_i^2 L_i``."""
    n = len(clients)
    return sum(alpha[i] ** 2 * clients[i].smooth for i in range(n)) / n


def average(clients, alpha):
    """Theorem 1: ``x_avg = sum w_i x_i``, ``w_i = alpha_i^2 L_i / (n L_alpha)``."""
    n, x = len(clients), np.zeros_like(clients[0].best)
    for i in range(n):
        w = alpha[i] ** 2 * clients[i].smooth / (n * smoothness(clients, alpha))
        x += w * clients[i].best
    return x


def flat_average(clients, alpha):
    """For stationary points: weights proportional to ``alpha_i^4 L_i^2``."""
    w = np.array([alpha[i] ** 4 * c.smooth**2 for i, c in enumerate(clients)])
    return sum(w[i] / w.sum() * c.best for i, c in enumerate(clients))


def dgd(clients, alpha, x, gamma, rounds):
    """Algorithm 1."""
    n = len(clients)
    for _ in range(rounds):
        total = np.zeros_like(x)
        for i in range(n):
            total += mixed_gradient(clients[i], alpha[i], x)
        x = x - gamma / n * total
    return x


def dcgd(clients, alpha, x, gamma, rounds, sent):
    """Algorithm 2 with grad f_i read as the gradient of the mixture."""
    n = len(clients)
    for k in range(rounds):
        g = np.zeros_like(x)
        for i in range(n):
            g += sent(mixed_gradient(clients[i], alpha[i], x), k, i) / n
        x = x - gamma * g
    return x


def diana(clients, alpha, x, h_i, gamma, beta, rounds, sent):
    """Algorithm 3; returns x, h and all h_i, all after the last round."""
    n = len(clients)
    h_i = [memory.copy() for memory in h_i]
    h = np.mean(h_i, axis=0)
    for k in range(rounds):
        g, change = h.copy(), np.zeros_like(x)
        for i in range(n):
            difference = mixed_gradient(clients[i], alpha[i], x) - h_i[i]
            hat = sent(difference, k, i)
            h_i[i] = h_i[i] + beta[i] * hat
            g += hat / n
            change += beta[i] * hat / n
        x = x - gamma * g
        h = h + change
    return x, h, np.stack(h_i)


def deployed(clients, alpha, x):
    """``T_i(x) = alpha_i x + (1 - alpha_i) x_i`` of every client."""
    return np.stack(
        [a * x + (1 - a) * c.best for a, c in zip(alpha, clients, strict=True)]
    )
