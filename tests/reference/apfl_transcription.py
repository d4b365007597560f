# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""APFL's equations in NumPy, literally, loops and all; nothing of fedblend.

A client is least squares on rows ``(x, y)``: ``f_i(w; rows) = mean 1/2 (x^T w - y)^2``.
Here ``a`` is the paper's alpha, the weight of v. Cohorts and batches (row numbers by
round, client and step) are given.
"""

import numpy as np


class LeastSquares:
    """The clients' rows."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets
        self.clients = len(inputs)

    def gradient(self, i, rows, w):
        x, y = self.inputs[i][rows], self.targets[i][rows]
        return x.T @ (x @ w - y) / len(rows)


def apfl(
    problem, w, cohorts, batches, eta, a, when, *, own=None, judge=None, rate=None
):
    """Equations (6), (7), (8) and (10).

    ``own`` and ``judge`` are other batches for v and for alpha, ``rate`` is that of
    alpha. Where the rows of alpha are none, alpha stands still. Returns w, all v, all
    a, and every client's w at the end of its last round.
    """
    own = batches if own is None else own
    judge = own if judge is None else judge
    rate = eta if rate is None else rate
    v = [w.copy() for _ in range(problem.clients)]
    a = [float(one) for one in a]
    last = [w.copy() for _ in range(problem.clients)]
    for number, cohort in enumerate(cohorts):
        reached = []
        for i in cohort:
            w_i = w.copy()
            for t, rows in enumerate(batches[number][i]):
                bar = a[i] * v[i] + (1 - a[i]) * w_i
                down_w = problem.gradient(i, rows, w_i)
                down_v = a[i] * problem.gradient(i, own[number][i][t], bar)
                seen = judge[number][i][t]
                new_a = a[i]
                if len(seen) and (when == "step" or (when == "round" and t == 0)):
                    slope = (v[i] - w_i) @ problem.gradient(i, seen, bar)
                    new_a = min(max(a[i] - rate * slope, 0.0), 1.0)
                w_i, v[i], a[i] = w_i - eta * down_w, v[i] - eta * down_v, new_a
            last[i] = w_i
            reached.append(w_i)
        w = np.mean(reached, axis=0)
    return w, np.stack(v), np.array(a), np.stack(last)


def averaged(problem, w, cohorts, batches, eta, a, shift):
    """Algorithm 1 with its output: all iterates are kept and averaged at the end.

    ``eta(t)`` is the rate of step t = 1, 2 ... Returns w, w_hat and all v_hat.
    """
    v = [w.copy() for _ in range(problem.clients)]
    t, weights, means, own = 0, [], [], []
    for number, cohort in enumerate(cohorts):
        w_j = {i: w.copy() for i in cohort}
        for step in range(len(batches[number][cohort[0]])):
            t += 1
            for i in cohort:
                rows = batches[number][i][step]
                bar = a[i] * v[i] + (1 - a[i]) * w_j[i]
                down_w = problem.gradient(i, rows, w_j[i])
                down_v = a[i] * problem.gradient(i, rows, bar)
                w_j[i] = w_j[i] - eta(t) * down_w
                v[i] = v[i] - eta(t) * down_v
            weights.append((t + shift) ** 2)
            means.append(np.mean([*w_j.values()], axis=0))
            own.append([one.copy() for one in v])
        w = np.mean([*w_j.values()], axis=0)
    total = sum(weights)
    w_hat = sum(p * mean for p, mean in zip(weights, means, strict=True)) / total
    v_hat = []
    for i in range(problem.clients):
        parts = zip(weights, own, means, strict=True)
        summed = sum(p * (a[i] * v_t[i] + (1 - a[i]) * m) for p, v_t, m in parts)
        v_hat.append(summed / total)
    return w, w_hat, np.stack(v_hat)
