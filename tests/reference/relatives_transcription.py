# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""L2GD, FedRep, agnostic FL and MAPPER in NumPy loops; nothing of fedblend.

A client is its mean quadratic, ``f_i(x) = 1/2 x^T A_i x - b_i^T x``. Cohorts and coins
are given.
"""

import numpy as np


def l2gd(matrices, vectors, x, coins, alpha, lam, p):
    """Hanzely and Richtárik 2020, algorithm 1: one coin for all n devices.

    Returns all x_i, and how often an averaging step followed a local one.
    """
    n = len(vectors)
    own = [x.copy() for _ in range(n)]
    communications, last = 0, 1
    for coin in coins:
        if coin == 0:
            for i in range(n):
                gradient = matrices[i] @ own[i] - vectors[i]
                own[i] = own[i] - alpha / (n * (1 - p)) * gradient
        else:
            communications += last == 0
            mean = sum(own) / n
            for i in range(n):
                pulled = alpha * lam / (n * p)
                own[i] = (1 - pulled) * own[i] + pulled * mean
        last = coin
    return np.stack(own), communications


def fedrep(matrices, vectors, x, cohorts, rate, head_steps, steps, split):
    """Collins et al. 2021, algorithm 1: entries before ``split`` are the body.

    Returns the body, and all heads.
    """
    body = x[:split].copy()
    heads = [x[split:].copy() for _ in vectors]
    for cohort in cohorts:
        reached = []
        for i in cohort:
            for _ in range(head_steps):
                gradient = matrices[i] @ np.concatenate([body, heads[i]]) - vectors[i]
                heads[i] = heads[i] - rate * gradient[split:]
            own = body.copy()
            for _ in range(steps):
                gradient = matrices[i] @ np.concatenate([own, heads[i]]) - vectors[i]
                own = own - rate * gradient[:split]
            reached.append(own)
        body = np.mean(reached, axis=0)
    return body, np.stack(heads)


def nearest_in_simplex(v):
    """Drops what would be negative and tries again (Michelot 1986): no sorting."""
    inside = np.ones(len(v), bool)
    while True:
        shift = (v[inside].sum() - 1) / inside.sum()
        after = inside & (v - shift > 0)
        if (after == inside).all():
            return np.where(inside, v - shift, 0)
        inside = after


def agnostic(matrices, vectors, x, cohorts, rate, q_rate, steps):
    """Mohri et al. 2019, algorithm 1, with uniformly chosen domains.

    The gradient in q of the chosen ones is scaled up to be unbiased. Returns x and q.
    """
    n = len(vectors)
    q = np.full(n, 1 / n)
    for cohort in cohorts:
        chosen = n / len(cohort)
        move, climb = np.zeros_like(x), np.zeros(n)
        for i in cohort:
            y = x.copy()
            for _ in range(steps):
                y = y - rate * (matrices[i] @ y - vectors[i])
            move += chosen * q[i] * (y - x)
            climb[i] = chosen * (x @ matrices[i] @ x / 2 - vectors[i] @ x)
        x = x + move
        q = nearest_in_simplex(q + q_rate * climb)
    return x, q


def mapper(rows, x, cohorts, rate, steps, held, weights, alpha, shares):
    """Mansour et al. 2020, with alpha the weight of the shared model.

    ``rows[i]`` are A and b of every row of client i, of which the first part ``held``
    decides about alpha. Returns z, all y_i and all alpha_i.
    """
    z, alphas = x.copy(), [alpha] * len(rows)
    own = [x.copy() for _ in rows]
    for cohort in cohorts:
        total, mean = sum(shares[i] for i in cohort), np.zeros_like(x)
        for i in cohort:
            a, b = rows[i]
            unseen = int(np.floor(held * len(b)))
            matrix, vector = a[unseen:].mean(axis=0), b[unseen:].mean(axis=0)
            best = np.inf, 0.0, own[i]
            for weight in weights if unseen else [alphas[i]]:
                y = own[i].copy()
                for _ in range(steps):
                    mixed = weight * z + (1 - weight) * y
                    y = y - rate * (1 - weight) * (matrix @ mixed - vector)
                mixed = weight * z + (1 - weight) * y
                score = sum(
                    mixed @ a[row] @ mixed / 2 - b[row] @ mixed for row in range(unseen)
                )
                if score < best[0]:
                    best = score, weight, y
            _, alphas[i], own[i] = best
            here = z.copy()
            for _ in range(steps):
                mixed = alphas[i] * here + (1 - alphas[i]) * own[i]
                here = here - rate * alphas[i] * (matrix @ mixed - vector)
            mean += shares[i] / total * here
        z = mean
    return z, np.stack(own), np.array(alphas)
