# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Mixed FL: its three algorithms on quadratics, whose mixed minimizer is known."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedblend as fb
from fedblend.compress import identity
from fedblend.transforms import central_loss as central_losses
from fedblend.trees import precision

DIM, CLIENTS, WEIGHTS = 3, 4, (0.6, 0.4)
LOSS = fb.datasets.quadratic_loss
ON_ROWS = central_losses.row_loss(LOSS)
WAYS = ("parallel", "one_way", "two_way")


def quadratics(alike=False):
    """Clients with different numbers of rows, and the server's own row."""
    draws = np.random.default_rng(0)
    counts = (1, 2, 3, 6)

    def some(number):
        roots = draws.normal(size=(number, DIM, DIM))
        matrices = roots @ roots.swapaxes(1, 2) / DIM + np.eye(DIM)
        return matrices, draws.normal(size=(number, DIM))

    rows = some(sum(counts))
    if alike:
        rows = tuple(np.repeat(part[:1], sum(counts), axis=0) for part in rows)
    edges = np.cumsum((0, *counts))
    parts = [np.arange(edges[i], edges[i + 1]) for i in range(CLIENTS)]
    return fb.federate(rows, parts), some(1)


def optimum(federated_data, own, weights=WEIGHTS):
    """Of w_f (mean over all rows) + w_c (the server's)."""
    matrices, vectors = federated_data.train.examples
    matrix = weights[0] * matrices.mean(0) + weights[1] * own[0][0]
    return np.linalg.solve(
        matrix, weights[0] * vectors.mean(0) + weights[1] * own[1][0]
    )


def run(algorithm, federated_data, own, rounds, **options):
    with precision("float64"):
        made = fb.simulate(
            algorithm,
            jnp.ones(DIM),
            federated_data,
            jax.random.key(0),
            rounds=rounds,
            every=rounds,
            central=None if own is None else fb.shard_of(own),
            **options,
        ).complete()
        return np.asarray(made.shared), made


def fedavg(steps, rate=0.05):
    return fb.fedavg(LOSS, fb.Work(rate, steps=steps, batch_size=None))


@pytest.mark.slow
def test_with_one_full_step_parallel_and_one_way_are_the_same_and_two_way_ends_there():
    federated_data, own = quadratics()
    few = {
        how: run(
            fb.transforms.mixed_fl(fedavg(1), ON_ROWS, how=how, weights=WEIGHTS),
            federated_data,
            own,
            7,
        )[0]
        for how in ("parallel", "one_way")
    }
    np.testing.assert_allclose(few["parallel"], few["one_way"], rtol=0, atol=1e-12)
    # Both are plain descent of the mixture, up to the factor w_f of the rate.
    matrices, vectors = federated_data.train.examples
    here = np.ones(DIM)
    for _ in range(7):
        mean_gradient = matrices.mean(0) @ here - vectors.mean(0)
        mean_gradient += WEIGHTS[1] / WEIGHTS[0] * (own[0][0] @ here - own[1][0])
        here = here - 0.05 * mean_gradient
    np.testing.assert_allclose(few["one_way"], here, rtol=0, atol=1e-12)
    for how in WAYS:
        algorithm = fb.transforms.mixed_fl(fedavg(1), ON_ROWS, how=how, weights=WEIGHTS)
        end, _ = run(algorithm, federated_data, own, 500)
        np.testing.assert_allclose(
            end, optimum(federated_data, own), rtol=0, atol=1e-12
        )


def test_with_more_steps_transfers_reach_the_optimum_and_parallel_training_does_not():
    federated_data, own = quadratics(alike=True)
    ends = {
        how: run(
            fb.transforms.mixed_fl(
                fedavg(8), ON_ROWS, how=how, weights=WEIGHTS, steps=8
            ),
            federated_data,
            own,
            600,
        )[0]
        for how in WAYS
    }
    far = {
        how: np.abs(end - optimum(federated_data, own)).max()
        for how, end in ends.items()
    }
    assert far["one_way"] < 1e-10
    assert far["two_way"] < 1e-10
    assert far["parallel"] > 1e-3


def test_two_way_with_clients_that_take_different_numbers_of_steps():
    federated_data, own = quadratics(alike=True)
    inner = fb.fedavg(
        LOSS, fb.Work(0.05, steps=np.array([1, 3, 5, 8]), batch_size=None)
    )
    for upload in (False, True):
        algorithm = fb.transforms.mixed_fl(
            inner, ON_ROWS, how="two_way", weights=WEIGHTS, steps=4, upload=upload
        )
        end, _ = run(algorithm, federated_data, own, 800)
        np.testing.assert_allclose(
            end, optimum(federated_data, own), rtol=0, atol=1e-10
        )


def test_a_literal_transcription_of_two_way():
    federated_data, own = quadratics()
    rate, steps, central_steps, ratio = 0.03, 3, 2, WEIGHTS[1] / WEIGHTS[0]
    matrices, vectors = federated_data.train.examples
    counts, starts = federated_data.train.counts, federated_data.train.starts
    here, correction, borrowed = np.ones(DIM), np.zeros(DIM), np.zeros(DIM)
    for _ in range(5):
        moved = np.zeros(DIM)
        for start, count in zip(starts, counts, strict=True):
            matrix = matrices[start : start + count].mean(0)
            vector = vectors[start : start + count].mean(0)
            model = here.copy()
            for _ in range(steps):
                model = model - rate * (matrix @ model - vector + correction)
            moved += count / counts.sum() * (model - here)
        model, slopes = here.copy(), []
        for _ in range(central_steps):
            slopes.append(ratio * (own[0][0] @ model - own[1][0]))
            model = model - rate * steps / central_steps * (slopes[-1] + borrowed)
        borrowed = -moved / (rate * steps) - correction
        correction = np.mean(slopes, axis=0)
        here = here + (moved + model - here) / 2
    algorithm = fb.transforms.mixed_fl(
        fedavg(steps, rate),
        ON_ROWS,
        how="two_way",
        weights=WEIGHTS,
        steps=central_steps,
    )
    end, _ = run(algorithm, federated_data, own, 5)
    np.testing.assert_allclose(end, here, rtol=0, atol=1e-12)


def test_a_round_in_which_nobody_moves_spoils_nothing():
    federated_data, own = quadratics(alike=True)
    paused = fb.Scheduled(lambda count: jnp.where(count == 2, 0.0, 0.05), "round")
    inner = fb.fedavg(LOSS, fb.Work(paused, steps=4, batch_size=None))
    algorithm = fb.transforms.mixed_fl(
        inner, ON_ROWS, how="two_way", weights=WEIGHTS, steps=4
    )
    end, _ = run(algorithm, federated_data, own, 800)
    np.testing.assert_allclose(end, optimum(federated_data, own), rtol=0, atol=1e-10)


@pytest.mark.parametrize("how", WAYS)
def test_a_loss_without_data_and_a_compressed_correction(how):
    federated_data, own = quadratics(alike=True)
    matrix, vector = own[0][0], own[1][0]
    loss = central_losses.parameter_loss(lambda x: 0.5 * x @ matrix @ x - vector @ x)
    given = {"how": how, "weights": WEIGHTS}
    same, plain = run(
        fb.transforms.mixed_fl(fedavg(2), ON_ROWS, **given), federated_data, own, 20
    )
    other, coded = run(
        fb.transforms.mixed_fl(fedavg(2), loss, compressor=identity(), **given),
        federated_data,
        None,
        20,
    )
    np.testing.assert_allclose(other, same, rtol=0, atol=1e-12)
    assert plain.records[-1].bits_down == coded.records[-1].bits_down


@pytest.mark.slow
def test_the_blend_of_flix_and_a_central_loss_has_its_optimum():
    federated_data, own = quadratics()
    alpha, draws = 0.7, np.random.default_rng(1)
    personal = draws.normal(size=(CLIENTS, DIM))
    flix = fb.flix(
        LOSS,
        lambda loss: fb.fedavg(loss, fb.Work(0.1, steps=1, batch_size=None)),
        alpha=alpha,
        local=fb.solvers.given(personal),
    )
    end, _ = run(
        fb.transforms.mixed_fl(flix, ON_ROWS, how="one_way", weights=WEIGHTS),
        federated_data,
        own,
        1500,
    )
    means = [
        [part.mean(0) for part in federated_data.train.rows(client)]
        for client in range(CLIENTS)
    ]

    def blend(x):
        mixtures = [alpha * x + (1 - alpha) * own_model for own_model in personal]
        federated = [
            0.5 * here @ matrix @ here - vector @ here
            for here, (matrix, vector) in zip(mixtures, means, strict=True)
        ]
        central = 0.5 * x @ own[0][0] @ x - own[1][0] @ x
        return WEIGHTS[0] * sum(federated) / CLIENTS + WEIGHTS[1] * central

    with precision("float64"):
        x = jnp.asarray(end)
        assert np.abs(jax.grad(blend)(x)).max() < 1e-11
        exact = -np.linalg.solve(
            jax.hessian(blend)(jnp.zeros(DIM)), jax.grad(blend)(jnp.zeros(DIM))
        )
    np.testing.assert_allclose(end, exact, rtol=0, atol=1e-10)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(
    "inner",
    [
        pytest.param(
            fb.algorithms.fedopt(
                LOSS, fb.Work(0.05, steps=2, batch_size=None), optax.adam(0.01)
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            fb.algorithms.fedprox(
                LOSS, fb.Work(0.05, steps=2, batch_size=None), mu=0.1
            ),
            marks=pytest.mark.slow,
        ),
        fb.scaffold(LOSS, fb.Work(0.05, steps=2, batch_size=None)),
        fb.apfl(LOSS, fb.Work(0.05, steps=2, batch_size=None), alpha=0.5),
    ],
    ids=["fedadam", "fedprox", "scaffold", "apfl"],
)
def test_it_stands_over_other_algorithms(inner, how):
    federated_data, own = quadratics()
    settings = {"optimizer": 0.05, "upload": True} if how != "one_way" else {}
    parallel = how == "parallel"
    with pytest.warns(match="another mixture") if parallel else nullcontext():
        algorithm = fb.transforms.mixed_fl(
            inner, ON_ROWS, how=how, weights=WEIGHTS, **settings
        )
    end, _ = run(algorithm, federated_data, own, 3)
    alone, _ = run(inner, federated_data, None, 3)
    assert np.isfinite(end).all()
    assert np.abs(end - alone).max() > 1e-7  # Adam's steps are about as long


def test_what_makes_no_sense_is_refused():
    federated_data, own = quadratics()
    inner = fedavg(2)
    with pytest.raises(ValueError, match="sum to 1"):
        fb.transforms.mixed_fl(inner, ON_ROWS, how="parallel", weights=(0.5, 0.6))
    with pytest.raises(ValueError, match="how: 'both' is not 'parallel', 'one_way'"):
        fb.transforms.mixed_fl(inner, ON_ROWS, how="both")
    with pytest.raises(ValueError, match="one_way: takes no central steps"):
        fb.transforms.mixed_fl(inner, ON_ROWS, how="one_way", optimizer=0.1)
    with pytest.raises(ValueError, match="one_way: takes no central steps"):
        fb.transforms.mixed_fl(
            inner, ON_ROWS, how="one_way", merge_optimizer=optax.adam(0.1)
        )
    with pytest.warns(match="another mixture"):
        fb.transforms.mixed_fl(inner, ON_ROWS, how="parallel", merge=(1.0, 0.5))
    twice = fb.transforms.mixed_fl(
        fb.transforms.mixed_fl(inner, ON_ROWS, how="one_way"), ON_ROWS, how="one_way"
    )
    with pytest.raises(ValueError, match="sends clients a correction itself"):
        run(twice, federated_data, own, 1)
    with pytest.raises(ValueError, match="merge: 'product' is unknown"):
        fb.transforms.mixed_fl(inner, ON_ROWS, how="parallel", merge="product")
    momentum = fb.fedavg(LOSS, fb.Work(optax.sgd(0.1, 0.9), steps=2, batch_size=None))
    with pytest.raises(ValueError, match=r"upload=True, since .* and an optimizer"):
        run(
            fb.transforms.mixed_fl(momentum, ON_ROWS, how="two_way"),
            federated_data,
            own,
            1,
        )
    hidden = fb.transforms.dp_fedavg(fedavg(2), clip=1.0, noise=1.0, cohort=CLIENTS)
    shy = fb.transforms.mixed_fl(
        hidden, ON_ROWS, how="two_way", upload=True, optimizer=0.1
    )
    with pytest.raises(ValueError, match="no gradient to send"):
        run(shy, federated_data, own, 1)
    with pytest.raises(ValueError, match=r"a batch of 5 is larger than .* 1 rows"):
        few = central_losses.row_loss(LOSS, batch_size=5)
        run(fb.transforms.mixed_fl(inner, few, how="one_way"), federated_data, own, 1)
    with pytest.raises(ValueError, match="the server has none"):
        run(
            fb.transforms.mixed_fl(inner, ON_ROWS, how="one_way"),
            federated_data,
            None,
            1,
        )
