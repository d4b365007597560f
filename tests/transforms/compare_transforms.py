# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""DCGD, DIANA and EF21 beside their papers in NumPy loops, in float64.

The loops speak of gradients as the papers do; only cohorts and the entries that rand-k
chose are taken from fedblend.
"""

import jax
import numpy as np

import fedblend as fb
import problems
from fedblend import compress, keys
from fedblend.simulation.sampling import cohorts

DIM, RATE, ROUNDS, CLIENTS = 6, 0.2, 9, 7
K = np.array([1, 2, 3, 6, 2, 4, 5])
B = np.array([0.1, 0.3, 0.5, 1.0, 0.2, 0.6, 0.8])
"""At most 1/(omega + 1) = K/DIM."""
FEW = (("b by client", "first"), ("usual b", "zero"))
"""How DIANA's memories move and begin, unless all ways are asked for."""

on = problems.quadratics(dim=DIM)
root = jax.random.key(7)
start = np.asarray(on.params)
matrices, vectors = problems.client_matrices(on)
plain = fb.fedavg(on.loss, fb.Work(RATE, steps=1, batch_size=None))


def gradient(i, x):
    return matrices[i] @ x - vectors[i]


def chosen(number, i, purpose, k) -> np.ndarray:
    """1 at the entries that client i sends, else 0."""
    key = keys.named(keys.derive(root, "client", number, i), purpose)
    bits = jax.random.bits(key, (DIM,), "uint32")
    mask = np.zeros(DIM)
    mask[np.argsort(np.asarray(bits))[::-1][: k[i]]] = 1
    return mask


def rand(vector, number, i, purpose, k):
    return vector * chosen(number, i, purpose, k) * DIM / k[i]


def top(vector, k):
    largest_only = np.zeros_like(vector)
    largest = np.argsort(-np.abs(vector))[:k]
    largest_only[largest] = vector[largest]
    return largest_only


def dcgd(rounds, weights, k):
    """Khirirat et al. 2018: x <- x - gamma mean C_i(grad f_i(x))."""
    x = start.copy()
    for number, cohort in enumerate(rounds):
        total, g = sum(weights[i] for i in cohort), np.zeros(DIM)
        for i in cohort:
            sent = rand(gradient(i, x), number, i, "compress", k)
            g += weights[i] / total * sent
        x = x - RATE * g
    return x


def diana(rounds, weights, k, b, first):
    """Mishchenko et al. 2019, algorithm 1; h is the mean over all clients.

    From the first update: a client sends all of it in its first round.
    """
    x, whole = start.copy(), sum(weights)
    h_i, h = [np.zeros(DIM) for _ in range(CLIENTS)], np.zeros(DIM)
    new = {*range(CLIENTS)} if first else set()
    for number, cohort in enumerate(rounds):
        total = sum(weights[i] for i in cohort)
        mean, change = np.zeros(DIM), np.zeros(DIM)
        for i in cohort:
            d = rand(gradient(i, x) - h_i[i], number, i, "diana", k)
            if i in new:
                d = gradient(i, x)
            follow = 1 if i in new else b[i]
            mean += weights[i] / total * d
            change += weights[i] / whole * follow * d
            h_i[i] = h_i[i] + follow * d
            new.discard(i)
        x = x - RATE * (h + mean)
        h = h + change
    return x, h, np.stack(h_i)


def ef21(rounds, weights, k):
    """Richtárik et al. 2021, algorithm 2, from g_i^0 = C(grad f_i(x^0))."""
    x, whole = start.copy(), sum(weights)
    g_i = [np.zeros(DIM) for _ in range(CLIENTS)]
    for cohort in rounds:
        for i in cohort:
            g_i[i] = g_i[i] + top(gradient(i, x) - g_i[i], k[i])
        x = x - RATE * sum(weights[i] / whole * g_i[i] for i in range(CLIENTS))
    return x, np.stack(g_i)


def run(algorithm, weights, cohort):
    return fb.simulate(
        algorithm,
        on.params,
        on.federated_data,
        root,
        rounds=ROUNDS,
        cohort=cohort,
        chunk=3,
        every=4,
        weights=weights,
    ).complete()


def comparisons(every: bool):
    counts = on.federated_data.train.counts.astype(float)
    for cohort, named in ((7, "uniform"), (4, "by_count")):
        weights = counts if named == "by_count" else np.ones(CLIENTS)
        rounds = cohorts(root, list(range(ROUNDS)), CLIENTS, cohort).tolist()
        end = f"{cohort} of 7, {named}"
        same = np.full(CLIENTS, 2)
        for words, k in (("one k", same), ("k by client", K)):
            ours = compress.rand_k(2 if k is same else K, places="sent")
            done = run(fb.transforms.compressed(plain, ours), named, cohort)
            yield f"dcgd, {words}, {end}", done.shared, dcgd(rounds, weights, k)
        omega = DIM / K - 1
        for words, b in (("b by client", B), ("usual b", None), ("one b", 0.15)):
            for begun in ("zero", "first"):
                if not every and (words, begun) not in FEW:
                    continue
                ours = fb.transforms.diana(
                    plain, compress.rand_k(K), rate=b, start=begun
                )
                done = run(ours, named, cohort)
                rates = 1 / (omega + 1) if b is None else np.broadcast_to(b, CLIENTS)
                x, h, own = diana(rounds, weights, K, rates, begun == "first")
                name = f"diana, {words}, {begun}, {end}"
                memories = np.stack([done.client(i).memory for i in range(CLIENTS)])
                yield name, done.shared, x
                yield f"{name}: server memory", done.server.memory / -RATE, h
                yield f"{name}: client memories", memories / -RATE, own
        for words, k in (("one k", same), ("k by client", K)):
            done = run(
                fb.transforms.ef21(plain, compress.top_k(2 if k is same else K)),
                named,
                cohort,
            )
            x, own = ef21(rounds, weights, k)
            estimates = np.stack([done.client(i).estimate for i in range(CLIENTS)])
            yield f"ef21, {words}, {end}", done.shared, x
            yield f"ef21, {words}, {end}: estimates", estimates / -RATE, own


def gap(ours, theirs) -> float:
    assert np.asarray(ours).dtype == np.float64
    return float(np.abs(np.asarray(ours) - theirs).max())


def gaps(*asked: str) -> dict[str, float]:
    """The largest difference in every comparison."""
    return {name: gap(*pair) for name, *pair in comparisons("all" in asked)}
