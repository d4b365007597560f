# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Runs FLIX beside its paper's algorithms in NumPy loops, in float64.

Weights alpha_i, smoothness L_i, rand-k's k and DIANA's b_i all differ by client; only
the entries that rand-k chose are taken from fedblend.
"""

import flix_transcription as paper
import jax
import numpy as np

import fedblend as fb
import problems
from fedblend import compress, keys
from fedblend.data.datasets.built_in import quadratic_loss

ROUNDS, CLIENTS, DIM, L2 = 12, 7, 5, 0.1
ALPHA = np.array([0.9, 0.3, 0.5, 1.0, 0.05, 0.7, 0.0])
K = np.array([1, 2, 3, 5, 2, 4, 1])
OMEGA = DIM / K - 1
BETA = np.array([0.1, 0.3, 0.5, 1.0, 0.2, 0.6, 0.15])
root = jax.random.key(3)
params = jax.numpy.linspace(-1.0, 1.0, DIM)


def quadratics():
    on = problems.quadratics(dim=DIM, seed=5)
    pairs = zip(*problems.client_matrices(on), strict=True)
    return on.federated_data, quadratic_loss, [paper.Quadratic(*pair) for pair in pairs]


def logistic():
    rng = np.random.default_rng(1)
    inputs = rng.standard_normal((sum(problems.COUNTS), DIM)) * [1, 2, 0.5, 3, 1]
    labels = (inputs @ rng.standard_normal(DIM) + rng.standard_normal(len(inputs))) > 0
    ends = np.cumsum(problems.COUNTS)
    parts = np.split(np.arange(ends[-1]), ends[:-1])
    federated_data = fb.federate((inputs, labels.astype(np.int32)), parts)
    loss = fb.losses.l2(fb.losses.logistic(lambda x, a: a @ x), L2)
    signs = np.where(labels, 1.0, -1.0)
    clients = [paper.Logistic(inputs[rows], signs[rows], L2) for rows in parts]
    return federated_data, loss, clients


def sent(vector, number, client, purpose):
    """Rand-k of the paper: k entries, scaled by d/k."""
    key = keys.named(keys.derive(root, "client", number, client), purpose)
    bits = np.asarray(jax.random.bits(key, (DIM,), "uint32"))
    kept = np.zeros(DIM)
    kept[np.argsort(bits)[::-1][: K[client]]] = 1
    return vector * kept * DIM / K[client]


def comparisons(name, federated_data, loss, clients):
    smooth = np.array([client.smooth for client in clients])
    solver = fb.solvers.newton(loss, tolerance=1e-13)

    def descent(step, average="minimizer"):
        def method(mixed):
            return fb.fedavg(mixed, fb.Work(step, steps=1, batch_size=None))

        return fb.flix(
            loss, method, alpha=ALPHA, local=solver, smooth=smooth, average=average
        )

    def run(algorithm, rounds=ROUNDS):
        started = fb.simulate(
            algorithm, params, federated_data, root, rounds=rounds, every=5, chunk=3
        )
        return started.complete()

    def models(done):
        return np.stack([done.personal(client) for client in range(CLIENTS)])

    first = paper.average(clients, ALPHA)
    L_alpha = paper.smoothness(clients, ALPHA)
    stiff = ALPHA**2 * smooth
    done = run(descent(1 / L_alpha), rounds=1)
    x = paper.dgd(clients, ALPHA, first, 1 / L_alpha, 1)
    yield f"{name}, dgd, one round from x_avg", done.shared, x
    far = paper.flat_average(clients, ALPHA)
    done = run(descent(1 / L_alpha, "stationary"), rounds=1)
    x = paper.dgd(clients, ALPHA, far, 1 / L_alpha, 1)
    yield f"{name}, dgd, one round from the other x_avg", done.shared, x
    done = run(descent(1 / L_alpha))
    x = paper.dgd(clients, ALPHA, first, 1 / L_alpha, ROUNDS)
    yield f"{name}, dgd", done.shared, x
    yield f"{name}, dgd: deployed", models(done), paper.deployed(clients, ALPHA, x)

    step = 1 / (L_alpha + 2 * np.max(stiff * OMEGA) / CLIENTS)
    done = run(fb.transforms.compressed(descent(step), compress.rand_k(K)))
    x = paper.dcgd(
        clients,
        ALPHA,
        first,
        step,
        ROUNDS,
        lambda vector, k, i: sent(vector, k, i, "compress"),
    )
    yield f"{name}, dcgd", done.shared, x
    yield f"{name}, dcgd: deployed", models(done), paper.deployed(clients, ALPHA, x)

    memory = 4 * np.max(BETA * OMEGA * stiff) / (CLIENTS * BETA.min())
    step = 1 / (1 / step + memory)
    gradients = [
        paper.mixed_gradient(client, a, first)
        for client, a in zip(clients, ALPHA, strict=True)
    ]
    for begun, h_i in (("zero", [np.zeros(DIM)] * CLIENTS), ("first", gradients)):
        done = run(
            fb.transforms.diana(
                descent(step), compress.rand_k(K), rate=BETA, start=begun
            )
        )
        x, h, own = paper.diana(
            clients,
            ALPHA,
            first,
            h_i,
            step,
            BETA,
            ROUNDS,
            lambda vector, k, i: sent(vector, k, i, "diana"),
        )
        memories = np.stack([done.client(i).memory for i in range(CLIENTS)])
        end = f"{name}, diana, {begun}"
        yield end, done.shared, x
        yield f"{end}: server memory", done.server.memory / -step, h
        yield f"{end}: client memories", memories / -step, own
        yield f"{end}: deployed", models(done), paper.deployed(clients, ALPHA, x)


def gap(ours, theirs) -> float:
    assert np.asarray(ours).dtype == np.float64
    assert np.abs(theirs).max() > 1e-3, "nothing to compare"
    return float(np.abs(np.asarray(ours) - theirs).max())


def gaps(name: str) -> dict[str, float]:
    """The largest difference in every comparison on a problem."""
    problem = {"quadratics": quadratics, "logistic": logistic}[name]
    return {case: gap(*pair) for case, *pair in comparisons(name, *problem())}
