# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""APFL of FedTorch and FedJAX against their equations in NumPy loops."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend import keys
from fedblend.batches import random_rows
from fedblend.losses import squared_error
from fedblend.simulation.sampling import cohorts
from fedblend.trees import precision
from fedblend_reproductions.apfl.other_libraries import apfl_fedjax, apfl_fedtorch

COUNTS, DIM, RATE, ROUNDS, COHORT = (5, 2, 6, 3, 7), 3, 0.2, 7, 3
CLIENTS, STEPS, SIZE = len(COUNTS), 4, 2
LOCAL = np.array([0.3, 0.9, 0.5, 0.01, 0.7])
"""The paper's alpha of every client, the weight of v."""
BEGIN = np.array([0.1, -0.2, 0.3, 0.4])
TENSORS = (slice(0, DIM), slice(DIM, DIM + 1))
TOLERANCE = 1e-10
"""Float64 rounds at 1e-16; 28 steps stay far below, and any other formula does not."""
WORK = fb.Work(RATE, steps=STEPS, batch_size=SIZE)
WRONG: Any = "fast"


class Line(NamedTuple):
    """Parameters of two tensors."""

    weight: jax.Array
    bias: jax.Array


def apply(params: Line, inputs):
    return inputs @ params.weight + params.bias


def flat(params: Line) -> np.ndarray:
    return np.concatenate([params.weight, params.bias], axis=-1)


LOSS = squared_error(apply)


class LeastSquares(NamedTuple):
    """A client's rows; ``f(w) = mean 1/2 (x^T w - y)^2``."""

    inputs: np.ndarray
    targets: np.ndarray

    def gradient(self, rows, w):
        x, y = self.inputs[rows], self.targets[rows]
        return x.T @ (x @ w - y) / len(rows)

    def mixed_prediction_gradient(self, rows, a, v, w):
        """Of ``mean 1/2 (a x^T v + (1 - a) x^T w - y)^2`` in v and in w."""
        x, y = self.inputs[rows], self.targets[rows]
        inside = x.T @ (a * (x @ v) + (1 - a) * (x @ w) - y) / len(rows)
        return a * inside, (1 - a) * inside


class Setting(NamedTuple):
    """The run of a method, its clients by hand, its cohorts, and their batches."""

    run: fb.Run
    clients: list[LeastSquares]
    cohorts: list[list[int]]
    batches: list[list[np.ndarray]]


def ran(build) -> Setting:
    """A run in float64, with the row numbers that fedblend draws for every step."""
    rng, root = np.random.default_rng(0), jax.random.key(3)
    rows = rng.standard_normal((sum(COUNTS), DIM)), rng.standard_normal(sum(COUNTS))
    parts = np.split(np.arange(len(rows[1])), np.cumsum(COUNTS)[:-1])
    data = fb.federate(rows, parts)
    run = fb.simulate(
        build(LOSS, WORK, alpha=1 - LOCAL),
        Line(jnp.asarray(BEGIN[:DIM]), jnp.asarray(BEGIN[DIM:])),
        data,
        root,
        rounds=ROUNDS,
        cohort=COHORT,
        every=ROUNDS,
    ).complete()
    own = [data.train.rows(i) for i in range(CLIENTS)]
    by_hand = [
        LeastSquares(np.column_stack([x, np.ones(len(x))]), np.asarray(y))
        for x, y in own
    ]

    def drawn(number: int, i: int) -> np.ndarray:
        key = keys.derive(root, "client", number, i)
        return np.asarray(random_rows(data.train.shard(i), key, (STEPS, SIZE)))

    batches = [[drawn(number, i) for i in range(CLIENTS)] for number in range(ROUNDS)]
    chosen = cohorts(root, list(range(ROUNDS)), CLIENTS, COHORT).tolist()
    return Setting(run, by_hand, chosen, batches)


def same(run: fb.Run, w, v, a):
    """The run has this shared model, these personal ones, and 1 minus these alphas."""
    states = [run.client(i) for i in range(CLIENTS)]
    alphas = np.stack([np.stack(jax.tree.leaves(state.alpha)) for state in states])
    personal = np.stack([flat(state.personal) for state in states])
    assert personal.dtype == np.float64
    for ours, theirs in ((flat(run.shared), w), (personal, v)):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(1 - alphas.squeeze(), a, rtol=0, atol=TOLERANCE)


def test_fedtorch_line_after_line_with_the_newest_values():
    with precision("float64"):
        run, clients, chosen, batches = ran(apfl_fedtorch)
        w, v, a = BEGIN, [BEGIN.copy() for _ in COUNTS], LOCAL.tolist()
        for number, cohort in enumerate(chosen):
            reached = []
            for i in cohort:
                w_i = w.copy()
                for t, rows in enumerate(batches[number][i]):
                    w_i = w_i - RATE * clients[i].gradient(rows, w_i)
                    by_v, by_w = clients[i].mixed_prediction_gradient(
                        rows, a[i], v[i], w_i
                    )
                    v[i] = v[i] - RATE * by_v
                    if t == 0:
                        along = (v[i] - w_i) @ (a[i] * by_v + (1 - a[i]) * by_w)
                        a[i] = np.clip(a[i] - RATE * (along + 0.02 * a[i]), 0, 1)
                reached.append(w_i)
            w = np.mean(reached, axis=0)
        same(run, w, np.stack(v), np.array(a))


def test_fedjax_with_an_alpha_for_every_tensor():
    with precision("float64"):
        run, clients, chosen, batches = ran(apfl_fedjax)
        w, v = BEGIN, [BEGIN.copy() for _ in COUNTS]
        a = [np.full(len(TENSORS), one) for one in LOCAL]
        for number, cohort in enumerate(chosen):
            mean = np.zeros_like(w)
            for i in cohort:
                w_i = w.copy()
                for rows in batches[number][i]:
                    share = np.zeros_like(w)
                    for k, places in enumerate(TENSORS):
                        share[places] = a[i][k]
                    mixed = share * v[i] + (1 - share) * w_i
                    found, gap = clients[i].gradient(rows, mixed), v[i] - w_i
                    along = [gap[places] @ found[places] for places in TENSORS]
                    w_i = w_i - RATE * clients[i].gradient(rows, w_i)
                    v[i] = v[i] - RATE * found
                    a[i] = np.clip(a[i] - RATE * np.array(along), 0, 1)
                mean += COUNTS[i] * w_i / sum(COUNTS[j] for j in cohort)
            w = mean
        same(run, w, np.stack(v), np.stack(a))


def test_a_report_has_the_mean_alpha_of_a_clients_tensors():
    on = problems.classes()
    algorithm = apfl_fedjax(on.loss, fb.Work(0.2, 3, None), alpha=0.5)
    run = fb.simulate(
        algorithm, on.params, on.federated_data, jax.random.key(0), rounds=2
    ).complete()
    alphas = run.client(4).alpha
    assert alphas.weight != alphas.bias
    found = run.info()["alpha"][4]
    assert np.isclose(found, (alphas.weight + alphas.bias) / 2)


@pytest.mark.parametrize(
    ("build", "wrong", "line"),
    [
        (apfl_fedtorch, {"alpha": 1.5}, "alpha: 1.5 is not in"),
        (apfl_fedtorch, {"learn": "often"}, "learn: 'often' is not 'step'"),
        (apfl_fedtorch, {"work": WORK._replace(optimizer=WRONG)}, "'fast' is not"),
        (apfl_fedjax, {"alpha": [0.1, -0.2]}, "alpha: -0.2 of client 1 is not in"),
        (apfl_fedjax, {"work": fb.Work(0.1, 0, None)}, "steps: 0 is not"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(build, wrong, line):
    with pytest.raises(ValueError, match=line) as error:
        build(LOSS, **{"work": WORK, "alpha": 0.5, **wrong})
    assert "\n" not in str(error.value)


def test_an_alpha_for_each_of_another_number_of_clients_is_refused():
    on = problems.classes()
    algorithm = apfl_fedjax(on.loss, fb.Work(0.2, 1, None), alpha=np.full(3, 0.5))
    with pytest.raises(ValueError, match="apfl_fedjax: alpha: an array of 3 is not"):
        fb.simulate(
            algorithm, on.params, on.federated_data, jax.random.key(0), rounds=1
        )
