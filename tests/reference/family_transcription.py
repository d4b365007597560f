# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FedEM, HypCluster and FedALA as their papers write them, in NumPy loops.

Nothing of fedblend. Models are logistic regressions without intercept; every step takes
all rows of a client, ``rows[i] = (inputs, labels)`` with labels 0 and 1.
"""

import numpy as np


def row_loss(theta, x, y):
    """Minus the log of the probability of label y."""
    chance = 1 / (1 + np.exp(-(x @ theta)))
    return -np.log(chance) if y == 1 else -np.log(1 - chance)


def row_gradient(theta, x, y):
    return (1 / (1 + np.exp(-(x @ theta))) - y) * x


def responsibilities(thetas, weights, inputs, labels):
    """Marfoq et al. 2021, eq. (11), the E-step: q[row][m]."""
    q = np.zeros((len(labels), len(thetas)))
    for row, (x, y) in enumerate(zip(inputs, labels, strict=True)):
        for m, theta in enumerate(thetas):
            q[row, m] = weights[m] * np.exp(-row_loss(theta, x, y))
        q[row] = q[row] / q[row].sum()
    return q


def fedem(rows, thetas, cohorts, rate, steps):
    """Marfoq et al. 2021, Algorithm 1; the models, and the weights of every client."""
    number = len(thetas)
    weights = np.full((len(rows), number), 1 / number)
    for cohort in cohorts:
        total = sum(len(rows[i][1]) for i in cohort)
        after = [np.zeros_like(theta) for theta in thetas]
        for i in cohort:
            inputs, labels = rows[i]
            q = responsibilities(thetas, weights[i], inputs, labels)
            weights[i] = q.mean(axis=0)
            for m in range(number):
                theta = thetas[m].copy()
                for _ in range(steps):
                    slope = np.zeros_like(theta)
                    for row, (x, y) in enumerate(zip(inputs, labels, strict=True)):
                        slope += q[row, m] * row_gradient(theta, x, y)
                    theta = theta - rate * slope / len(labels)
                after[m] += len(labels) / total * theta
        thetas = after
    return np.array(thetas), weights


def mixed_chance(thetas, weights, x):
    """The probability of label 1 by the mixture."""
    return sum(
        weight / (1 + np.exp(-(x @ theta)))
        for weight, theta in zip(weights, thetas, strict=True)
    )


def best(thetas, inputs, labels):
    """The number of the model with the least mean loss."""
    means = []
    for theta in thetas:
        losses = [row_loss(theta, x, y) for x, y in zip(inputs, labels, strict=True)]
        means.append(np.mean(losses))
    return int(np.argmin(means))


def hypcluster(rows, thetas, cohorts, rate, steps):
    """Mansour et al. 2020, HypCluster: the models."""
    thetas = [theta.copy() for theta in thetas]
    for cohort in cohorts:
        members = {m: [] for m in range(len(thetas))}
        for i in cohort:
            members[best(thetas, *rows[i])].append(i)
        after = [theta.copy() for theta in thetas]
        for m, clients in members.items():
            if not clients:
                continue
            total = sum(len(rows[i][1]) for i in clients)
            after[m] = np.zeros_like(thetas[m])
            for i in clients:
                inputs, labels = rows[i]
                theta = thetas[m].copy()
                for _ in range(steps):
                    slope = np.zeros_like(theta)
                    for x, y in zip(inputs, labels, strict=True):
                        slope += row_gradient(theta, x, y)
                    theta = theta - rate * slope / len(labels)
                after[m] += len(labels) / total * theta
        thetas = after
    return np.array(thetas)


def fedala(problem, w, cohorts, rate, steps, eta, passes, head, few):
    """Zhang et al. 2023, Algorithm 1, with all rows in a step.

    ``problem.gradient(i, x, rows)`` is that of client i's mean over these rows.
    ``head``: the places of entries that have weights; ``few[i]``: the rows that these
    learn from; ``passes``: the most at first. Returns the shared model, all own models
    and their weights.
    """
    own = [w.copy() for _ in range(problem.clients)]
    weights = [np.ones_like(w) for _ in range(problem.clients)]
    settled = [False] * problem.clients
    for cohort in cohorts:
        mean, total = np.zeros_like(w), sum(problem.weights[i] for i in cohort)
        for i in cohort:
            gap = w - own[i]
            for _ in range(1 if settled[i] else passes):
                before = weights[i].copy()
                slope = problem.gradient(i, own[i] + gap * weights[i], few[i])
                for place in head:
                    moved = weights[i][place] - eta * slope[place] * gap[place]
                    weights[i][place] = min(max(moved, 0.0), 1.0)
                if np.abs(weights[i] - before).max() <= 0.01:
                    break
            settled[i] = settled[i] or bool(np.abs(gap).max() > 0)
            x = own[i] + gap * weights[i]
            for _ in range(steps):
                x = x - rate * problem.gradient(i, x, range(problem.counts[i]))
            own[i] = x
            mean += problem.weights[i] / total * x
        w = mean
    return w, np.array(own), np.array(weights)
