# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Methods on low-rank adapters of a linear model in NumPy loops; nothing of fedblend.

Client i has rows X and targets Y, and ``f_i = 1/2 mean over rows of |X W'^T - Y|^2``,
where W' is the base W plus the change of its adapters.
"""

import numpy as np


def slope(w, x, y):
    """The gradient of f_i in the whole weight."""
    return (x @ w.T - y).T @ x / len(x)


def one_adapter(w, x, y, a, b):
    """Gradients in A and in B of f_i at W + B A."""
    g = slope(w + b @ a, x, y)
    return b.T @ g, g @ a.T


def fedsa(w, data, a, b, cohorts, rate, steps):
    """FedSA-LoRA: both factors are trained, A is averaged."""
    own = [b.copy() for _ in data]
    for cohort in cohorts:
        total = np.zeros_like(a)
        for i in cohort:
            mine = a.copy()
            for _ in range(steps):
                x, y = data[i]
                in_a, in_b = one_adapter(w, x, y, mine, own[i])
                mine, own[i] = mine - rate * in_a, own[i] - rate * in_b
            total += mine
        a = total / len(cohort)
    return a, np.stack(own)


def alternating(w, data, a, b, cohorts, rate, steps, turns):
    """One factor is trained and averaged in a round: ``turns`` says which."""
    for cohort, turn in zip(cohorts, turns, strict=True):
        total = 0.0
        for i in cohort:
            x, y = data[i]
            mine = a if turn == "a" else b
            for _ in range(steps):
                if turn == "a":
                    mine = mine - rate * one_adapter(w, x, y, mine, b)[0]
                else:
                    mine = mine - rate * one_adapter(w, x, y, a, mine)[1]
            total = total + mine
        a, b = (total / len(cohort), b) if turn == "a" else (a, total / len(cohort))
    return a, b


def two_adapters(w, data, start, cohorts, rate, steps):
    """FedAlt on a shared and a personal adapter: personal first, then shared."""
    (a, b), own = start["shared"], [start["personal"] for _ in data]
    for cohort in cohorts:
        new = []
        for i in cohort:
            x, y = data[i]
            c, d = own[i]
            for _ in range(steps):
                in_c, in_d = one_adapter(w + b @ a, x, y, c, d)
                c, d = c - rate * in_c, d - rate * in_d
            mine, other = a, b
            for _ in range(steps):
                in_a, in_b = one_adapter(w + d @ c, x, y, mine, other)
                mine, other = mine - rate * in_a, other - rate * in_b
            own[i] = c, d
            new.append((mine, other))
        a, b = (np.mean(factor, axis=0) for factor in zip(*new, strict=True))
    return (a, b), own


def mixer(gate, x):
    """The adaptive mixer: weights of both adapters, row by row."""
    scores = np.exp(x @ gate.T)
    return scores / scores.sum(axis=1, keepdims=True)


def outputs(w, x, own, rest, gate):
    """The base, and both adapters' outputs in the mixture of each row."""
    weights = mixer(gate, x)
    mixed = x @ w.T
    for place, (a, b) in enumerate((own, rest)):
        mixed = mixed + weights[:, [place]] * (x @ a.T @ b.T)
    return mixed


def fedalt(w, data, a, b, cohorts, rate, steps):
    """FedALT: the mean of the others' adapters is frozen beside one's own."""
    clients = range(len(data))
    own = [(a.copy(), b.copy()) for _ in clients]
    gates = [np.zeros((2, w.shape[1])) for _ in clients]
    for cohort in cohorts:
        sent = list(own)  # all clients' adapters, as the server has them
        for i in cohort:
            rest = tuple(
                np.mean([sent[j][factor] for j in clients if j != i], axis=0)
                for factor in range(2)
            )
            x, y = data[i]
            for _ in range(steps):
                (c, d), gate = own[i], gates[i]
                weights = mixer(gate, x)
                error = (outputs(w, x, own[i], rest, gate) - y) / len(x)
                parts = [x @ one.T @ two.T for one, two in (own[i], rest)]
                into = np.stack([(error * part).sum(axis=1) for part in parts], axis=1)
                scored = weights * (into - (weights * into).sum(axis=1, keepdims=True))
                weighed = weights[:, [0]] * error
                own[i] = (
                    c - rate * (weighed @ d).T @ x,
                    d - rate * weighed.T @ (x @ c.T),
                )
                gates[i] = gate - rate * scored.T @ x
    return own, gates
