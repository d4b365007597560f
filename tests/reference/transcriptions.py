# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The papers' pseudo-code in NumPy, literally, loops and all; nothing of fedblend.

A client is its mean quadratic: ``grad f_i(x) = matrices[i] @ x - vectors[i]``. Cohorts
are given, round by round; weights are any positive numbers over clients.
"""

import numpy as np


class Quadratic:
    """What every transcription knows of the clients."""

    def __init__(self, matrices, vectors, weights, rows=()):
        self.matrices, self.vectors, self.weights = matrices, vectors, weights
        self.rows = rows
        self.clients = len(vectors)

    def gradient(self, client, x):
        return self.matrices[client] @ x - self.vectors[client]

    def row_gradient(self, client, row, x):
        matrices, vectors = self.rows[client]
        return matrices[row] @ x - vectors[row]


def local_sgd(problem, client, x, rate, steps):
    """K steps of gradient descent from x."""
    y = x.copy()
    for _ in range(steps):
        y = y - rate * problem.gradient(client, y)
    return y


def fedavg(problem, x, cohorts, rate, steps):
    """McMahan et al. 2017, algorithm 1: x <- sum n_k/n y_k over the cohort."""
    for cohort in cohorts:
        total = sum(problem.weights[i] for i in cohort)
        mean = np.zeros_like(x)
        for i in cohort:
            y = local_sgd(problem, i, x, rate, steps[i])
            mean += problem.weights[i] / total * y
        x = mean
    return x


def fedprox(problem, x, cohorts, rate, steps, mu):
    """Li et al. 2020, algorithm 2, with gradient steps as the inexact solver."""
    for cohort in cohorts:
        total = sum(problem.weights[i] for i in cohort)
        mean = np.zeros_like(x)
        for i in cohort:
            y = x.copy()
            for _ in range(steps[i]):
                y = y - rate * (problem.gradient(i, y) + mu * (y - x))
            mean += problem.weights[i] / total * y
        x = mean
    return x


def fedopt(problem, x, cohorts, rate, steps, server_rate, rule):
    """Reddi et al. 2021, algorithm 2: the mean delta is a pseudo-gradient.

    Adam, Yogi and Adagrad are those of optax: bias-corrected moments where it corrects
    them, its starting values, and eps where it stands there.
    """
    memory = {}
    for number, cohort in enumerate(cohorts, start=1):
        total = sum(problem.weights[i] for i in cohort)
        delta = np.zeros_like(x)
        for i in cohort:
            y = local_sgd(problem, i, x, rate, steps[i])
            delta += problem.weights[i] / total * (y - x)
        x = x - server_rate * rule(-delta, memory, number)
    return x


def adam(g, memory, t, b1=0.9, b2=0.999, eps=1e-8):
    """Kingma and Ba 2015, algorithm 1."""
    m = b1 * memory.get("m", np.zeros_like(g)) + (1 - b1) * g
    v = b2 * memory.get("v", np.zeros_like(g)) + (1 - b2) * g**2
    memory.update(m=m, v=v)
    return (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)


def yogi(g, memory, t, b1=0.9, b2=0.999, eps=1e-3, first=1e-6):
    """Zaheer et al. 2018, algorithm 2; both moments start at 1e-6 in optax."""
    m = b1 * memory.get("m", np.full_like(g, first)) + (1 - b1) * g
    v = memory.get("v", np.full_like(g, first))
    v = v - (1 - b2) * np.sign(v - g**2) * g**2
    memory.update(m=m, v=v)
    return (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)


def adagrad(g, memory, t, eps=1e-7, first=0.1):
    """Duchi et al. 2011, diagonal; the sum of squares starts at 0.1 in optax."""
    del t
    v = memory.get("v", np.full_like(g, first)) + g**2
    memory.update(v=v)
    return g / np.sqrt(v + eps)


def momentum(g, memory, t, decay=0.9):
    """Heavy ball: the trace is the sum of decayed gradients."""
    del t
    trace = decay * memory.get("trace", np.zeros_like(g)) + g
    memory.update(trace=trace)
    return trace


def reptile(problem, x, cohorts, rate, steps, epsilon):
    """Nichol et al. 2018, batched: x <- x + epsilon/n sum (y_i - x)."""
    for cohort in cohorts:
        total = sum(problem.weights[i] for i in cohort)
        step = np.zeros_like(x)
        for i in cohort:
            y = local_sgd(problem, i, x, rate, steps[i])
            step += problem.weights[i] / total * (y - x)
        x = x + epsilon * step
    return x


def fomaml(problem, x, cohorts, rate, steps, beta):
    """Finn et al. 2017, algorithm 2 with the derivative of y_i in x left out."""
    for cohort in cohorts:
        total = sum(problem.weights[i] for i in cohort)
        mean = np.zeros_like(x)
        for i in cohort:
            y = x.copy()
            for _ in range(steps[i]):
                y = y - rate * problem.gradient(i, y)
            mean += problem.weights[i] / total * problem.gradient(i, y)
        x = x - beta * mean
    return x


def scaffold(problem, x, cohorts, rate, steps, server_rate):
    """Karimireddy et al. 2020, algorithm 1, option II.

    With equal weights: c <- c + 1/N sum (c_i+ - c_i), x <- x + eta_g/S sum (y_i - x).
    With other weights both means are weighted ones. Returns x, c and all c_i.
    """
    c = np.zeros_like(x)
    c_i = [np.zeros_like(x) for _ in range(problem.clients)]
    whole = sum(problem.weights)
    for cohort in cohorts:
        total = sum(problem.weights[i] for i in cohort)
        dx, dc = np.zeros_like(x), np.zeros_like(x)
        for i in cohort:
            y = x.copy()
            for _ in range(steps[i]):
                y = y - rate * (problem.gradient(i, y) - c_i[i] + c)
            c_plus = c_i[i] - c + (x - y) / (steps[i] * rate)
            dx += problem.weights[i] / total * (y - x)
            dc += problem.weights[i] / whole * (c_plus - c_i[i])
            c_i[i] = c_plus
        x = x + server_rate * dx
        c = c + dc
    return x, c, np.stack(c_i)


def svrg(problem, x, cohorts, rate, batches, coins):
    """Kovalev et al. 2020, algorithm 1 (L-SVRG), at every client of the cohort.

    ``batches[round][i]`` are the rows of each of client i's steps, ``coins[round][i]``
    whether its anchor moves after them. Returns x, all anchors w_i, and the gradients
    of all rows there.
    """
    w_i = [x.copy() for _ in range(problem.clients)]
    for number, cohort in enumerate(cohorts):
        total = sum(problem.weights[i] for i in cohort)
        mean = np.zeros_like(x)
        for i in cohort:
            y = x.copy()
            for rows in batches[number][i]:
                g = np.zeros_like(x)
                for row in rows:
                    g += problem.row_gradient(i, row, y) / len(rows)
                    g -= problem.row_gradient(i, row, w_i[i]) / len(rows)
                y = y - rate * (g + problem.gradient(i, w_i[i]))
            mean += problem.weights[i] / total * y
            if coins[number][i]:
                w_i[i] = x.copy()
        x = mean
    slopes = [problem.gradient(i, w) for i, w in enumerate(w_i)]
    return x, np.stack(w_i), np.stack(slopes)


def local_only(problem, x, cohorts, rate, steps):
    """Every client alone: its own model, trained in the rounds it takes part in."""
    own = [x.copy() for _ in range(problem.clients)]
    for cohort in cohorts:
        for i in cohort:
            own[i] = local_sgd(problem, i, own[i], rate, steps[i])
    return np.stack(own)


def localized(problem, x, rate, steps):
    """The shared model after some local steps at every client."""
    return np.stack(
        [local_sgd(problem, i, x, rate, steps[i]) for i in range(problem.clients)]
    )
