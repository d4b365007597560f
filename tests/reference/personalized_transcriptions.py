# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Per-FedAvg, pFedMe and Ditto as their papers write them, in NumPy loops.

Nothing of fedblend. A client is a logistic regression with a penalty, whose Hessian is
not constant; the rows of every step are given, round by round, client by client.
"""

import numpy as np


class Logistic:
    """f_i(x) = mean over rows of log(1 + exp(-b a^T x)) + penalty/2 |x|^2."""

    def __init__(self, rows, weights, penalty):
        self.rows, self.weights, self.penalty = rows, weights, penalty
        self.clients = len(rows)

    def gradient(self, client, x, picked):
        features, signs = self.rows[client]
        total = np.zeros_like(x)
        for row in picked:
            margin = signs[row] * features[row] @ x
            total += -signs[row] * features[row] / (1 + np.exp(margin))
        return total / len(picked) + self.penalty * x

    def hessian(self, client, x, picked):
        features, signs = self.rows[client]
        total = np.zeros((len(x), len(x)))
        for row in picked:
            margin = signs[row] * features[row] @ x
            chance = 1 / (1 + np.exp(-margin))
            total += chance * (1 - chance) * np.outer(features[row], features[row])
        return total / len(picked) + self.penalty * np.eye(len(x))


def exact(problem, i, w, v, picked, delta):
    """Fallah et al. 2020, eq. (7): the Hessian itself, times v."""
    del delta
    return problem.hessian(i, w, picked) @ v


def hessian_free(problem, i, w, v, picked, delta):
    """Fallah et al. 2020, section 5, HF: a central difference of gradients along v."""
    ahead = problem.gradient(i, w + delta * v, picked)
    behind = problem.gradient(i, w - delta * v, picked)
    return (ahead - behind) / (2 * delta)


def first_order(problem, i, w, v, picked, delta):
    """Fallah et al. 2020, section 5, FO: the term is left out."""
    del problem, i, w, picked, delta
    return np.zeros_like(v)


def perfedavg(problem, w, cohorts, alpha, beta, product, delta, batches):
    """Fallah et al. 2020, algorithm 1.

    ``batches[round][i]`` lists, for each of client i's tau steps, the rows of D (inner
    gradient), D' (outer gradient) and D'' (Hessian).
    """
    for number, cohort in enumerate(cohorts):
        total = sum(problem.weights[i] for i in cohort)
        mean = np.zeros_like(w)
        for i in cohort:
            w_i = w.copy()
            for inner, outer, curved in batches[number][i]:
                adapted = w_i - alpha * problem.gradient(i, w_i, inner)
                v = problem.gradient(i, adapted, outer)
                curve = product(problem, i, w_i, v, curved, delta)
                w_i = w_i - beta * (v - alpha * curve)
            mean += problem.weights[i] / total * w_i
        w = mean
    return w


def adapted(problem, w, alpha, batches):
    """What clients deploy: w after gradient steps on the rows ``batches[i]``."""
    models = []
    for i in range(problem.clients):
        own = w.copy()
        for picked in batches[i]:
            own = own - alpha * problem.gradient(i, own, picked)
        models.append(own)
    return np.stack(models)


def pfedme(problem, w, cohorts, lam, eta, inner_rate, K, beta, batches):
    """Dinh et al. 2020, algorithm 1; K gradient steps from w_i are its inner solver.

    ``batches[round][i]`` are the rows of each of client i's R local iterations. Returns
    w, and every client's theta of its last iteration.
    """
    theta = [w.copy() for _ in range(problem.clients)]
    for number, cohort in enumerate(cohorts):
        total = sum(problem.weights[i] for i in cohort)
        mean = np.zeros_like(w)
        for i in cohort:
            w_i = w.copy()
            for picked in batches[number][i]:
                near = w_i.copy()
                for _ in range(K):
                    slope = problem.gradient(i, near, picked)
                    near = near - inner_rate * (slope + lam * (near - w_i))
                w_i = w_i - eta * lam * (w_i - near)
                theta[i] = near
            mean += problem.weights[i] / total * w_i
        w = (1 - beta) * w + beta * mean
    return w, np.stack(theta)


def ditto(problem, w, cohorts, lam, rate, eta, batches, own_batches):
    """Li et al. 2021, algorithm 1, with FedAvg as the global solver.

    ``batches[round][i]`` are the rows of the steps on w, ``own_batches[round][i]`` of
    those on v_i, whose pull is to the w that was broadcast. Returns w and all v_i.
    """
    v = [w.copy() for _ in range(problem.clients)]
    for number, cohort in enumerate(cohorts):
        total = sum(problem.weights[i] for i in cohort)
        mean = np.zeros_like(w)
        for i in cohort:
            w_i = w.copy()
            for picked in batches[number][i]:
                w_i = w_i - rate * problem.gradient(i, w_i, picked)
            for picked in own_batches[number][i]:
                slope = problem.gradient(i, v[i], picked)
                v[i] = v[i] - eta * (slope + lam[i] * (v[i] - w))
            mean += problem.weights[i] / total * (w_i - w)
        w = w + mean
    return w, np.stack(v)
