# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Scafflix, LoCoDL and TAMUNA in NumPy, from their papers' pseudo-code, on quadratics.

``f_i(x) = 1/2 x^T A_i x - b_i^T x``. Coins and compressors are arguments: a coin for
every step, and a function from (communication, client, vector) to what is received.
Nothing of fedblend is imported.
"""

import numpy as np


def scafflix(matrices, vectors, x, own, alpha, gamma, p, coins):
    """Algorithm 1 of arXiv:2305.13170: x_i and h_i after every communication."""
    n = len(matrices)
    x = [np.array(x, np.float64) for _ in range(n)]
    h = [np.zeros_like(x[0]) for _ in range(n)]
    for theta in coins:
        hat = []
        for i in range(n):
            mixed = alpha[i] * x[i] + (1 - alpha[i]) * own[i]
            slope = matrices[i] @ mixed - vectors[i]
            hat.append(x[i] - gamma[i] / alpha[i] * (slope - h[i]))
        if not theta:
            x = hat
            continue
        top, bottom = np.zeros_like(x[0]), 0.0
        for j in range(n):
            top = top + alpha[j] ** 2 / gamma[j] * hat[j]
            bottom = bottom + alpha[j] ** 2 / gamma[j]
        bar = top / bottom
        for i in range(n):
            x[i] = bar
            h[i] = h[i] + p * alpha[i] / gamma[i] * (bar - hat[i])
        yield np.stack(x), np.stack(h)


def mixture_optimum(matrices, vectors, own, alpha, central=None):
    """The minimizer of ``mean_i f_i(alpha_i x + (1-alpha_i) x_i*)``, plus f_c.

    ``central`` is a pair (C, c) of ``1/2 x^T C x - c^T x``, with its weight in it.
    """
    n, dim = vectors.shape
    left, right = np.zeros((dim, dim)), np.zeros(dim)
    for i in range(n):
        left += alpha[i] ** 2 * matrices[i] / n
        target = vectors[i] - (1 - alpha[i]) * matrices[i] @ own[i]
        right += alpha[i] * target / n
    if central is not None:
        left, right = left + central[0], right + central[1]
    return np.linalg.solve(left, right)


def locodl(slopes, central_slope, x, gamma, p, coins, compress, omega_av, wider):
    """Algorithm 1 of arXiv:2403.04348: x_i, y, u_i and v after every communication.

    ``slopes[i](x)`` is grad f_i, ``central_slope(y)`` grad g; ``wider`` is the divisor
    of the dual step, 1 + 2 omega in the paper.
    """
    n = len(slopes)
    rho = chi = 1 / (1 + omega_av)
    x = [np.array(x, np.float64) for _ in range(n)]
    y = np.array(x[0])
    u = [np.zeros_like(y) for _ in range(n)]
    v = np.zeros_like(y)
    number = 0
    for theta in coins:
        hat = [x[i] - gamma * slopes[i](x[i]) + gamma * u[i] for i in range(n)]
        y_hat = y - gamma * central_slope(y) + gamma * v
        if not theta:
            x, y = hat, y_hat
            continue
        d = [compress(number, i, hat[i] - y_hat) for i in range(n)]
        mean = np.zeros_like(y)
        for j in range(n):
            mean = mean + d[j] / (2 * n)
        step = p * chi / (gamma * wider)
        for i in range(n):
            x[i] = (1 - rho) * hat[i] + rho * (y_hat + mean)
            u[i] = u[i] + step * (mean - d[i])
        y = y_hat + rho * mean
        v = v + step * mean
        number += 1
        yield np.stack(x), y, np.stack(u), v


def tamuna(slopes, x, gamma, p, chi, rounds):
    """TAMUNA of arXiv:2302.09832: the model and h_i after every round.

    A round is (local steps, masks by member): each entry is in s of the masks. With all
    clients in every round it is CompressedScaffnew of arXiv:2210.13277.
    """
    bar, h = np.array(x, np.float64), [np.zeros(len(x)) for _ in slopes]
    for local, masks in rounds:
        hat = {}
        for i in masks:
            hat[i] = bar.copy()
            for _ in range(local):
                hat[i] = hat[i] - gamma * slopes[i](hat[i]) + gamma * h[i]
        after = np.zeros_like(bar)
        for k in range(len(bar)):
            chosen = [hat[i][k] for i in masks if masks[i][k]]
            after[k] = sum(chosen) / len(chosen)
        for i, mask in masks.items():
            h[i] = h[i] + p * chi / gamma * mask * (after - hat[i])
        bar = after
        yield bar, np.stack(h)
