# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The personalized family, a second time, from the papers' equations alone.

Plain NumPy in float64, all rows in every step. ``w`` is the shared model; ``cohorts``
says who takes part in each round; the server's mean counts every client once. The
mixing weight is written as in each paper: ``weight`` belongs to the PERSONAL model.
"""

import numpy as np

RIDGE = 0.1
"""Of the logistic loss: f_i is strongly convex, and its Hessian is not constant."""


def value(w, rows):
    x, y = rows
    return np.mean(np.log1p(np.exp(-y * (x @ w)))) + RIDGE / 2 * w @ w


def slope(w, rows):
    x, y = rows
    return x.T @ (-y / (1 + np.exp(y * (x @ w)))) / len(y) + RIDGE * w


def curvature(w, rows):
    x, y = rows
    chance = 1 / (1 + np.exp(-y * (x @ w)))
    return (x.T * (chance * (1 - chance))) @ x / len(y) + RIDGE * np.eye(len(w))


def apfl_visit(rows, w_i, v_i, a, *, rates, alpha_rate, when):
    """Deng et al., (6), (7) and (10), one step for each of ``rates``; a in [0, 1].

    ``when`` says whether the paper's alpha, here ``a``, moves in every "step", in the
    first step of a "round", or is "fixed".
    """
    for step, eta in enumerate(rates):
        at_mixed = slope(a * v_i + (1 - a) * w_i, rows)
        w_next = w_i - eta * slope(w_i, rows)
        v_next = v_i - eta * a * at_mixed
        if when == "step" or (when == "round" and step == 0):
            a = min(max(a - alpha_rate * ((v_i - w_i) @ at_mixed), 0.0), 1.0)
        w_i, v_i = w_next, v_next
    return w_i, v_i, a


def apfl(clients, w, cohorts, *, weights, **local):
    """The rounds of Deng et al., with the mean of equation (8)."""
    v, a = [w.copy() for _ in clients], list(weights)
    for cohort in cohorts:
        reached = []
        for i in cohort:
            w_i, v[i], a[i] = apfl_visit(clients[i], w, v[i], a[i], **local)
            reached.append(w_i)
        w = np.mean(reached, axis=0)
    return w, [b * v_i + (1 - b) * w for b, v_i in zip(a, v, strict=True)], a


def apfl_outputs(clients, w, cohorts, *, steps, rate, weights, shift):
    """Algorithm 1 with what it outputs: sums over t of p_t = (t + shift)^2."""
    v = [w.copy() for _ in clients]
    t, total = 0, 0.0
    shared = np.zeros_like(w)
    personal = [np.zeros_like(w) for _ in clients]
    for cohort in cohorts:
        copies = {i: w.copy() for i in cohort}
        for _ in range(steps):
            t += 1
            for i in cohort:
                mixed = weights[i] * v[i] + (1 - weights[i]) * copies[i]
                copies[i] = copies[i] - rate(t) * slope(copies[i], clients[i])
                v[i] = v[i] - rate(t) * weights[i] * slope(mixed, clients[i])
            middle = np.mean(list(copies.values()), axis=0)
            p = (t + shift) ** 2
            total += p
            shared += p * middle
            for i, weight in enumerate(weights):
                personal[i] += p * (weight * v[i] + (1 - weight) * middle)
        w = np.mean(list(copies.values()), axis=0)
    return shared / total, [one / total for one in personal]


def perfedavg(clients, w, cohorts, *, steps, rate, inner_rate, hessian, delta):
    """Fallah et al., Algorithm 1; Hessian exact, by central differences, or none."""
    for cohort in cohorts:
        reached = []
        for i in cohort:
            w_i = w.copy()
            for _ in range(steps):
                adapted = w_i - inner_rate * slope(w_i, clients[i])
                g = slope(adapted, clients[i])
                if hessian == "exact":
                    g = g - inner_rate * curvature(w_i, clients[i]) @ g
                elif hessian == "differences":
                    ahead = slope(w_i + delta * g, clients[i])
                    behind = slope(w_i - delta * g, clients[i])
                    g = g - inner_rate * (ahead - behind) / (2 * delta)
                w_i = w_i - rate * g
            reached.append(w_i)
        w = np.mean(reached, axis=0)
    return w, [w - inner_rate * slope(w, rows) for rows in clients]


def nearest(w, rows, lam):
    """argmin over theta of f_i(theta) + lam/2 |theta - w|^2, by Newton's method."""
    theta = w.copy()
    for _ in range(20):
        g = slope(theta, rows) + lam * (theta - w)
        theta = theta - np.linalg.solve(
            curvature(theta, rows) + lam * np.eye(len(w)), g
        )
    return theta


def pfedme(clients, w, cohorts, *, steps, rate, lam, server_rate):
    """Dinh et al., Algorithm 1, its inner problem solved exactly."""
    theta = [w.copy() for _ in clients]
    for cohort in cohorts:
        reached = []
        for i in cohort:
            w_i = w.copy()
            for _ in range(steps):
                theta[i] = nearest(w_i, clients[i], lam)
                w_i = w_i - rate * lam * (w_i - theta[i])
            reached.append(w_i)
        w = (1 - server_rate) * w + server_rate * np.mean(reached, axis=0)
    return w, theta


def ditto(clients, w, cohorts, *, steps, rate, own_steps, own_rate, lam):
    """Li et al., Algorithm 1: v_i is pulled to the model that was broadcast."""
    v = [w.copy() for _ in clients]
    for cohort in cohorts:
        reached = []
        for i in cohort:
            w_i = w.copy()
            for _ in range(steps):
                w_i = w_i - rate * slope(w_i, clients[i])
            for _ in range(own_steps):
                v[i] = v[i] - own_rate * (slope(v[i], clients[i]) + lam * (v[i] - w))
            reached.append(w_i)
        w = np.mean(reached, axis=0)
    return w, v


def l2gd(clients, w, coins, *, rate, lam, p):
    """Hanzely and Richtarik, Algorithm 1: one coin for all, "local" or "mean"."""
    n = len(clients)
    y = [w.copy() for _ in clients]
    for coin in coins:
        middle = np.mean(y, axis=0)
        if coin == "mean":
            y = [y_i - rate * lam / (n * p) * (y_i - middle) for y_i in y]
        else:
            share = rate / (n * (1 - p))
            y = [y[i] - share * slope(y[i], clients[i]) for i in range(n)]
    return np.mean(y, axis=0), y


def fedrep(clients, body, head, cohorts, *, head_steps, steps, rate):
    """Collins et al., Algorithm 1, for f_i = mean 1/2 (x^T body head - y)^2."""
    heads = [head.copy() for _ in clients]
    for cohort in cohorts:
        bodies = []
        for i in cohort:
            x, y = clients[i]
            for _ in range(head_steps):
                off = x @ body @ heads[i] - y
                heads[i] = heads[i] - rate * body.T @ x.T @ off / len(y)
            own = body.copy()
            for _ in range(steps):
                off = x @ own @ heads[i] - y
                own = own - rate * np.outer(x.T @ off, heads[i]) / len(y)
            bodies.append(own)
        body = np.mean(bodies, axis=0)
    return body, heads


def onto_simplex(point):
    """argmin over the simplex of |q - point|: the threshold by bisection."""
    low, high = point.min() - 1, point.max()
    for _ in range(200):
        middle = (low + high) / 2
        if np.maximum(point - middle, 0).sum() > 1:
            low = middle
        else:
            high = middle
    return np.maximum(point - (low + high) / 2, 0)


def agnostic(clients, w, cohorts, *, steps, rate, q_rate):
    """Mohri et al., stochastic AFL, local steps in place of one gradient.

    Both slopes are taken at the old (w, q). A cohort stands for all clients: what it
    says is multiplied by n / |cohort|, which makes both slopes unbiased.
    """
    n = len(clients)
    q = np.full(n, 1 / n)
    for cohort in cohorts:
        move, climb = np.zeros_like(w), np.zeros(n)
        for i in cohort:
            w_i = w.copy()
            for _ in range(steps):
                w_i = w_i - rate * slope(w_i, clients[i])
            move += n / len(cohort) * q[i] * (w_i - w)
            climb[i] = n / len(cohort) * value(w, clients[i])
        w, q = w + move, onto_simplex(q + q_rate * climb)
    return w, q


def apfl_agnostic(clients, w, cohorts, *, weights, q_rate, **local):
    """Local steps of Deng et al. for the shared problem of Mohri et al."""
    n = len(clients)
    q, v, a = np.full(n, 1 / n), [w.copy() for _ in clients], list(weights)
    for cohort in cohorts:
        move, climb = np.zeros_like(w), np.zeros(n)
        for i in cohort:
            w_i, v[i], a[i] = apfl_visit(clients[i], w, v[i], a[i], **local)
            move += n / len(cohort) * q[i] * (w_i - w)
            climb[i] = n / len(cohort) * value(w, clients[i])
        w, q = w + move, onto_simplex(q + q_rate * climb)
    return w, q, [b * v_i + (1 - b) * w for b, v_i in zip(a, v, strict=True)]


def mapper(clients, w, cohorts, *, steps, rate, grid):
    """Mansour et al.: for every weight a personal model, the best of them, then w.

    For clients whose rows are all the same: what is held out does not matter.
    """
    y, chosen = [w.copy() for _ in clients], [0.5] * len(clients)
    for cohort in cohorts:
        reached = []
        for i in cohort:
            tried = []
            for weight in grid:
                own = y[i].copy()
                for _ in range(steps):
                    mixed = weight * own + (1 - weight) * w
                    own = own - rate * weight * slope(mixed, clients[i])
                loss = value(weight * own + (1 - weight) * w, clients[i])
                tried.append((loss, weight, own))
            _, chosen[i], y[i] = min(tried, key=lambda one: one[0])
            w_i = w.copy()
            for _ in range(steps):
                mixed = chosen[i] * y[i] + (1 - chosen[i]) * w_i
                w_i = w_i - rate * (1 - chosen[i]) * slope(mixed, clients[i])
            reached.append(w_i)
        w = np.mean(reached, axis=0)
    return w, [b * y_i + (1 - b) * w for b, y_i in zip(chosen, y, strict=True)], chosen
