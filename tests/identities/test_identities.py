# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Limit cases: two programs that must agree.

Both sides do the same sums in float32, at most in another order, on parameters of size
1 and for a few rounds: 1e-5 is some hundred times the rounding of one step.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedblend as fb
import problems
from fedblend import trees

RATE = 0.2
on = problems.quadratics()
noisy: dict[str, Any] = {"steps": 4, "batch_size": 2}
full: dict[str, Any] = {"steps": 4, "batch_size": None}


def run(algorithm, problem=on, rounds=3, cohort=4, seed=0, **settings):
    return fb.simulate(
        algorithm,
        problem.params,
        problem.federated_data,
        jax.random.key(seed),
        rounds=rounds,
        cohort=cohort,
        **settings,
    ).complete()


def close(left, right, rtol=1e-5, atol=1e-6):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), left, right
    )


@pytest.fixture(scope="module")
def averaged():
    """FedAvg on noisy batches, which the others are compared with."""
    return run(fb.fedavg(on.loss, fb.Work(RATE, **noisy)))


@pytest.mark.parametrize(
    "algorithm",
    [
        fb.algorithms.fedprox(on.loss, fb.Work(RATE, **noisy), mu=0.0),
        fb.algorithms.fedopt(on.loss, fb.Work(RATE, **noisy), 1.0),
        fb.algorithms.fedopt(on.loss, fb.Work(RATE, **noisy), optax.sgd(1.0)),
        fb.fedavg(on.loss, fb.Work(optax.sgd(RATE), **noisy)),
        fb.fedavg(on.loss, fb.Work(RATE, steps=np.full(7, 4), batch_size=2)),
        fb.fedavg(on.loss, fb.Work(fb.Scheduled(lambda t: RATE, "round"), **noisy)),
        fb.fedavg(on.loss, fb.Work(fb.Scheduled(lambda t: RATE, "step"), **noisy)),
        fb.finetune(
            fb.fedavg(on.loss, fb.Work(RATE, **noisy)), on.loss, fb.Work(RATE, **noisy)
        ),
    ],
    ids=[
        "fedprox without pull",
        "fedopt with rate 1",
        "fedopt with sgd of rate 1",
        "optax sgd for a number",
        "the same steps for every client",
        "constant schedule in rounds",
        "constant schedule in steps",
        "finetune's shared model",
    ],
)
def test_is_fedavg(algorithm, averaged):
    close(run(algorithm).shared, averaged.shared)


@pytest.mark.parametrize(
    "algorithm",
    [
        fb.algorithms.fedprox(on.loss, fb.Work(RATE, **noisy), mu=0.3),
        fb.algorithms.fedopt(on.loss, fb.Work(RATE, **noisy), 0.9),
        fb.scaffold(on.loss, fb.Work(RATE, **noisy)),
    ],
    ids=["fedprox", "fedopt", "scaffold"],
)
def test_is_not_fedavg(algorithm, averaged):
    """The same comparison can fail."""
    with pytest.raises(AssertionError):
        close(run(algorithm).shared, averaged.shared)


def test_scaffold_begins_as_fedavg():
    methods = (fb.scaffold, fb.fedavg)
    first, second = (
        run(m(on.loss, fb.Work(RATE, **noisy)), rounds=1).shared for m in methods
    )
    close(first, second)


def test_scaffold_is_fedavg_where_all_clients_are_alike():
    row = problems.quadratics(counts=(1,))
    rows = [np.repeat(leaf, 7, axis=0) for leaf in row.federated_data.train.examples]
    federated_data = fb.federate(tuple(rows), np.split(np.arange(7), 7))
    alike = row._replace(federated_data=federated_data)
    methods = (fb.scaffold, fb.fedavg)
    ends = [
        run(m(on.loss, fb.Work(RATE, **full)), alike, cohort=7).shared for m in methods
    ]
    close(*ends)


def test_one_full_step_of_equal_clients_is_gradient_descent_on_the_mean():
    done = run(
        fb.fedavg(on.loss, fb.Work(RATE, steps=1, batch_size=None)),
        rounds=5,
        cohort=7,
        weights="uniform",
    )
    matrices, vectors = problems.client_matrices(on)
    x = np.asarray(on.params, float)
    for _ in range(5):
        x = x - RATE * (matrices.mean(axis=0) @ x - vectors.mean(axis=0))
    close(done.shared, x)


def test_local_only_is_fedavg_with_one_client():
    alone = problems.quadratics(counts=(5,))
    own = run(fb.local_only(on.loss, fb.Work(RATE, **noisy)), alone, cohort=1)
    shared = run(fb.fedavg(on.loss, fb.Work(RATE, **noisy)), alone, cohort=1)
    close(own.personal(0), shared.shared)
    close(own.shared, alone.params)


def test_finetune_by_no_steps_deploys_the_shared_model(averaged):
    inner = fb.fedavg(on.loss, fb.Work(RATE, **noisy))
    tuned = run(fb.finetune(inner, on.loss, fb.Work(RATE, steps=0, batch_size=2)))
    assert np.array_equal(tuned.personal(3), tuned.shared)
    close(tuned.personal(3), averaged.shared)


def test_finetune_by_full_steps_is_local_training_from_the_shared_model():
    inner = fb.fedavg(on.loss, fb.Work(RATE, **noisy))
    tuned = run(fb.finetune(inner, on.loss, fb.Work(RATE, steps=3, batch_size=None)))
    matrices, vectors = problems.client_matrices(on)
    x = np.asarray(tuned.shared, float)
    for _ in range(3):
        x = x - RATE * (matrices[2] @ x - vectors[2])
    close(tuned.personal(2), x)


def test_an_epoch_in_one_batch_is_one_full_step():
    work = [
        {"steps": fb.Epochs(3), "batch_size": None},
        {"steps": fb.Epochs(3), "batch_size": 99},
        {"steps": 3, "batch_size": None},
    ]
    one, two, three = (run(fb.fedavg(on.loss, fb.Work(RATE, **w))).shared for w in work)
    close(one, three)
    close(two, three)


def test_trimming_nothing_is_the_uniform_mean():
    algorithm = fb.fedavg(on.loss, fb.Work(RATE, **full))
    trimmed = run(algorithm, reduction=fb.trimmed_mean(0.0))
    close(trimmed.shared, run(algorithm, weights="uniform").shared)


def test_the_median_of_one_client_is_that_client():
    algorithm = fb.fedavg(on.loss, fb.Work(RATE, **full))
    close(
        run(algorithm, cohort=1, reduction="median").shared,
        run(algorithm, cohort=1).shared,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [
        lambda loss: fb.fedavg(loss, fb.Work(RATE, **full)),
        lambda loss: fb.algorithms.fedprox(loss, fb.Work(RATE, **full), mu=0.5),
        lambda loss: fb.scaffold(loss, fb.Work(RATE, **full)),
    ],
    ids=["fedavg", "fedprox", "scaffold"],
)
def test_a_nudge_is_a_linear_term_of_every_clients_loss(build):
    """At the server and the model; SCAFFOLD's controls hold the raw gradients."""
    push = jnp.asarray([0.3, -0.2, 0.1], jnp.float32)
    plain = build(on.loss)

    def start(params, aggregate, central, key):
        down, server = plain.start(params, aggregate, central, key)
        return down._replace(correction=push), server

    nudged = run(plain._replace(start=start), rounds=1)
    tilted = run(build(lambda x, rows: on.loss(x, rows) + x @ push), rounds=1)
    close(nudged.shared, tilted.shared)
    assert float(trees.sum_squares(nudged.shared - run(plain, rounds=1).shared)) > 1e-3
