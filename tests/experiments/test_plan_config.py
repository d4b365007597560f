# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Plans of a configuration: numbers by hand, what travels, and what is refused."""

import math

import jax
import numpy as np
import pytest

from fedblend.config import toml
from fedblend.config.build import build
from fedblend.config.config import check, dump
from fedblend.config.model import smoothness, with_rates
from fedblend.errors import ConfigError
from fedblend.experiments.plan import Problem, problem, promises, warnings
from fedblend.simulation.simulate import simulate
from fedblend.theory import steps
from fedblend.trees import precision
from planned import CLIENTS, DIANA, DIM, EPS, FLIX, L2, RAND, ByHand, K, changed


@pytest.fixture(scope="module")
def found(compiled) -> Problem:
    return problem(check(DIANA, "here"))


@pytest.fixture(scope="module")
def by_hand() -> ByHand:
    return ByHand()


def of(found, name, **asked):
    return [p for p in promises(found, EPS, **asked) if p.scheme.solver.name == name]


def test_gradient_descent_by_the_papers_formula(found, by_hand):
    np.testing.assert_allclose(found.smoothness.smooth, by_hand.L, rtol=1e-9)
    np.testing.assert_allclose(found.personal, by_hand.x, atol=1e-7)
    L, V = by_hand.L.mean(), by_hand.V
    A, q = math.sqrt(2 * EPS / (L * V)), 1 / math.sqrt(1 - L2 / L)
    for rounds in (1, 2, 10, 50, 400):
        (made,) = of(found, "dgd", rounds=rounds)
        expected = min(1.0, A * q ** (rounds - 1))
        assert made.plan.alpha == pytest.approx(expected, rel=1e-5)
        assert made.plan.alpha <= expected
        assert (made.plan.rounds or 0) <= rounds
        assert made.rate == pytest.approx(1 / (made.plan.alpha**2 * L))
        (back,) = of(found, "dgd", alpha=made.plan.alpha)
        assert back.plan == made.plan
    for k in (1, 5, 30):
        (made,) = of(found, "dgd", alpha=A * q ** (k - 0.5))
        assert made.plan.rounds == k + 1
        expected = made.plan.alpha**2 * L * V / 2 * (1 - L2 / L) ** k
        assert made.plan.bound == pytest.approx(expected)


def test_diana_by_hand(found, by_hand):
    (made,) = of(found, "diana", alpha=0.5)
    own, omega, b = 0.25 * by_hand.L, DIM / K - 1, K / DIM
    top, worst, mu = own.mean(), own.max(), 0.25 * L2
    step = 0.0
    for _ in range(50):  # r = step mu, q = (1 + sqrt(b/(b - r)))^2, to a fixed point
        ratio = math.sqrt(b / (b - step * mu))
        step = 1 / (top + worst * omega * (1 + ratio) ** 2 / CLIENTS)
    assert made.rate == pytest.approx(step)
    factor = 1 - step * mu
    noise = worst * omega * top * by_hand.V
    weight = (1 + 1 / ratio) / (b - step * mu)
    start = top * by_hand.V / mu + weight * step**2 / CLIENTS * noise
    rounds = made.plan.rounds or 0
    assert rounds == math.ceil(math.log(EPS / (top / 2 * start)) / math.log(factor)) + 1
    assert made.plan.bound == pytest.approx(top / 2 * start * factor ** (rounds - 1))
    for budget in (1, 300, 1500):
        (most,) = of(found, "diana", rounds=budget)
        (back,) = of(found, "diana", alpha=most.plan.alpha)
        assert back.plan == most.plan
        assert 1 <= (back.plan.rounds or 0) <= budget


def test_the_table_is_a_grid(found):
    made = promises(found, EPS)
    assert [p.plan.alpha for p in made[:10]] == [a / 10 for a in range(1, 11)]
    assert [p.scheme.solver.name for p in made] == ["dgd"] * 10 + ["diana"] * 10
    assert made[0].settings == ()
    assert made[10].settings[0] == "algorithm.alpha=0.1"
    with pytest.raises(ValueError, match="at most one"):
        promises(found, EPS, alpha=0.5, rounds=3)


TABLES = {
    "plain": None,
    "diana": {"how": "diana", "compressor": RAND},
    "first": {"how": "diana", "compressor": RAND, "start": "first"},
    "ragged": {"how": "diana", "compressor": {"name": "rand_k", "k": [K, 2, 2, K]}},
}


@pytest.mark.parametrize(
    ("name", "width"),
    [("plain", "float32"), ("diana", "float64"), ("first", "float32"),
     ("ragged", "float64")],
)  # fmt: skip
def test_bits_are_those_of_the_ledger(name, width, compiled, found, monkeypatch):
    """Also for the budget: what is promised for bits is spent in bits."""
    content = changed(FLIX, f"run.precision={width}")
    if TABLES[name]:
        content["compress"] = TABLES[name]
    monkeypatch.setattr(
        "fedblend.experiments.plan._local_models",
        lambda built: (found.personal, np.zeros(CLIENTS)),
    )
    config = check(content, "here")
    scheme = problem(config).schemes[-1]
    with precision(width):
        built = build(config)
        run = simulate(
            built.algorithm,
            built.model.init,
            built.federated_data,
            built.key,
            rounds=2,
        ).complete()
    bits = run.summary()["bits"]
    spent = bits["up"] + bits["down"] + bits["last_broadcast"]
    made = of(found._replace(schemes=(scheme,)), scheme.solver.name, rounds=3)
    planned = scheme.traffic.first + scheme.traffic.start + 2 * scheme.traffic.later
    assert scheme.at_most == (name == "ragged")
    if name == "ragged":  # two of four clients send 2 entries, not 8, in both rounds
        spent += 2 * 2 * (K - 2) * (64 if width == "float64" else 32)
    assert planned == spent
    exact = promises(found._replace(schemes=(scheme,)), EPS, bits=spent)
    assert [p.plan for p in exact] == [p.plan for p in made]


def test_a_configuration_starts_at_the_average_of_theory(compiled, by_hand):
    settings = ("algorithm.alpha=[0.1, 0.5, 0.9, 1.0]", "run.rounds=0")
    with precision("float64"):
        built = build(check(changed(FLIX, *settings), "here"))
        run = simulate(
            built.algorithm,
            built.model.init,
            built.federated_data,
            built.key,
            rounds=0,
        ).complete()
        norms = [float(run.client(client).norm) for client in range(CLIENTS)]
        shared = np.concatenate(
            [np.ravel(leaf) for leaf in jax.tree.leaves(run.shared)]
        )
    weights = np.array([0.1, 0.5, 0.9, 1.0]) ** 2 * by_hand.L
    expected = weights @ by_hand.x / weights.sum()
    np.testing.assert_allclose(shared, expected, atol=1e-7)
    assert max(norms) <= 1e-9


def test_warnings(found):
    made = promises(found, EPS, alpha=1.0)
    assert warnings(check(DIANA, "here"), found, made) == []
    rough = changed(DIANA, "algorithm.personal.tolerance=1e-3")
    (line,) = warnings(check(rough, "here"), found, made)
    assert "may miss the bound" in line
    single = check(changed(DIANA, "run.precision=float32"), "here")
    (line,) = warnings(single, found, promises(found, 1e-6, alpha=0.5))
    assert "float32" in line


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["algorithm.name=fedavg"], "only"),
        (["compress.compressor={name='natural'}"], "ends in a neighborhood"),
        (["algorithm.alpha=[0.0, 0.0, 0.0, 0.0]"], "all are 0"),
        (["algorithm.personal={solver='sgd', rate=0.1, steps=3, batch_size=4}"],
         "does not minimize f_i"),
        (["compress={how='diana', rate=0.9, compressor={name='rand_k', k=8}}"],
         "compress.rate: 0.9 is not in (0, 1/(omega + 1)]"),
    ],
)  # fmt: skip
def test_what_has_no_plan(settings, line, monkeypatch):
    content = changed(FLIX, *settings)
    if settings[0] == "algorithm.name=fedavg":
        for key in ("alpha", "personal"):
            del content["algorithm"][key]
        content["algorithm"]["rate"] = 0.1
    monkeypatch.setattr(
        "fedblend.experiments.plan._local_models",
        lambda built: (np.zeros((CLIENTS, DIM)), np.zeros(CLIENTS)),
    )
    with pytest.raises(ConfigError) as caught:
        problem(check(content, "here"))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_local_models_that_are_not_found(compiled):
    content = changed(FLIX, "algorithm.personal.most=1")
    with pytest.raises(ConfigError, match=r"personal.most: is too small.*norm"):
        problem(check(content, "here"))


@pytest.mark.parametrize(
    ("loss", "family", "bend"),
    [("logistic", "binary", 4), ("cross_entropy", "classes", 2),
     ("squared_error", "regression", 1)],
)  # fmt: skip
def test_constants_of_linear_models(loss, family, bend, tmp_path):
    rng = np.random.default_rng(0)
    inputs, ids = rng.normal(size=(40, 3)), np.repeat([0, 1], 20)
    targets = {"binary": ids, "classes": np.arange(40) % 3, "regression": inputs[:, 0]}
    arrays = {"inputs": inputs, "targets": targets[family], "clients": ids}
    np.savez(tmp_path / "own.npz", **arrays)
    data = {"file": str(tmp_path / "own.npz"), "partition": "by_key", "test": 0.0}
    model = {"name": "softmax", "l2": 0.5, "intercept": False}
    config = check({**FLIX, "data": data, "model": model}, "here")
    with precision("float64"):
        made = build(config)
    squared = [np.linalg.svd(inputs[ids == i])[1] ** 2 / 20 for i in (0, 1)]
    known = made.smoothness
    assert known is not None
    np.testing.assert_allclose(
        known.smooth, [s[0] / bend + 0.5 for s in squared], rtol=1e-5
    )
    lowest = [s[-1] if loss == "squared_error" else 0 for s in squared]
    np.testing.assert_allclose(known.convex, np.array(lowest) + 0.5, rtol=1e-5)
    assert smoothness(config.model, "multilabel", made.federated_data) is None


@pytest.mark.parametrize("convex", [True, False], ids=["strongly convex", "convex"])
def test_the_step_of_theory(convex, found):
    """For DCGD here; that of DGD and DIANA is checked with their plans."""
    known = found.smoothness
    if not convex:
        known = known._replace(convex=np.zeros(CLIENTS))
    config = check(DIANA | {"compress": {"compressor": RAND}}, "here")
    assert check(toml.parse(dump(config), "there"), "there") == config
    together, alone = with_rates(config, known, DIM)
    own, omega = 0.25 * known.smooth, DIM / K - 1
    step = 1 / (own.mean() + 2 * own.max() * omega / CLIENTS)
    assert together.rate == pytest.approx(step if convex else step / 4)
    assert alone.rate == pytest.approx(1 / known.smooth.max())
    config = check(DIANA, "here")
    step = 1 / (own.mean() + 6 * own.max() * omega / CLIENTS)
    together, _ = with_rates(config, known, DIM)
    if convex:
        assert together.rate == steps.diana(0.5, known, omega) > step
    else:
        assert together.rate == pytest.approx(step / 4)


def test_a_number_stays_what_it_is(found):
    config = check(changed(FLIX, "algorithm.rate=0.25"), "here")
    together, alone = with_rates(config, found.smoothness, DIM)
    assert together is alone is config.algorithm
