# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""LoCoDL: the paper's loop, exact optima with every g and mask, and what is sent."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedblend as fb
import problems
from fedblend import compress, trees
from fedblend.algorithms.locodl import locodl
from fedblend.config.build import build
from fedblend.config.config import check
from fedblend.config.theory_rates import choose_steps, theory_values
from fedblend.errors import ConfigError
from fedblend.theory import local_training
from fedblend.theory.constants import mixture, quadratics
from fedblend.transforms.central_loss import parameter_loss, row_loss
from reference import local_training_transcription as paper

ALPHA = np.array([0.2, 0.9, 0.5, 1.0, 0.3, 0.7, 0.4])
ON = problems.quadratics()
A, B = problems.client_matrices(ON)
OWN = np.stack([np.linalg.solve(a, b) for a, b in zip(A, B, strict=True)])
CENTRAL = np.diag([0.5, 1.0, 2.0]), np.array([1.0, -2.0, 0.5])
W_F, W_C = 0.4, 0.6
STEPS, RATE = 3, 0.35
CENTRALLY = {"weights": (W_F, W_C), "moved": 0.0}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def central_loss(params):
    matrix, vector = map(jnp.asarray, CENTRAL)
    return params @ matrix @ params / 2 - vector @ params


def simulated(algorithm, *, rounds, every=None, key=None, central=None):
    return fb.simulate(
        algorithm,
        jnp.asarray(ON.params, jnp.float64),
        ON.federated_data,
        jax.random.key(3) if key is None else key,
        rounds=rounds,
        every=every or rounds,
        central=central,
    )


def method(loss=ON.loss, *, k=1, steps=STEPS, rate=RATE, **options):
    work = fb.Work(rate, steps=steps, batch_size=None)
    chosen = {"moved": 0.2, "compressor": compress.rand_k(k), "clients": 7} | options
    return locodl(loss, work, **chosen)


def mixed(**options):
    """FLIX around LoCoDL."""
    given = fb.solvers.given(jnp.asarray(OWN))
    inner = partial(method, **options)
    return fb.flix(ON.loss, inner, alpha=ALPHA, local=given)


@pytest.mark.parametrize(
    ("masks", "central"),
    [
        ("own", False),
        ("one", True),
        pytest.param("own", True, marks=pytest.mark.slow),
        pytest.param("one", False, marks=pytest.mark.slow),
    ],
)
def test_the_papers_loop_with_the_coins_and_masks_that_fell(masks, central):
    """Masks are where d_i is not 0; both are in float64, over some 30 steps."""
    options = {"central": parameter_loss(central_loss), **CENTRALLY} if central else {}
    run = simulated(method(masks=masks, **options), rounds=10, every=1)
    ours, coins, kept, before = [], [], [], 0
    for record in run:
        if record.round:
            coins += [False] * (int(run.server.local) - before - 1) + [True]
            before = int(run.server.local)
            sent = np.asarray(run.client_states().sent)
            kept.append(sent != 0)
            ours.append((np.asarray(run.shared), np.asarray(run.server.dual)))
    assert len(coins) > 20
    assert all((mask.sum(axis=1) == 1).all() for mask in kept)
    assert all((mask == mask[0]).all() for mask in kept) == (masks == "one")
    moved = 0.0 if central else 0.2
    slopes = [
        lambda x, a=a, b=b: a @ x - b - moved * x for a, b in zip(A, B, strict=True)
    ]

    def g(y):
        return W_C / W_F * (CENTRAL[0] @ y - CENTRAL[1]) if central else moved * y

    omega = 2.0
    theirs = paper.locodl(
        slopes,
        g,
        ON.params,
        RATE,
        1 / STEPS,
        coins,
        lambda number, i, vector: vector * kept[number][i] * (1 + omega),
        omega / 7 if masks == "own" else omega,
        1 + (2 * omega if masks == "own" else omega),
    )
    for (_, y, u, v), (shared, dual) in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(shared, y, rtol=0, atol=1e-13)
        np.testing.assert_allclose(dual, v, rtol=0, atol=1e-13)
        np.testing.assert_allclose(u.mean(axis=0) + v, 0, atol=1e-13)


CENTRAL_LOSS = {"central": parameter_loss(central_loss), **CENTRALLY}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("masks", "options"),
    [
        ("own", CENTRAL_LOSS),
        ("one", {"moved": 0.01}),
        pytest.param("own", {"moved": 0.01}, marks=pytest.mark.slow),
        pytest.param("one", CENTRAL_LOSS, marks=pytest.mark.slow),
    ],
    ids=["own, central", "one", "own", "one, central"],
)
def test_mixtures_compression_and_the_servers_loss_end_at_the_exact_optimum(
    masks, options
):
    """The minimizer of w_f/n sum f_i(mix_i) + w_c f_c, in closed form, to 1e-12.

    Also what each side sends: k entries up; down y or k entries, the number of steps,
    and yhat of a central loss; with one mask a seed of 64 bits as well.
    """
    rounds = 1500
    run = simulated(mixed(masks=masks, **options), rounds=rounds).complete()
    central = "central" in options
    server = tuple(W_C / W_F * one for one in CENTRAL) if central else None
    best = paper.mixture_optimum(A, B, OWN, ALPHA, server)
    np.testing.assert_allclose(run.shared, best, rtol=0, atol=1e-12)
    personal = ALPHA[3] * best + (1 - ALPHA[3]) * OWN[3]
    np.testing.assert_allclose(run.personal(3), personal, rtol=0, atol=1e-12)
    number, dim, k, bits = 64, 3, 1, run.bits()
    joined = (dim + 1) * number  # w_i x_i and w_i, of FLIX
    np.testing.assert_array_equal(bits.up, joined + rounds * k * number)
    each = 32 + central * dim * number
    each += dim * number if masks == "own" else k * number + 64
    first = dim * number + (0 if masks == "own" else dim * number)
    np.testing.assert_array_equal(bits.down, first + rounds * each)


@pytest.mark.slow
def test_the_servers_rows_and_any_unbiased_compressor():
    """A central loss on rows, in whole batches: the same optimum; dithered messages."""
    rows = fb.federate(tuple(one[None] for one in CENTRAL), [np.array([0])])
    options = {**CENTRALLY, "compressor": compress.dithering(8)}
    run = simulated(
        method(central=row_loss(ON.loss), **options),
        rounds=400,
        central=rows.train.shard(0),
    ).complete()
    server = tuple(W_C / W_F * one for one in CENTRAL)
    best = paper.mixture_optimum(A, B, OWN, np.ones(7), server)
    np.testing.assert_allclose(run.shared, best, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_the_bound_of_theory_holds():
    """On f~ after some rounds, over 16 seeds."""
    known, rounds = quadratics(ON.federated_data), 8
    chosen = local_training.locodl(1.0, known, 2.0)
    settings: dict = {"moved": chosen.moved, "rate": float(chosen.rates[0])}
    keys = jax.vmap(jax.random.key)(jnp.arange(16))
    run = fb.simulate(
        method(steps=chosen.steps, **settings),
        jnp.asarray(OWN.mean(axis=0)),
        ON.federated_data,
        keys,
        rounds=rounds,
        every=rounds,
    ).complete()
    away = np.asarray(run.shared) - problems.optimum(ON)
    gaps = np.einsum("sd,de,se->s", away, A.mean(axis=0), away) / 2
    bound = local_training.locodl_bound(chosen, mixture(1.0, known, OWN))
    assert 0 < gaps.mean() <= bound.value(rounds)


FLAT = fb.federate(
    (np.zeros((7, 3, 3)), np.zeros((7, 3))), [np.array([i]) for i in range(7)]
)
"""Clients whose losses are 0 everywhere, as in directions without data."""


@pytest.mark.slow
@pytest.mark.parametrize("masks", ["own", "one"])
def test_flat_directions_diverge_beyond_twice_the_moved_that_is_chosen(masks):
    """Of f_i = 0 any model is optimal: the least that LoCoDL must do is to stay."""
    relaxation, dual = local_training.locodl_scales(2.0, 7, masks)
    most = local_training.stable_moved(RATE, 1 / STEPS, dual)

    def reached(moved):
        run = fb.simulate(
            method(masks=masks, moved=moved),
            jnp.ones(3),
            FLAT,
            jax.random.key(0),
            rounds=300,
            every=300,
        ).complete()
        return float(np.abs(run.shared).max())

    assert 0 < relaxation < 1
    assert reached(most) < 10 < 1e6 < reached(4 * most)
    assert reached(None) == reached(most)


@pytest.mark.slow
def test_without_a_value_half_of_the_least_convexity_moves():
    """The values of theory, where convexity is known; 0 of a central loss."""
    known = quadratics(ON.federated_data)
    wanted = local_training.locodl(ALPHA, known, 2.0).moved
    given = fb.solvers.given(jnp.asarray(OWN))

    def named(moved, convex):
        return fb.algorithms.flix_locodl(
            ON.loss,
            fb.Work(RATE, steps=STEPS, batch_size=None),
            alpha=ALPHA,
            personal=given,
            compressor=compress.rand_k(1),
            clients=7,
            moved=moved,
            convex=convex,
        )

    one = simulated(named(None, known.convex), rounds=4).complete().shared
    two = simulated(named(wanted, None), rounds=4).complete().shared
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-15)
    server = {**CENTRAL_LOSS, "moved": None}
    one = simulated(method(**server), rounds=4).complete().shared
    two = simulated(method(**CENTRAL_LOSS), rounds=4).complete().shared
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"rate": optax.adam(0.1)},
         "work: optimizer: an optimizer is not a constant learning rate"),
        ({"rate": 0.0}, "work: optimizer: 0.0 is not a number above 0"),
        ({"steps": fb.Epochs(2)},
         "work: steps: .* is not a whole number of at least 1"),
        ({"compressor": compress.top_k(1)},
         r"compressor: top_k\(1\) is not an unbiased compressor"),
        ({"compressor": compress.natural(), "masks": "one"},
         "compressor: natural is not rand_k, for one mask"),
        ({"moved": -1.0}, "moved: -1.0 is not a number of at least 0, or None"),
        ({"moved": 0.0},
         "moved: 0.0 is not above 0, as a problem without a central loss needs"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_one_line(options, line):
    with pytest.raises(ValueError, match=f"^locodl: {line}$"):
        method(**options)


def test_another_number_of_clients_is_refused():
    line = "^clients: 6 is not 7, the number of clients there are$"
    with pytest.raises(ValueError, match=line):
        simulated(mixed(clients=6), rounds=1)


def test_a_configuration_of_locodl_on_flix_takes_rate_and_steps_of_theory(tiny):
    tiny["run"].pop("cohort")
    tiny["model"] |= {"name": "softmax", "l2": 0.1}
    tiny["algorithm"] = {
        "name": "flix_locodl",
        "alpha": 0.5,
        "rate": "theory",
        "steps": "theory",
        "batch_size": "all",
        "moved": 0.01,
        "compressor": {"name": "rand_k", "k": 2},
        "personal": {"solver": "lbfgs", "most": 3},
    }
    config = check(tiny, "here")
    built = build(config)
    assert built.smoothness is not None
    assert built.algorithm.needs.clients == built.federated_data.clients
    dim = trees.size(jax.eval_shape(built.model.init, jax.random.key(0)))
    wanted = local_training.locodl(0.5, built.smoothness, dim / 2 - 1, moved=0.01)
    assert choose_steps(config, built.smoothness, dim).algorithm.steps == wanted.steps
    values, _ = theory_values(config, built.smoothness, dim)
    assert values["rate"] == pytest.approx(wanted.rates[0])
    tiny["algorithm"]["moved"] = 0.025  # all of it: none is left to f_i
    line = "algorithm.moved: 0.025 is not below 0.025, the smallest convexity of all "
    with pytest.raises(ConfigError, match=f"^{line}f_i mixed$"):
        build(check(tiny, "here"))


@pytest.mark.parametrize("name", ["locodl", "flix_locodl"])
def test_more_entries_than_the_model_has_are_refused_in_one_line(name, tiny):
    tiny["run"].pop("cohort")
    own = {"alpha": 0.5, "personal": {"solver": "lbfgs", "most": 3}}
    tiny["algorithm"] |= {"name": name, "compressor": {"name": "rand_k", "k": 651}}
    tiny["algorithm"] |= own if name == "flix_locodl" else {}
    line = "algorithm.compressor.k: 651 is more than the model's 650 parameters"
    with pytest.raises(ConfigError, match=f"^{line}$"):
        build(check(tiny, "here"))


def test_on_flix_by_name_it_is_locodl_inside_of_flix():
    given = fb.solvers.given(jnp.asarray(OWN))
    options: dict = {"compressor": compress.rand_k(1), "clients": 7, "moved": 0.01}
    work = fb.Work(RATE, steps=STEPS, batch_size=None)
    named = fb.algorithms.flix_locodl(
        ON.loss, work, alpha=ALPHA, personal=given, **options
    )
    one, two = (simulated(of, rounds=4).complete() for of in (named, mixed(moved=0.01)))
    np.testing.assert_array_equal(one.shared, two.shared)
    np.testing.assert_array_equal(one.personal(2), two.personal(2))


def test_a_configuration(tiny):
    tiny["run"].pop("cohort")
    tiny["algorithm"] = {
        "name": "locodl",
        "rate": 0.1,
        "steps": 3,
        "batch_size": 4,
        "moved": 0.01,
        "compressor": {"name": "rand_k", "k": 5},
        "masks": "one",
    }
    options = check(tiny, "here").algorithm
    needs = options.build(ON.loss, None, 6).needs
    assert needs.everyone and needs.uniform and needs.whole
    tiny["compress"] = {"compressor": {"name": "natural"}}
    with pytest.raises(ConfigError, match="compress: locodl compresses what it sends"):
        build(check(tiny, "here"))
    tiny["algorithm"]["compressor"] = {"name": "sign"}
    line = "here: algorithm.compressor: sign is not rand_k, for one mask"
    with pytest.raises(ConfigError, match=f"^{line}$"):
        check(tiny, "here")
