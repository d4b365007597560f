# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The hierarchical model: its rounds end where NumPy's solution is, and its limits."""

import jax
import numpy as np
import optax
import pytest
from scipy.optimize import minimize
from scipy.special import expit

import fedblend as fb
from fedblend.errors import UserError
from fedblend.runs.auto.candidates import ROUNDS
from fedblend.runs.auto.linear import PooledRows, hierarchical_models
from fedblend.trees import precision
from loopback import LoopbackFederation

COUNTS = np.array([30, 12, 45, 8, 21])
WORK = fb.Work(1.0, steps=8, batch_size=None)
LOSSES = {
    "regression": fb.losses.squared_error,
    "binary": fb.losses.logistic,
    "classes": fb.losses.cross_entropy,
}


def federation(kind):
    draw = np.random.default_rng(0)
    owner = np.repeat(np.arange(len(COUNTS)), COUNTS)
    inputs = draw.normal(size=(len(owner), 3)).astype(np.float32)
    scores = inputs @ draw.normal(size=(3, 3)) + draw.normal(size=(5, 3))[owner]
    if kind == "regression":
        targets = (scores[:, 0] + draw.normal(size=len(owner))).astype(np.float32)
    elif kind == "binary":
        targets = (scores[:, 0] + draw.logistic(size=len(owner)) > 0).astype(np.int32)
    else:
        targets = (scores + draw.gumbel(size=scores.shape)).argmax(1).astype(np.int32)
    parts = [np.flatnonzero(owner == client) for client in range(len(COUNTS))]
    return fb.federate((inputs, targets), parts)


def models(kind, rounds, work=WORK, **options):
    data = federation(kind)
    outputs = 3 if kind == "classes" else 1
    model = fb.models.build("softmax", (3,), outputs)
    algorithm = fb.algorithms.hierarchical(LOSSES[kind](model.apply), work, **options)
    run = fb.simulate(algorithm, model.init, data, jax.random.key(0), rounds=rounds)
    found = run.complete().personal_models(range(5))
    vectors = [np.column_stack([one.bias, one.weight]).ravel() for one in found]
    expected = hierarchical_models(
        kind, PooledRows.read(data.train), outputs, **options
    )
    return run, np.stack(vectors), expected


@pytest.mark.parametrize(
    ("kind", "rounds", "options"),
    [
        ("regression", 1, {"level": 1.0, "slopes": 0.1, "ridge": 0.01}),
        pytest.param(
            *("binary", 8, {"level": 0.5, "slopes": 0.2, "ridge": 0.01}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("classes", 8, {"level": 0.5, "slopes": 0.2, "ridge": 0.01}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_rounds_end_at_the_solution(kind, rounds, options):
    """One round for squared errors; NumPy has all variables in one place.

    A message has the gradient, half of the Hessian, and the number of rows.
    """
    run, found, expected = models(kind, rounds, **options)
    if kind == "regression":
        assert set(run.bits().up) == {32 * (4 * 7 // 2 + 1)}
    if kind == "classes":  # the same number may be added to all classes
        found, expected = (
            one.reshape(5, 3, 4) - one.reshape(5, 3, 4).mean(axis=1, keepdims=True)
            for one in (found, expected)
        )
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.parametrize("secure", [None, {"least": 3}])
def test_one_round_on_nodes_is_one_letter(secure, tmp_path):
    """Bit for bit the simulator's models; masked sums differ by their rounding.

    Clients have 8 to 45 rows: what weighs them is in what they send.
    """
    data, options = federation("regression"), {"level": 0.7, "slopes": 0.2}
    model = fb.models.build("softmax", (3,), 1)
    algorithm = fb.algorithms.hierarchical(
        fb.losses.squared_error(model.apply), WORK._replace(steps=1), **options
    )
    what = algorithm, model.init(jax.random.key(0)), data, jax.random.key(0)
    done = fb.simulate(*what, rounds=1).complete()
    rules = {"rounds": 1, "cohort": 5, "every": 1, "secure": secure}
    nodes = LoopbackFederation(*what, tmp_path, **rules)
    server = nodes.complete(nodes.server())
    if secure is None:
        for found, expected in zip(
            jax.tree.leaves(server.shared), jax.tree.leaves(done.shared), strict=True
        ):
            np.testing.assert_array_equal(found, expected)
    # Named leaves, the intercept first.
    found = [
        np.concatenate([np.ravel(own[name]) for name in sorted(own)])
        for own in nodes.personal(server)
    ]
    expected = fb.one_letter(data, **options, folds=1, standardize=False, fewest_rows=0)
    np.testing.assert_allclose(found, expected.coefficients, atol=1e-5)


@pytest.mark.slow
def test_scores_that_nodes_report_choose_the_amount_of_sharing(tmp_path):
    """One round for each amount; cross-validation in one place chooses the same."""
    draw = np.random.default_rng(3)
    inputs = draw.normal(size=(240, 3)).astype(np.float32)
    level = np.repeat(draw.normal(size=6), 40)
    targets = inputs.sum(axis=1) + level + draw.normal(size=240)
    rows, parts = (inputs, targets.astype(np.float32)), np.split(np.arange(240), 6)
    data = fb.federate(rows, parts, test=0.4)
    model = fb.models.build("softmax", (3,), 1)
    loss = fb.losses.squared_error(model.apply)
    amounts, scores = ((0.0, 0.0), (0.3, 0.0), (100.0, 100.0)), []
    for number, amount in enumerate(amounts):
        options = dict(zip(("level", "slopes"), amount, strict=True))
        algorithm = fb.algorithms.hierarchical(loss, WORK._replace(steps=1), **options)
        what = algorithm, model.init(jax.random.key(0)), data, jax.random.key(0)
        measures = {"loss": fb.metrics.mean_loss(loss)}
        rules = {"rounds": 1, "cohort": 6, "every": 1, "measures": measures}
        nodes = LoopbackFederation(*what, tmp_path / str(number), **rules)
        server = nodes.complete(nodes.server())
        scores.append(np.mean(server.measured[0]["test"]["personal"]["loss"]))
    errors = [
        fb.one_letter(fb.federate(rows, parts), level=own, slopes=others).errors.mean()
        for own, others in amounts
    ]
    assert np.argmin(scores) == np.argmin(errors) == 1
    assert errors[1] < 1.01 * fb.one_letter(data).errors.mean(axis=1).min()


def noisy_run(clip, noise, **options):
    """One round with noise for rows, on clients of which one has fewer rows than
    parameters; and the client's own part from its rows as they are."""
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(90, 4)).astype(np.float32)
    targets = (inputs.sum(axis=1) + draw.normal(size=90)).astype(np.float32)
    data = fb.federate((inputs, targets), np.split(np.arange(90), [40, 86]))
    model = fb.models.build("softmax", (4,), 1)
    loss, work = fb.losses.squared_error(model.apply), WORK._replace(steps=1)
    hidden = fb.transforms.row_noise(loss, clip, noise)
    exact = fb.algorithms.hierarchical(loss, work, **options)
    private = fb.algorithms.hierarchical(hidden, work, **options)
    private = private._replace(personal=exact.personal)
    run = fb.simulate(private, model.init, data, jax.random.key(0), rounds=1)
    models = run.complete().personal_models(range(3))
    found = [np.append(one.bias, np.ravel(one.weight)) for one in models]
    return data, np.stack(found)


def test_noise_for_rows_covers_second_derivatives():
    """Without noise the letter's models; with much, others, and finite ones."""
    options = {"level": 0.5, "slopes": 0.1}
    data, found = noisy_run(1e6, 0.0, **options)
    letter = fb.one_letter(data, **options, folds=1, standardize=False, fewest_rows=0)
    np.testing.assert_allclose(found, letter.coefficients, atol=1e-4)
    _, noisy = noisy_run(6.0, 1.0, **options)
    assert np.isfinite(noisy).all() and np.abs(noisy - found).max() > 1e-3


def excess(seed, noise, scale, level, slopes, ridge, rounds):
    """How far above scipy's optimum auto's rounds end, as a part of the optimum."""
    draw = np.random.default_rng(seed)
    counts = draw.integers(8, 45, 5)
    owner = np.repeat(np.arange(5), counts)
    inputs = draw.normal(size=(len(owner), 3))
    # Inputs separate the classes, or nearly do, so that scores grow for long.
    score = 5 * inputs @ draw.normal(size=3)
    score += noise * (5 * draw.normal(size=5)[owner] + draw.logistic(size=len(owner)))
    targets = (score > 0).astype(np.int32)
    design = np.hstack([np.ones((len(owner), 1)), inputs])
    spread = np.sqrt([level, *[slopes * scale**2] * 3])
    penalty = len(owner) * ridge / scale**2 * np.array([0, 1, 1, 1])

    def value(entries):
        """And its gradient, in inputs before they are scaled."""
        shared, u = entries[:4], entries[4:].reshape(5, 4)
        scores = (design * (shared + spread * u)[owner]).sum(axis=1)
        loss = np.logaddexp(0, scores) - targets * scores
        slope = (expit(scores) - targets)[:, None] * design
        own = np.stack([slope[owner == client].sum(axis=0) for client in range(5)])
        down = [own.sum(axis=0) + penalty * shared, (spread * own + u).ravel()]
        total = loss.sum() + 0.5 * (penalty * shared**2).sum() + 0.5 * (u**2).sum()
        return total, np.concatenate(down)

    options = {"maxiter": 50_000, "maxfun": 50_000, "ftol": 1e-14, "gtol": 1e-9}
    best = minimize(value, np.zeros(24), jac=True, method="L-BFGS-B", options=options)
    steps = ROUNDS["binary"][1]
    with precision("float64"):
        parts = [np.flatnonzero(owner == client) for client in range(5)]
        data = fb.federate((scale * inputs, targets), parts)
        model = fb.models.build("softmax", (3,), 1)
        algorithm = fb.algorithms.hierarchical(
            fb.losses.logistic(model.apply),
            fb.Work(1.0, steps=steps, batch_size=None),
            level=level,
            slopes=slopes,
            ridge=ridge,
        )
        run = fb.simulate(algorithm, model.init, data, jax.random.key(0), rounds=rounds)
        done = run.complete()
        both = [done.shared, *done.personal_models(range(5))]
    unit = np.array([1, *[scale] * 3])
    shared, *own = (
        unit * np.r_[np.ravel(one.bias), np.ravel(one.weight)] for one in both
    )
    u = (np.stack(own) - shared) / np.where(spread > 0, spread, 1)
    return (value(np.concatenate([shared, u.ravel()]))[0] - best.fun) / best.fun


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 9))]
)
def test_classes_end_at_scipys_optimum_in_any_unit(seed):
    """Inputs in units from .03 to 30, ridge down to 1e-6, and classes nearly apart.

    After 8 rounds the first case is at 20 times the optimum.
    """
    draw = np.random.default_rng([seed, 1])
    noise = 0.2 * (seed % 2)
    scale = 20.0 if seed == 0 else 10 ** draw.uniform(-1.5, 1.5)
    ridge = 1e-6 if seed == 0 else 10 ** draw.uniform(-6, -2)
    level = 10 ** draw.uniform(-2, 2)
    slopes = draw.choice([0, 10 ** draw.uniform(-4, 1) / scale**2])
    case = noise, scale, level, slopes, ridge
    assert excess(seed, *case, ROUNDS["binary"][0]) < 1e-3, case


def test_without_variance_it_is_one_model_for_all():
    _, found, expected = models("regression", 1, level=0.0, ridge=0.02)
    np.testing.assert_allclose(found, np.tile(found[0], (5, 1)), atol=1e-6)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_alone_nothing_travels():
    run, found, expected = models("regression", 1, level=9.0, slopes=0.3, share=False)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert not run.bits().up.any() and not run.bits().down.any()


def test_it_takes_the_length_of_a_step_and_no_optimizer():
    with pytest.raises(UserError, match="length of the server's Newton step"):
        fb.algorithms.hierarchical(lambda p, r: r, fb.Work(optax.adam(0.1), 1, None))


def test_one_round_is_exact_in_any_unit():
    """Least squares; the unit of an input decides no direction to be free."""
    draw = np.random.default_rng(0)
    inputs = draw.normal(0, 2000, (200, 1)).astype(np.float32)
    targets = (inputs[:, 0] / 1000 + 5 + draw.normal(size=200)).astype(np.float32)
    data = fb.federate((inputs, targets), np.split(np.arange(200), 2))
    model = fb.models.build("softmax", (1,), 1)
    algorithm = fb.algorithms.hierarchical(
        fb.losses.squared_error(model.apply),
        fb.Work(1.0, steps=1, batch_size=None),
        level=0.0,
    )
    run = fb.simulate(
        algorithm, model.init, data, jax.random.key(0), rounds=1, weights="uniform"
    )
    table = np.column_stack([np.ones(200), inputs])
    exact = np.linalg.lstsq(table, targets, rcond=None)[0]
    found = np.sort(
        np.concatenate([*map(np.ravel, jax.tree.leaves(run.complete().shared))])
    )
    np.testing.assert_allclose(found, np.sort(exact), rtol=1e-3)
