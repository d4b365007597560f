# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Several populations of clients: drawn apart, and weighed as they are to be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.core import Needs
from fedblend.simulation import checkpoint
from fedblend.simulation.sampling import (
    client_weights,
    cohorts,
    complete_strata,
    draw_with,
    weigh_strata,
)
from fedblend.transforms import central_loss
from fedblend.trees import precision

DIM = 3
WEIGHTS, SIZES = (0.2, 0.5, 0.3), (1, 3, 2)
OF = np.array([1, 0, 1, 2, 1, 2, 0, 1, 1, 2])
COUNTS = (2, 1, 3, 1, 2, 1, 2, 1, 1, 2)
LOSS = fb.datasets.quadratic_loss
ROOT = jax.random.key(7)


def some(number, seed):
    draws = np.random.default_rng(seed)
    roots = draws.normal(size=(number, DIM, DIM))
    matrices = roots @ roots.swapaxes(1, 2) / DIM + np.eye(DIM)
    return matrices, draws.normal(size=(number, DIM))


def quadratics():
    places = np.split(np.arange(sum(COUNTS)), np.cumsum(COUNTS)[:-1])
    return fb.federate(some(sum(COUNTS), 0), places)


def parts_of(federated_data, by_count):
    """Mean A and b of every population."""
    rows = [federated_data.train.rows(client) for client in range(len(OF))]
    means = [tuple(part.mean(0) for part in own) for own in rows]
    weights = np.array(COUNTS) if by_count else np.ones(len(OF))
    return [
        [
            np.average([mean[i] for mean in means], 0, weights * (p == OF))
            for i in (0, 1)
        ]
        for p in range(3)
    ]


def strata(sizes=None):
    return fb.Strata(OF, WEIGHTS, sizes)


def mixture(values, weights):
    """The mean of a number of every client, over clients and over populations."""
    means = [np.average(values, weights=weights * (p == OF)) for p in range(3)]
    return np.dot(WEIGHTS, means)


@pytest.fixture(scope="module")
def drawn():
    """4000 cohorts, and the strata."""
    found, size = complete_strata(strata(SIZES), len(OF))
    assert found is not None
    return draw_with(len(OF), size, found)(ROOT, range(4000)), found


def test_every_round_has_so_many_of_each_population(drawn):
    ids, _ = drawn
    assert (np.diff(ids, axis=1) > 0).all()
    for population, size in enumerate(SIZES):
        assert ((OF[ids] == population).sum(axis=1) == size).all()
    often = np.bincount(ids.ravel()) / 4000
    assert (abs(often - (np.array(SIZES) / np.bincount(OF))[OF]) < 0.04).all()


def test_one_population_is_the_plain_cohort():
    one, size = complete_strata(fb.Strata(np.zeros(10, int), [1.0], [4]), 10)
    plain = cohorts(ROOT, range(6), 10, 4)
    assert np.array_equal(draw_with(10, size, one)(ROOT, range(6)), plain)


@pytest.mark.parametrize("by_count", [False, True])
def test_sums_over_drawn_cohorts_are_right_in_the_mean(drawn, by_count):
    """By NumPy: both sides of the weighted mean, to 5 standard errors."""
    ids, found = drawn
    own = np.array(COUNTS) if by_count else np.ones(10)
    joining, weights = weigh_strata(found, own)
    values = np.random.default_rng(1).normal(size=10) + OF
    wanted = mixture(values, own)
    # All clients, weighed as they join, give the mixture itself.
    assert abs((joining * values).sum() / joining.sum() - wanted) < 1e-12
    above, below = (weights * values)[ids].sum(axis=1), weights[ids].sum(axis=1)
    for sums, expected in ((above, wanted), (below, 1.0)):
        error = sums.std() / np.sqrt(len(sums)) + 1e-12
        assert abs(sums.mean() - expected) < 5 * error
    if not by_count:
        assert abs(below - 1).max() < 1e-12
    # With the weights of joining one would estimate something else.
    biased = (joining * values)[ids].sum(axis=1).mean() / joining[ids].sum(
        axis=1
    ).mean()
    assert abs(biased - wanted) > 0.05


@pytest.mark.parametrize("how", [None, "two_way"])
def test_the_optimum_of_the_mixture_is_reached(how):
    """Everybody, one step of full gradients, with and without a server's loss."""
    with precision("float64"):
        federated_data, own = quadratics(), some(1, 5)
        w_f, w_c = (1.0, 0.0) if how is None else (0.6, 0.4)
        pairs = [*parts_of(federated_data, by_count=True), [part[0] for part in own]]
        shares = [*(w_f * w for w in WEIGHTS), w_c]
        matrix, vector = (
            sum(share * pair[i] for share, pair in zip(shares, pairs, strict=True))
            for i in (0, 1)
        )
        algorithm = fb.fedavg(LOSS, fb.Work(0.2, steps=1, batch_size=None))
        if how is not None:
            server = central_loss.row_loss(LOSS)
            algorithm = fb.transforms.mixed_fl(
                algorithm, server, how=how, weights=(w_f, w_c)
            )
        run = fb.simulate(
            algorithm,
            jnp.zeros(DIM),
            federated_data,
            ROOT,
            rounds=400,
            every=400,
            cohort=strata(),
            central=None if how is None else fb.shard_of(own),
        ).complete()
        gap = np.abs(np.asarray(run.shared) - np.linalg.solve(matrix, vector)).max()
    assert gap < 1e-12


def test_what_clients_say_on_joining_is_weighed_by_population():
    algorithm = fb.fedavg(LOSS, fb.Work(0.1, steps=1, batch_size=None))._replace(
        enroll=lambda params, shard, key: (shard.id.astype(float), ()),
        start=lambda params, heard, central, key: (
            fb.Down(params + heard.mean, jnp.zeros((), jnp.int32)),
            (),
        ),
    )
    run = fb.simulate(
        algorithm,
        jnp.zeros(DIM),
        quadratics(),
        ROOT,
        rounds=0,
        cohort=strata(SIZES),
    ).complete()
    wanted = mixture(np.arange(10.0), np.array(COUNTS))
    assert np.abs(np.asarray(run.shared) - wanted).max() < 1e-5


def sampled_rounds(federated_data, rounds):
    """Plain steps on the weighed gradients of drawn cohorts, in NumPy."""
    found, size = complete_strata(strata(SIZES), len(OF))
    assert found is not None
    _, weights = weigh_strata(found, np.array(COUNTS))
    here = np.zeros(DIM)
    for members in draw_with(len(OF), size, found)(ROOT, range(rounds)):
        slopes = []
        for client in members:
            matrix, vector = (
                part.mean(0) for part in federated_data.train.rows(client)
            )
            slopes.append(matrix @ here - vector)
        here = here - 0.1 * np.average(slopes, 0, weights[members])
    return here


def test_a_sampled_run_is_the_loops_and_goes_on_where_it_stopped(tmp_path):
    federated_data = quadratics()

    def begin(cohort):
        algorithm = fb.fedavg(LOSS, fb.Work(0.1, steps=1, batch_size=None))
        settings = {"rounds": 4, "every": 2, "cohort": cohort}
        return fb.simulate(algorithm, jnp.zeros(DIM), federated_data, ROOT, **settings)

    whole = begin(strata(SIZES))
    for record in whole:
        if record.round == 2:
            checkpoint.save(tmp_path / "saved", whole)
    later = begin(strata(SIZES))
    checkpoint.restore(tmp_path / "saved", later)
    assert np.array_equal(later.complete().shared, whole.shared)
    assert (
        np.abs(np.asarray(whole.shared) - sampled_rounds(federated_data, 4)).max()
        < 1e-6
    )
    other = begin(fb.Strata(OF[::-1], WEIGHTS, SIZES))
    with pytest.raises(checkpoint.CheckpointError, match="strata"):
        checkpoint.restore(tmp_path / "saved", other)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (fb.Strata(OF[:4], WEIGHTS), "for each of the 10 clients"),
        (fb.Strata(OF * 0.5, WEIGHTS), "float64"),
        (fb.Strata(OF, (0.5, 0.5)), r"populations \[0, 1, 2\], and there are 2"),
        (fb.Strata(OF, (0.5, 0.5, 0.5)), "sum to 1"),
        (fb.Strata(OF, (1.2, 0.3, -0.5)), "positive"),
        (fb.Strata(OF, WEIGHTS, (1, 9, 1)), r"\[2, 5, 3\] clients"),
        (fb.Strata(OF, WEIGHTS, (1, 1)), "sizes"),
    ],
)
def test_bad_strata_are_refused_in_one_line(given, said):
    with pytest.raises(ValueError, match=said) as caught:
        complete_strata(given, len(OF))
    assert str(caught.value).startswith("strata: ")
    assert "\n" not in str(caught.value)


def check(found, needs, reduction):
    """Refuse strata of these clients that would break an algorithm."""
    everybody = np.arange(len(OF))
    data = fb.federate(np.zeros((len(OF), 1)), everybody[:, None])
    said = {"weights": "uniform", "dropout": 0.0, "reduction": reduction}
    client_weights(needs, data, len(OF), found, **said)


def test_what_strata_would_break_is_refused():
    uneven, _ = complete_strata(strata(SIZES), len(OF))
    even, _ = complete_strata(strata(), len(OF))
    assert uneven is not None and even is not None
    memories = fb.scaffold(LOSS, fb.Work(0.1, steps=1, batch_size=None)).needs
    with pytest.raises(ValueError, match=r"\[1, 3, 2\] of \[2, 5, 3\]"):
        check(uneven, memories, "mean")
    check(even, memories, "mean")
    check(uneven, Needs(mean=True), "mean")
    with pytest.raises(ValueError, match="equal weight"):
        check(even, Needs(uniform=True), "mean")
    with pytest.raises(ValueError, match="'median'"):
        check(even, Needs(), "median")
    for wrapped in (fb.transforms.diana, fb.transforms.ef21):
        compressor = (
            fb.compress.rand_k(1)
            if wrapped is fb.transforms.diana
            else fb.compress.top_k(1)
        )
        algorithm = fb.fedavg(LOSS, fb.Work(0.1, steps=1, batch_size=None))
        assert wrapped(algorithm, compressor).needs.memories


def test_joined_federations_keep_their_rows_and_tell_their_clients_apart():
    rows = np.arange(12.0), np.arange(12)
    first = fb.federate(rows, [np.arange(5), np.arange(5, 9)], test=0.25)
    second = fb.federate(rows, [np.arange(9, 12)], test=0.4, names=["x"])
    both = fb.concatenate({"a": first, "b": second})
    assert both.names == ("a/0", "a/1", "b/x")
    assert both.test is not None and second.test is not None
    for client, (federated_data, own) in enumerate(
        ((first, 0), (first, 1), (second, 0))
    ):
        for split, there in both.splits.items():
            wanted = federated_data.splits[split].rows(own)
            for ours, theirs in zip(there.rows(client), wanted, strict=True):
                assert np.array_equal(ours, theirs)
    assert set(
        fb.concatenate({"a": first, "c": fb.federate(rows, [np.ones(1, int)])}).splits
    ) == {"train"}
