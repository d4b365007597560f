# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""CompressedScaffnew: its paper's loop, exact optima, Scaffnew, and what is sent."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend.compress.sparse import dealt
from fedblend.config.build import build
from fedblend.config.config import check
from fedblend.config.theory_rates import choose_steps, theory_values
from fedblend.errors import ConfigError
from fedblend.theory import local_training
from fedblend.theory.constants import mixture, quadratics
from reference import local_training_transcription as paper

ON = problems.quadratics()
A, B = problems.client_matrices(ON)
OWN = np.stack([np.linalg.solve(a, b) for a, b in zip(A, B, strict=True)])
SLOPES = [lambda x, a=a, b=b: a @ x - b for a, b in zip(A, B, strict=True)]
N, STEPS, RATE, KEY = 7, 3, 0.35, jax.random.key(3)
ETA = 7 / 12
"""n (s - 1)/(s (n - 1)) for s = 2."""


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def simulated(algorithm, *, rounds, every=None, key=None):
    return fb.simulate(
        algorithm,
        jnp.asarray(ON.params, jnp.float64),
        ON.federated_data,
        KEY if key is None else key,
        rounds=rounds,
        every=every or rounds,
        weights="uniform",
    )


def method(loss=ON.loss, *, copies=2, steps=STEPS, rate=RATE, clients=N):
    work = fb.Work(rate, steps=steps, batch_size=None)
    return fb.algorithms.compressed_scaffnew(loss, work, clients=clients, copies=copies)


@jax.jit
@partial(jax.vmap, in_axes=(0, None))
@partial(jax.vmap, in_axes=(None, 0))
def received(seed, client):
    """A vector of ones as the server decodes it; each client sends one entry, or none.

    Two copies of three entries are six, and a seventh client has none.
    """
    own, shard = dealt(N, 2, seed), ON.federated_data.train.shard(0)
    shard = dataclasses.replace(shard, id=client)
    return own.decompress(own.compress(jnp.ones(3), KEY, shard), 3, None, client)


def test_every_entry_is_dealt_to_as_many_clients_each_set_as_often():
    """21 pairs of 7 clients; 2,100 seeds: 100 of each, four deviations are 40."""
    seeds = jax.random.key_data(jax.random.split(KEY, 2100))
    kept = np.asarray(received(seeds, jnp.arange(N)))
    assert set(np.unique(kept)) == {0, 3.5}
    assert ((kept > 0).sum(axis=1) == 2).all()
    for entry in range(3):
        left, right = np.nonzero(kept[:, :, entry])[1].reshape(-1, 2).T
        counts = np.bincount(left * N + right, minlength=N * N)
        assert (counts > 0).sum() == 21 and np.abs(counts[counts > 0] - 100).max() < 40


def test_the_papers_loop_with_the_coins_and_masks_that_fell():
    """Both in float64, over some 30 steps; controls of the last round are settled."""
    run = simulated(method(), rounds=10, every=1)
    ours, rounds, before = [], [], 0
    for record in run:
        if record.round:
            local = int(run.server.local) - before
            before = int(run.server.local)
            states = run.client_states()
            masks = np.asarray(received(states.seed[:1], jnp.arange(N))[0] > 0)
            rounds.append((local, dict(enumerate(masks))))
            gap = masks * (np.asarray(run.shared)[None] - states.reached)
            control = states.control + ETA / STEPS / RATE * gap
            ours.append((np.asarray(run.shared), control))
    theirs = paper.tamuna(SLOPES, ON.params, RATE, 1 / STEPS, ETA, rounds)
    for (x, h), (shared, control) in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(shared, x, rtol=0, atol=1e-13)
        np.testing.assert_allclose(control, h, rtol=0, atol=1e-13)
        np.testing.assert_allclose(h.sum(axis=0), 0, atol=1e-13)


@pytest.mark.slow
def test_mixtures_end_at_the_exact_optimum_and_a_part_of_the_entries_travels():
    """FLIX around it, in closed form; one of three entries up, the model down."""
    alpha, rounds = np.array([0.2, 0.9, 0.5, 1.0, 0.3, 0.7, 0.4]), 1500
    given = fb.solvers.given(jnp.asarray(OWN))
    mixed = fb.flix(ON.loss, partial(method, steps=2), alpha=alpha, local=given)
    run = simulated(mixed, rounds=rounds).complete()
    best = paper.mixture_optimum(A, B, OWN, alpha)
    np.testing.assert_allclose(run.shared, best, rtol=0, atol=1e-12)
    bits, number, dim = run.bits(), 64, 3
    np.testing.assert_array_equal(bits.up, (dim + 1) * number + rounds * number)
    each = dim * number + 32 + 64  # the model, the number of steps, the seed
    np.testing.assert_array_equal(bits.down, dim * number + rounds * each)


@pytest.mark.slow
def test_with_all_entries_from_all_clients_it_is_scaffnew():
    plain = fb.algorithms.scaffnew(ON.loss, fb.Work(RATE, steps=STEPS, batch_size=None))
    one = simulated(plain, rounds=12).complete().shared
    two = simulated(method(copies=N), rounds=12).complete().shared
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-13)


@pytest.mark.slow
def test_the_bound_of_theory_holds():
    """On f after some rounds, over 16 seeds."""
    known, rounds = quadratics(ON.federated_data), 8
    chosen = local_training.compressed_scaffnew(1.0, known, 2)
    keys = jax.vmap(jax.random.key)(jnp.arange(16))
    algorithm = method(steps=chosen.steps, rate=float(chosen.rates[0]))
    run = fb.simulate(
        algorithm,
        jnp.asarray(OWN.mean(axis=0)),
        ON.federated_data,
        keys,
        rounds=rounds,
        every=rounds,
    ).complete()
    away = np.asarray(run.shared) - problems.optimum(ON)
    gaps = np.einsum("sd,de,se->s", away, A.mean(axis=0), away) / 2
    bound = local_training.scaffnew_bound(chosen, mixture(1.0, known, OWN))
    assert 0 < gaps.mean() <= bound.value(rounds)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"copies": 1}, "compressed_scaffnew: copies: 1 is not a whole number of at "),
        (
            {"copies": 8},
            "compressed_scaffnew: copies: 8 is not from 2 to 7, the number",
        ),
        ({"clients": 6}, "clients: 6 is not 7, the number of clients there are"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(options, line):
    with pytest.raises(ValueError, match=f"^{line}"):
        simulated(method(**options), rounds=1)


def test_with_fewer_clients_controls_need_the_model_that_ends_their_round():
    """Why TAMUNA with C < n does not fit: NumPy alone, 4 of 7 clients, s = 2.

    Settled at once it ends at the optimum. Settled when a client is next drawn, by the
    model it then receives, the controls do not sum to 0, and it ends elsewhere.
    """
    draws = np.random.default_rng(0)

    def rounds(number):
        for _ in range(number):
            members = draws.choice(N, 4, replace=False).tolist()
            masks = np.zeros((4, 3), bool)
            for entry in range(3):
                masks[draws.choice(4, 2, replace=False), entry] = True
            yield draws.geometric(1 / STEPS), dict(zip(members, masks, strict=True))

    chi, best = 4 / 6, problems.optimum(ON)  # C (s - 1)/(s (C - 1))
    *_, (x, h) = paper.tamuna(SLOPES, ON.params, RATE, 1 / STEPS, chi, rounds(1500))
    np.testing.assert_allclose(x, best, atol=1e-12)
    np.testing.assert_allclose(h.sum(axis=0), 0, atol=1e-12)
    x, h, last = np.array(ON.params, float), np.zeros((N, 3)), {}
    for local, masks in rounds(1500):
        for i, mask in masks.items():
            if i in last:
                before, hat = last[i]
                h[i] += chi / STEPS / RATE * before * (x - hat)
            hat = x
            for _ in range(local):
                hat = hat - RATE * (SLOPES[i](hat) - h[i])
            last[i] = mask, hat
        x = sum(masks[i] * last[i][1] for i in masks) / 2
    assert np.abs(h.sum(axis=0)).max() > 1e-2 and np.abs(x - best).max() > 1e-3


@pytest.mark.slow
def test_on_flix_by_name_it_is_compressed_scaffnew_inside_of_flix():
    given, alpha = fb.solvers.given(jnp.asarray(OWN)), np.linspace(0.3, 1, N)
    work = fb.Work(RATE, steps=STEPS, batch_size=None)
    named = fb.algorithms.flix_compressed_scaffnew(
        ON.loss, work, alpha=alpha, personal=given, clients=N, copies=2
    )
    inside = fb.flix(ON.loss, method, alpha=alpha, local=given)
    one, two = (simulated(of, rounds=4).complete() for of in (named, inside))
    np.testing.assert_array_equal(one.shared, two.shared)
    np.testing.assert_array_equal(one.personal(2), two.personal(2))


@pytest.mark.slow
def test_on_flix_with_all_copies_it_is_scafflix_of_equal_weights():
    """Rates gamma_i = alpha_i^2 rate of f_i make all w_i equal."""
    given, alpha = fb.solvers.given(jnp.asarray(OWN)), np.linspace(0.3, 1, N)
    work = fb.Work(RATE, steps=STEPS, batch_size=None)
    one = fb.algorithms.flix_compressed_scaffnew(
        ON.loss, work, alpha=alpha, personal=given, clients=N, copies=N
    )
    own = work._replace(optimizer=alpha**2 * RATE)
    two = fb.scafflix(ON.loss, own, alpha=alpha, personal=given)
    first, second = (simulated(of, rounds=12).complete().shared for of in (one, two))
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["compressed_scaffnew", "flix_compressed_scaffnew"])
def test_a_configuration_takes_rate_and_steps_of_theory(name, tiny):
    tiny["run"].pop("cohort")
    tiny["model"] |= {"name": "softmax", "l2": 0.1}
    own = {"alpha": 0.5, "personal": {"solver": "lbfgs", "most": 3}}
    tiny["algorithm"] = {
        "name": name,
        "copies": 2,
        "rate": "theory",
        "steps": "theory",
        "batch_size": "all",
        **(own if name.startswith("flix") else {}),
    }
    config = check(tiny, "here")
    built = build(config)
    assert built.smoothness is not None
    alpha = 0.5 if name.startswith("flix") else 1.0
    wanted = local_training.compressed_scaffnew(alpha, built.smoothness, 2)
    assert choose_steps(config, built.smoothness, 650).algorithm.steps == wanted.steps
    values, _ = theory_values(config, built.smoothness, 650)
    assert values["rate"] == pytest.approx(wanted.rates[0])
    tiny["algorithm"]["copies"] = 7
    line = "algorithm.copies: 7 is not from 2 to 6, the number of clients"
    with pytest.raises(ConfigError, match=f"^{line}$"):
        build(check(tiny, "here"))
    tiny["algorithm"]["copies"], tiny["model"]["l2"] = 2, 0.0
    with pytest.raises(ConfigError, match="l2 above 0 makes every f_i convex"):
        build(check(tiny, "here"))
