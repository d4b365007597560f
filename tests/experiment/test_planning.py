# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Plans of a configuration: numbers by hand, what travels, and what is refused."""

import copy
import json
import math
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest

from fedblend.cli import main, planning, running
from fedblend.experiment import toml
from fedblend.experiment.build import build
from fedblend.experiment.config import check, dump
from fedblend.experiment.constants import smoothness, with_rates
from fedblend.experiment.planning import Problem, problem, promises, warnings
from fedblend.experiment.section import ConfigError
from fedblend.runtime.precision import precision
from fedblend.runtime.simulate import simulate
from fedblend.runtime.wire import unpack

CLIENTS, DIM, L2, EPS, K = 4, 31, 0.1, 1e-3, 8
FLIX = {
    "version": 1,
    "name": "planned",
    "data": {
        "source": "breast_cancer",
        "partition": "contiguous",
        "clients": CLIENTS,
        "test": 0.0,
    },
    "model": {"name": "logistic", "l2": L2},
    "algorithm": {
        "name": "flix",
        "alpha": 0.5,
        "rate": "theory",
        "steps": 1,
        "batch_size": "all",
        "personal": {"solver": "gradient_descent", "tolerance": 1e-9},
    },
    "run": {"rounds": 3, "precision": "float64"},
    "measure": {"local": False},
}
RAND = {"name": "rand_k", "k": K}
DIANA = {**FLIX, "compress": {"how": "diana", "compressor": RAND}}


def changed(content: dict, *settings: str) -> dict:
    content = copy.deepcopy(content)
    for setting in settings:
        toml.put(content, setting)
    return content


@pytest.fixture(scope="module")
def found(compiled) -> Problem:
    return problem(check(DIANA, "here"))


class ByHand:
    """The same problem in NumPy: rows, L_i, x_i, and f~."""

    def __init__(self):
        with precision("float64"):
            federation = build(check(FLIX, "here")).federation
        self.rows = []
        for client in range(CLIENTS):
            inputs, targets = federation.train.rows(client)
            inputs = np.append(inputs, np.ones((len(inputs), 1)), axis=1)
            self.rows.append((inputs.astype(float), 2.0 * targets - 1))
        self.L = np.array(
            [np.linalg.svd(a)[1][0] ** 2 / 4 / len(a) + L2 for a, _ in self.rows]
        )
        self.x = np.stack([self._solve(*rows) for rows in self.rows])
        self.weights = self.L / self.L.sum()
        self.average = self.weights @ self.x
        self.V = self.weights @ ((self.x - self.average) ** 2).sum(axis=1)

    def _solve(self, a, y):
        x = np.zeros(a.shape[1])
        for _ in range(30):
            p = 1 / (1 + np.exp(y * (a @ x)))
            slope = L2 * x - a.T @ (y * p) / len(y)
            bend = L2 * np.eye(len(x)) + (a.T * (p * (1 - p))) @ a / len(y)
            x = x - np.linalg.solve(bend, slope)
        return x

    def value(self, alpha, shared):
        """f~ at a shared model."""
        places = alpha * shared + (1 - alpha) * self.x
        values = [
            np.logaddexp(0, -y * (a @ x)).mean() + L2 / 2 * x @ x
            for (a, y), x in zip(self.rows, places, strict=True)
        ]
        return float(np.mean(values))


@pytest.fixture(scope="module")
def by_hand() -> ByHand:
    return ByHand()


def of(found, name, **asked):
    return [p for p in promises(found, EPS, **asked) if p.way.solver.name == name]


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
    step = 1 / (top + 2 * worst * omega / CLIENTS + 4 * worst * omega / CLIENTS)
    assert made.rate == pytest.approx(step)
    factor = max(1 - step * mu, 1 - b / 2)
    noise = worst * omega * top * by_hand.V
    start = top * by_hand.V / mu + 4 * step**2 / (CLIENTS * b) * noise
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
    assert [p.way.solver.name for p in made] == ["dgd"] * 10 + ["diana"] * 10
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
        "fedblend.experiment.planning._local_models",
        lambda built: (found.personal, np.zeros(CLIENTS)),
    )
    config = check(content, "here")
    way = problem(config).ways[-1]
    with precision(width):
        built = build(config)
        run = simulate(
            *(built.algorithm, built.model.init, built.federation, built.key), rounds=2
        ).complete()
    bits = run.summary()["bits"]
    spent = bits["up"] + bits["down"] + bits["last_broadcast"]
    made = of(found._replace(ways=(way,)), way.solver.name, rounds=3)
    planned = way.traffic.first + way.traffic.start + 2 * way.traffic.later
    assert way.at_most == (name == "ragged")
    if name == "ragged":  # two of four clients send 2 entries, not 8, in both rounds
        spent += 2 * 2 * (K - 2) * (64 if width == "float64" else 32)
    assert planned == spent
    exact = promises(found._replace(ways=(way,)), EPS, bits=spent)
    assert [p.plan for p in exact] == [p.plan for p in made]


def test_a_configuration_starts_at_the_average_of_theory(compiled, by_hand):
    settings = ("algorithm.alpha=[0.1, 0.5, 0.9, 1.0]", "run.rounds=0")
    with precision("float64"):
        built = build(check(changed(FLIX, *settings), "here"))
        run = simulate(
            *(built.algorithm, built.model.init, built.federation, built.key), rounds=0
        ).complete()
        norms = [float(run.client(client).norm) for client in range(CLIENTS)]
        shared = np.concatenate(
            [np.ravel(leaf) for leaf in jax.tree.leaves(run.shared)]
        )
    weights = np.array([0.1, 0.5, 0.9, 1.0]) ** 2 * by_hand.L
    expected = weights @ by_hand.x / weights.sum()
    np.testing.assert_allclose(shared, expected, atol=1e-7)
    assert max(norms) <= 1e-9


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for module in (running, planning):
        monkeypatch.setattr(module, "compile_cache", lambda: None)
    return tmp_path


def write(content: dict) -> str:
    Path("flix.toml").write_text(toml.write(content))
    return "flix.toml"


def test_the_command_does_what_was_promised(place, capsys, compiled, by_hand):
    file = write(changed(FLIX, "algorithm.rate=0.1", "algorithm.alpha=0.9"))
    arguments = ["plan", file, "--rounds", "40", "--eps", "2e-3", "--format", "json"]
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert said.err == ""
    (plan,) = json.loads(said.out)["plans"]
    words = shlex.split(plan["command"])
    assert words[:2] == ["fedblend", "run"]
    assert main(words[1:]) == 0
    capsys.readouterr()
    leaves, _ = unpack(Path("runs/planned/model.safetensors").read_bytes())
    shared = np.concatenate([leaves[".weight"].ravel(), leaves[".bias"]])
    summary = json.loads(Path("runs/planned/summary.json").read_text())["runs"][0]
    assert summary["round"] == plan["rounds"] - 1
    bits = summary["bits"]
    assert bits["up"] + bits["down"] + bits["last_broadcast"] == plan["bits"]
    best = min_of(by_hand, plan["alpha"])
    gap = by_hand.value(plan["alpha"], shared) - best
    assert -1e-12 <= gap <= plan["bound"] <= 2e-3


def min_of(by_hand: ByHand, alpha: float) -> float:
    """min f~ by gradient descent in NumPy."""
    x, step = by_hand.average, 1 / (alpha**2 * by_hand.L.mean())
    for _ in range(3000):
        slope = 0
        for (a, y), own in zip(by_hand.rows, by_hand.x, strict=True):
            here = alpha * x + (1 - alpha) * own
            p = 1 / (1 + np.exp(y * (a @ here)))
            slope = slope + alpha * (L2 * here - a.T @ (y * p) / len(y)) / CLIENTS
        x = x - step * slope
    return by_hand.value(alpha, x)


def test_what_is_printed(place, capsys, compiled, monkeypatch, found):
    monkeypatch.setenv("COLUMNS", "80")
    file = write(DIANA)
    assert main(["plan", file]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert said.count("DGD  ") == said.count("DIANA  ") == 10
    assert "31 parameters" in said
    assert main(["plan", file, "--bits", "1Mbit", "--set", "run.seed=[1, 2]"]) == 0
    said = capsys.readouterr().out
    assert (
        "to run it: fedblend run flix.toml --set 'run.seed=[1, 2]' --set algo" in said
    )
    assert main(["plan", file, "--rounds", "0"]) == 0
    assert "nothing to run" in capsys.readouterr().out


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
    ("text", "bits"),
    [("1000", 1e3), ("1e6", 1e6), ("2.5Mbit", 2.5e6), ("3 kB", 24e3), ("1GB", 8e9)],
)
def test_bits_with_units(text, bits):
    assert planning.parsed_bits(text) == bits


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--alpha", "1.5"], "--alpha: 1.5 is not in [0, 1]"),
        (["--alpha", "nan"], "--alpha: nan is not in [0, 1]"),
        (["--eps", "0"], "--eps: 0 is not a number above 0"),
        (["--rounds", "-1"], "--rounds: -1 is less than 0"),
        (["--rounds", "3", "--alpha", "0.1"], "--rounds and --alpha: give only one"),
        (["--bits", "3 parsecs"], "--bits: '3 parsecs' is not a number of bits"),
        (["--bits", "-3"], "--bits: '-3' is not a number of bits"),
        (["--set", "algorithm.alpha=2.0"], "algorithm.alpha: 2.0 is not in [0, 1]"),
    ],
)
def test_bad_command_lines(arguments, line, place, capsys):
    assert main(["plan", write(FLIX), *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert line in said.err


ONE_CLASS = (
    "data.partition=classes_per_client", "data.classes=1", "model.l2=0.0",
)  # fmt: skip
REFUSED = {
    ("algorithm.batch_size=20",): 'batch_size: is 20; theory needs "all" there',
    ("algorithm.mix=outputs",): "algorithm.mix: is",
    ("run.cohort=2",): "run.cohort: is 2; theory needs nothing there",
    ("run.weights=by_count",): 'run.weights: is "by_count"; theory needs "uniform"',
    ("run.dropout=0.1",): "run.dropout: is 0.1",
    ("model.name=mlp",): "needs constants L_i, which theory has for the models softmax",
    ("model.l2=0.0",): "model.l2: is 0, and f_i are not strongly convex",
    ONE_CLASS: "their own models x_i do not exist",
    ("data.source=digits",): "logistic: 10 outputs, it has a single score",
    ("compress.compressor={name='top_k', k=3}",): "no step for top_k(3), which is bia",
    ("compress.compressor={name='sign'}",): "no step for sign, which is biased",
    ("compress.compressor={name='natural'}", "compress.how=ef21"): "no step for ef21",
}


@pytest.mark.parametrize("settings", REFUSED, ids=" ".join)
def test_what_theory_does_not_cover(settings, place, capsys):
    """Neither a plan nor the step of theory, but for what only plans need."""
    file = write(FLIX)
    sets = [word for setting in settings for word in ("--set", setting)]
    if settings[0] == "model.name=mlp":
        sets += ["--set", "algorithm.personal.solver=lbfgs"]
    assert main(["plan", file, *sets]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert REFUSED[settings] in said
    if not any(setting.startswith("model.l2") for setting in settings):
        assert main(["run", file, *sets]) == 2
        assert REFUSED[settings] in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["algorithm.name=fedavg"], "only"),
        (["compress.compressor={name='natural'}"], "ends in a neighbourhood"),
        (["algorithm.alpha=[0.0, 0.0, 0.0, 0.0]"], "all are 0"),
        (["algorithm.personal={solver='sgd', rate=0.1, steps=3, batch_size=4}"],
         "does not minimise f_i"),
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
        "fedblend.experiment.planning._local_models",
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
    assert smoothness(config.model, "multilabel", made.federation) is None


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
    assert together.rate == pytest.approx(step if convex else step / 4)


def test_a_number_stays_what_it_is(found):
    config = check(changed(FLIX, "algorithm.rate=0.25"), "here")
    together, alone = with_rates(config, found.smoothness, DIM)
    assert together is alone is config.algorithm
