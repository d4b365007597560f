# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Limit cases of the encoding transforms, their memories, and where they converge."""

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend import compress
from fedblend.core import static_bits

DIM, RATE = 6, 0.2
on = problems.quadratics(dim=DIM)
COUNTS = on.federated_data.train.counts
K = np.array([1, 2, 3, 6, 2, 4, 5])
noisy: dict[str, Any] = {"steps": 3, "batch_size": 2}
full: dict[str, Any] = {"steps": 1, "batch_size": None}
averaging = fb.fedavg(on.loss, fb.Work(RATE, **noisy))
INNER = {
    "fedavg": averaging,
    "scaffold": fb.scaffold(on.loss, fb.Work(RATE, **noisy)),
    "finetune": fb.finetune(averaging, on.loss, fb.Work(RATE, **noisy)),
}
USUAL: dict[str, Any] = {"chunk": 3, "every": 3}
each_inner = pytest.mark.parametrize("name", INNER)


def run(algorithm, rounds=6, cohort: int | fb.Cohort = 4, **settings):
    return fb.simulate(
        algorithm,
        on.params,
        on.federated_data,
        jax.random.key(0),
        rounds=rounds,
        cohort=cohort,
        **(USUAL | settings),
    ).complete()


@cache
def plain_run(name, cohort=4):
    return run(INNER[name], cohort=cohort)


def models(run):
    """The shared model and all personal ones."""
    return [run.shared, *(run.personal(i) for i in range(len(COUNTS)))]


def close(left, right):
    """To rounding of float32 on parameters of size 1, over some rounds."""
    for one, other in zip(models(left), models(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=3e-6)


@each_inner
def test_compressed_by_the_identity_is_the_same_run_bit_for_bit(name):
    done = run(fb.transforms.compressed(INNER[name], compress.identity()))
    for one, other in zip(models(done), models(plain_run(name)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert done.summary()["bits"] == plain_run(name).summary()["bits"]


@each_inner
def test_all_entries_are_the_wrapped_run(name):
    close(
        run(fb.transforms.compressed(INNER[name], compress.rand_k(DIM))),
        plain_run(name),
    )


@pytest.mark.slow
@each_inner
def test_ef21_with_the_identity_and_everyone_is_the_wrapped_run(name):
    close(
        run(fb.transforms.ef21(INNER[name], compress.identity()), cohort=7),
        plain_run(name, 7),
    )


@pytest.mark.slow
@each_inner
def test_diana_with_the_identity_and_everyone_is_the_wrapped_run(name):
    wrapped = fb.transforms.diana(INNER[name], compress.identity(), rate=0.3)
    close(run(wrapped, cohort=7), plain_run(name, 7))


def memories(run) -> tuple[np.ndarray, np.ndarray]:
    """The server's, and those of all clients."""
    own = [run.client(i)[1] for i in range(len(COUNTS))]
    return np.asarray(run.server[1]), np.stack(own)


MEMORY = {
    "diana": fb.transforms.diana(INNER["fedavg"], compress.rand_k(2)),
    "diana, k by client": fb.transforms.diana(INNER["scaffold"], compress.rand_k(K)),
    "diana, from first": fb.transforms.diana(
        INNER["scaffold"], compress.natural(), rate=0.4, start="first"
    ),
    "ef21": fb.transforms.ef21(INNER["fedavg"], compress.top_k(2)),
    "ef21, k by client": fb.transforms.ef21(INNER["scaffold"], compress.top_k(K)),
    "ef21, sign": fb.transforms.ef21(INNER["fedavg"], compress.sign()),
}


@pytest.mark.parametrize(
    "weights", ["by_count", pytest.param("uniform", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", MEMORY)
def test_the_servers_memory_is_the_mean_of_the_clients(name, weights):
    """Although some take no part, some drop out, and one is never usable."""
    done = run(
        MEMORY[name], cohort=fb.Cohort(5, dropout=0.3), weights=weights, rounds=8
    )
    assert sum(record.dropped for record in done.records) > 0
    server, own = memories(done)
    share = COUNTS if weights == "by_count" else np.ones(len(COUNTS))
    assert np.abs(server).max() > 1e-2
    mean = np.average(own, axis=0, weights=share)
    np.testing.assert_allclose(server, mean, rtol=1e-4, atol=1e-6)


def distance(algorithm, rounds, **settings) -> float:
    done = run(algorithm, rounds, 7, every=rounds, weights="uniform", **settings)
    return float(np.abs(done.shared - problems.optimum(on)).max())


@pytest.mark.slow
def test_diana_and_ef21_reach_the_optimum_where_dcgd_stalls():
    descent = fb.fedavg(on.loss, fb.Work(0.1, **full))
    rand = compress.rand_k(2)
    stalled = distance(fb.transforms.compressed(descent, rand), 600)
    assert stalled > 1e-2
    assert distance(fb.transforms.diana(descent, rand), 600) < 1e-5
    assert distance(fb.transforms.diana(descent, compress.rand_k(K)), 600) < 1e-5
    assert distance(fb.transforms.ef21(descent, compress.top_k(2)), 600) < 1e-5
    biased = distance(fb.transforms.compressed(descent, compress.top_k(2)), 600)
    assert biased > 1e-3


def test_diana_reaches_the_optimum_although_half_take_part():
    """With the wrapped algorithm's own drift gone, as with plain gradients."""
    descent = fb.fedavg(on.loss, fb.Work(0.1, **full))
    wrapped = fb.transforms.diana(descent, compress.rand_k(3))
    done = run(wrapped, 1500, 4, every=1500, weights="uniform")
    np.testing.assert_allclose(done.shared, problems.optimum(on), atol=1e-4)


def test_what_starting_at_the_first_answer_costs_is_counted():
    zero, first = (
        run(fb.transforms.diana(INNER["fedavg"], compress.rand_k(2), start=start))
        for start in ("zero", "first")
    )
    whole = static_bits(on.params)
    np.testing.assert_array_equal(first.bits().up - zero.bits().up, whole)
    assert whole == 32 * DIM


def test_rates_that_differ_by_client_cost_nothing():
    """The server knows them, and whose update it receives."""
    everyone = run(
        fb.transforms.diana(averaging, compress.rand_k(K)), rounds=2, cohort=7
    )
    np.testing.assert_array_equal(everyone.bits().up, 2 * 32 * K)


def test_bits_by_client_follow_their_k():
    everyone = run(
        fb.transforms.compressed(averaging, compress.rand_k(K)), rounds=2, cohort=7
    )
    np.testing.assert_array_equal(everyone.bits().up, 2 * 32 * K)
