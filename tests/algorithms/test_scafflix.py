# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Scafflix: the paper's loop with the same coins, its limits, and its theorem."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedblend as fb
import problems
from fedblend.algorithms.scafflix import scafflix
from fedblend.config.build import build
from fedblend.config.config import check
from fedblend.errors import ConfigError
from fedblend.theory import local_training
from fedblend.theory.constants import mixture, quadratics
from reference import local_training_transcription as paper

ALPHA = np.array([0.2, 0.9, 0.5, 1.0, 0.3, 0.7, 0.4])
GAMMA = np.array([0.4, 0.3, 0.5, 0.2, 0.45, 0.35, 0.25])


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def on():
    return problems.quadratics()


def own_models(on):
    return np.stack([np.linalg.solve(a, b) for a, b in zip(*matrices(on), strict=True)])


matrices = problems.client_matrices


def simulated(algorithm, on, *, rounds, every=None, key=None):
    return fb.simulate(
        algorithm,
        jnp.asarray(on.params, jnp.float64),
        on.federated_data,
        jax.random.key(3) if key is None else key,
        rounds=rounds,
        every=every or rounds,
        weights="uniform",
    )


def made(on, gamma, steps, alpha, **options):
    work = fb.Work(gamma, steps=steps, batch_size=None)
    given = fb.solvers.given(jnp.asarray(own_models(on)))
    return scafflix(on.loss, work, alpha=alpha, personal=given, **options)


def controls(run, alpha, gamma, p):
    """h_i after the last communication, which a client learns of in the next round."""
    kept = jax.tree.map(np.asarray, run.client_states().inner)
    weight = (np.asarray(alpha) ** 2 / gamma)[:, None]
    settled = kept.control + p * weight * (np.asarray(run.shared)[None] - kept.reached)
    return settled / np.asarray(alpha)[:, None]


def test_the_papers_loop_with_the_coins_that_fell(on):
    """Both are in float64 and differ by the order of sums, over some 30 steps."""
    steps, rounds = 3, 10
    run = simulated(made(on, GAMMA, steps, ALPHA), on, rounds=rounds, every=1)
    ours, coins, before, first = [], [], 0, None
    for record in run:
        if record.round == 0:
            first = np.asarray(run.shared)
            continue
        coins += [False] * (int(run.server.local) - before - 1) + [True]
        before = int(run.server.local)
        ours.append((np.asarray(run.shared), controls(run, ALPHA, GAMMA, 1 / steps)))
    assert len(coins) > 20
    given = (first, own_models(on), ALPHA, GAMMA, 1 / steps, coins)
    theirs = list(paper.scafflix(*matrices(on), *given))
    assert len(theirs) == rounds
    for (x, h), (shared, control) in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(np.tile(shared, (7, 1)), x, rtol=0, atol=1e-13)
        np.testing.assert_allclose(control, h, rtol=0, atol=2e-13)


def test_the_optimum_of_the_mixture_and_its_gradients(on):
    """In closed form; a client with alpha = 0 neither moves it nor divides by zero."""
    alpha = np.where(np.arange(7) == 2, 0.0, ALPHA)
    run = simulated(made(on, GAMMA, 3, alpha), on, rounds=300).complete()
    own = own_models(on)
    best = paper.mixture_optimum(*matrices(on), own, alpha)
    np.testing.assert_allclose(run.shared, best, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(run.personal(2), own[2])
    kept = run.client_states().inner
    slopes = [
        alpha[i] * (a @ (alpha[i] * best + (1 - alpha[i]) * own[i]) - b)
        for i, (a, b) in enumerate(zip(*matrices(on), strict=True))
    ]
    np.testing.assert_allclose(kept.control, slopes, rtol=0, atol=1e-11)


def test_alpha_one_and_equal_rates_are_scaffnew(on):
    """From the same start, in which Scafflix begins at x_avg."""
    plain = fb.algorithms.scaffnew(on.loss, fb.Work(0.3, steps=3, batch_size=None))
    average = own_models(on).mean(axis=0)
    one = simulated(plain, on._replace(params=average), rounds=12).shared
    two = simulated(made(on, 0.3, 3, 1.0), on, rounds=12).shared
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-13)


def test_one_step_and_equal_weights_are_gradient_descent_on_flix(on):
    rate = 0.2
    descent = fb.flix(
        on.loss,
        lambda loss: fb.fedavg(loss, fb.Work(rate, steps=1, batch_size=None)),
        alpha=ALPHA,
        local=fb.solvers.given(jnp.asarray(own_models(on))),
    )
    one = simulated(descent, on, rounds=9).shared
    two = simulated(made(on, rate * ALPHA**2, 1, ALPHA), on, rounds=9).shared
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-14)


def test_the_bounds_of_theory_hold(on):
    """f~ after some rounds, over 16 seeds, and the rounds that the bound needs."""
    known = quadratics(on.federated_data)
    chosen = local_training.scafflix(ALPHA, known)
    run = made(on, "theory", chosen.steps, ALPHA, smooth=known.smooth)
    keys = jax.vmap(jax.random.key)(jnp.arange(16))
    own, (a, b), rounds = own_models(on), matrices(on), 3
    done = simulated(run, on, rounds=rounds, key=keys).complete()
    away = np.asarray(done.shared) - paper.mixture_optimum(a, b, own, ALPHA)
    curvature = np.tensordot(ALPHA**2, a, axes=1) / 7
    gaps = np.einsum("sd,de,se->s", away, curvature, away) / 2
    bound = local_training.scafflix_bound(chosen, mixture(ALPHA, known, own))
    assert 0 < gaps.mean() <= bound.value(rounds)
    assert bound.rounds_to(float(bound.value(rounds))) == rounds


@pytest.mark.slow
def test_longer_rates_are_those_of_the_proof(on):
    """2/(L_i + mu_i) by name and as an array, in whole runs."""
    known = quadratics(on.federated_data)
    facts = {"smooth": known.smooth, "convex": known.convex}
    named = made(on, "theory", 3, ALPHA, longer=True, **facts)
    array = made(on, 2 / (known.smooth + known.convex), 3, ALPHA, smooth=known.smooth)
    one, two = (simulated(of, on, rounds=3).complete().shared for of in (named, array))
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-14)
    short, long = (
        local_training.scafflix(ALPHA, known, longer=longer) for longer in (False, True)
    )
    assert (long.rates > short.rates).all() and long.factor < short.factor
    with pytest.raises(ValueError, match=r"^scafflix: convex: None is not mu_i"):
        made(on, "theory", 3, ALPHA, longer=True, smooth=known.smooth)


@pytest.mark.parametrize(
    ("optimizer", "steps", "line"),
    [
        (
            optax.adam(0.1),
            2,
            "work: optimizer: an optimizer is not a constant learning rate",
        ),
        (0.0, 2, 'work: optimizer: 0.0 is not a number above 0, or one .* "theory"'),
        ("best", 2, "work: optimizer: 'best' is not a number above 0, or one .*"),
        (0.1, fb.Epochs(2), "work: steps: .* is not a whole number of at least 1"),
        ("theory", 2, 'smooth: None is not L_i, for the rate "theory"'),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(optimizer, steps, line, on):
    with pytest.raises(ValueError, match=f"^scafflix: {line}$"):
        made(on, optimizer, steps, 0.5)


def test_rates_for_another_number_of_clients_are_refused(on):
    with pytest.raises(ValueError, match="scafflix: work: optimizer: an array of 6"):
        simulated(made(on, GAMMA[:6], 2, ALPHA), on, rounds=1)


@pytest.fixture
def configured(tiny):
    tiny["model"]["name"] = "softmax"
    tiny["run"].pop("cohort")
    tiny["algorithm"] = {
        "name": "scafflix",
        "alpha": 0.5,
        "rate": "theory",
        "steps": 3,
        "batch_size": "all",
        "personal": {"solver": "lbfgs", "most": 3},
    }
    return tiny


def test_a_configuration_takes_the_rate_of_theory(configured):
    configured["run"]["seed"] = [2, 5]  # splits, and so L_i, of their own
    both = build(check(configured, "here")).by_split
    assert both is not None
    first = jax.tree.map(lambda values: values[0], both.over)
    needs = []
    jax.eval_shape(lambda split: needs.append(both.algorithm(split).needs), first)
    assert needs[0].everyone and needs[0].weights == "uniform"
    configured["algorithm"] |= {"rate": 0.1, "batch_size": 4}  # a number, and batches
    assert check(configured, "here").algorithm.rate == 0.1


def test_a_configuration_takes_the_steps_of_theory(configured):
    configured["algorithm"] |= {"steps": "theory", "longer": True}
    configured["model"]["l2"] = 0.05
    built = build(check(configured, "here"))
    assert built.smoothness is not None
    wanted = local_training.scafflix(0.5, built.smoothness, longer=True).steps
    keys = jax.random.split(jax.random.key(0), 4000)
    params = built.model.init(jax.random.key(0))
    joins = fb.Aggregate(((), (params, jnp.ones(()))), jnp.ones(()), jnp.int32(1))
    drawn = jax.vmap(lambda key: built.algorithm.start(params, joins, None, key))(keys)
    # Four deviations of the mean of 4,000 geometric numbers are 6 percent.
    np.testing.assert_allclose(
        drawn[0].extra["scaffnew"].local.mean(), wanted, rtol=0.07
    )
    configured["model"]["l2"] = 0.0
    with pytest.raises(ConfigError, match="scafflix: theory needs convexity of every"):
        build(check(configured, "here"))


@pytest.mark.parametrize(
    ("table", "options", "line"),
    [
        ("algorithm", {"batch_size": 4}, 'batch_size: is 4; theory needs "all"'),
        ("algorithm", {"schedule": {"name": "constant", "unit": "round"}},
         "schedule: a schedule is not a constant learning rate"),
        ("algorithm", {"steps": "theory", "rate": 0.1},
         'steps: "theory" goes with rate = "theory" of compressed_scaffnew, '
         "flix_compressed_scaffnew, flix_locodl, locodl and scafflix"),
        ("algorithm", {"steps": [2, 1]},
         "steps: [2, 1] is not a whole number of at least 1"),
    ],
)  # fmt: skip
def test_what_a_configuration_refuses(table, options, line, configured):
    configured[table] = configured[table] | options
    with pytest.raises(ConfigError) as caught:
        build(check(configured, "here"))
    assert str(caught.value).removeprefix("here: ") == f"{table}.{line}"


def test_theory_has_no_step_with_compression(configured):
    configured["compress"] = {"how": "diana", "compressor": {"name": "natural"}}
    with pytest.raises(ConfigError, match="compress: is given; theory has no step for"):
        build(check(configured, "here"))
