# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Plans of a configuration: numbers by hand, what travels, and what is refused."""

import math
from typing import Any

import jax
import numpy as np
import pytest

from fedblend.config import toml
from fedblend.config.build import build
from fedblend.config.config import check, dump
from fedblend.config.tables.model import smoothness
from fedblend.config.theory_rates import theory_values
from fedblend.errors import ConfigError, SettingError
from fedblend.runs.plan.candidates import candidates, config_of, file_solvers, ways
from fedblend.runs.plan.offers import climb, offers, plan, table, trial, warnings
from fedblend.runs.plan.problem import Problem, problem
from fedblend.simulation.simulate import simulate
from fedblend.trees import precision
from planned import CLIENTS, DIANA, DIM, EPS, FLIX, L2, RAND, ByHand, K, changed


@pytest.fixture(scope="module")
def found(compiled) -> Problem:
    return problem(check(DIANA, "here"))


@pytest.fixture(scope="module")
def by_hand() -> ByHand:
    return ByHand()


def of(found, solver: str, **asked) -> Any:
    """The plan of one of the configured solvers, without trials."""
    among = [one for one in file_solvers(found) if one.solver == solver]
    (made,) = offers(found, EPS, **asked, trials=False, among=among)
    return made


def test_gradient_descent_by_the_papers_formula(found, by_hand):
    """Worst-case rounds are the paper's; certified ones start from a measured gap."""
    np.testing.assert_allclose(found.smoothness.smooth, by_hand.L, rtol=1e-9)
    np.testing.assert_allclose(found.personal, by_hand.x, atol=1e-7)
    L, V = by_hand.L.mean(), by_hand.V
    A, q = math.sqrt(2 * EPS / (L * V)), 1 / math.sqrt(1 - L2 / L)
    for k in (1, 5, 30):
        alpha = A * q ** (k - 0.5)
        made = of(found, "dgd", alpha=alpha)
        assert made.worst == k + 1
        assert made.certified.rounds == by_hand_certified(by_hand, alpha)
        assert made.certified.rounds <= made.worst
    made = of(found, "dgd", alpha=1.0)
    rounds = made.certified.rounds
    assert made.worst - 20 > rounds == by_hand_certified(by_hand, 1.0) > 20
    gap = by_hand.value(1.0, by_hand.average) - by_hand.value(0.0, by_hand.average)
    expected = gap * (1 - L2 / L) ** (rounds - 1)
    assert EPS * (1 - L2 / L) <= expected <= EPS
    assert made.bound == pytest.approx(expected, rel=1e-6)


def by_hand_certified(by_hand: ByHand, alpha: float) -> int:
    """Rounds from f~(x_avg) - mean f_i(x_i) in NumPy."""
    gap = by_hand.value(alpha, by_hand.average) - by_hand.value(0.0, by_hand.average)
    if gap <= EPS:
        return 1
    return math.ceil(math.log(EPS / gap) / math.log(1 - L2 / by_hand.L.mean())) + 1


def test_diana_by_hand(found, by_hand):
    """With the best weight of the Lyapunov function for the fastest memories."""
    made = of(found, "diana", alpha=0.5)
    own, omega, b = 0.25 * by_hand.L, DIM / K - 1, K / DIM
    top, most, mu = own.mean(), own.max(), 0.25 * L2
    low, high = 0.0, b
    for _ in range(60):
        r = (low + high) / 2
        step = 1 / (top + most * omega / CLIENTS * (1 + math.sqrt(b / (b - r))) ** 2)
        low, high = (r, high) if r <= step * mu else (low, r)
    weight = (1 + math.sqrt((b - r) / b)) / (b - r)
    noise = step**2 / CLIENTS * omega * weight * most

    def rounds(gap: float) -> int:
        start = top / 2 * (2 * gap / mu + noise * 2 * gap)
        return math.ceil(math.log(EPS / start) / math.log(1 - r)) + 1

    assert made.worst == rounds(top * by_hand.V / 2)
    gap = by_hand.value(0.5, by_hand.average) - by_hand.value(0.0, by_hand.average)
    assert made.certified.rounds == rounds(gap) < made.worst
    assert made.bound <= EPS


@pytest.mark.slow
def test_the_largest_alpha_of_a_budget(found):
    for solver in ("dgd", "diana"):
        for rounds in (1, {"dgd": 40, "diana": 300}[solver]):
            made = of(found, solver, rounds=rounds)
            assert made.certified.rounds <= rounds
            assert of(found, solver, alpha=made.alpha).certified == made.certified
            more = of(found, solver, alpha=made.alpha * (1 + 1e-4))
            assert more.certified.rounds > rounds
        bits = made.certified.up + made.certified.down
        again = of(found, solver, bits=bits)
        assert again.alpha == made.alpha
        assert of(found, solver, bits=bits - 1).alpha < made.alpha
    assert of(found, "dgd", rounds=0).alpha == 0


TINY = 1e-6


@pytest.mark.slow
def test_typical_rounds_are_those_of_trials(found, by_hand, compiled):
    """Gradient descent's as NumPy counts them; bits are those of the median rounds."""
    x, rounds, step = by_hand.average, 1, 1 / (0.25 * by_hand.L.mean())
    while np.sum(by_hand.gradient(0.5, x) ** 2) / (0.5 * L2) > 0.95 * TINY:
        x, rounds = x - step * by_hand.gradient(0.5, x), rounds + 1
    by_label = {(one.solver, one.label): one for one in candidates(found)}
    dealt = next(one for one in by_label if one[0] == "compressed_scaffnew")
    for name in (("dgd", ""), dealt, ("locodl", "rand-7, one")):
        (made,) = offers(found, TINY, alpha=0.5, among=[by_label[name]])
        assert made.median is not None and made.certified is not None and made.p90
        assert made.median.rounds <= made.p90 < made.certified.rounds
        up, down = (way.bits(made.median.rounds) for way in made.ways[:2])
        assert made.median[1:3] == (up, down)
        if name == ("dgd", ""):
            assert made.p90 == made.median.rounds
            assert rounds <= made.p90 <= rounds + rounds // 20 + 1
    assert up > down / 3  # one mask for all: both ways are sparse
    (cheap,) = offers(found, TINY, alpha=0.01, among=[by_label["dgd", ""]])
    assert cheap.median is not None and cheap.median.rounds == 1


@pytest.mark.parametrize(("start", "least"), [(4, 23), (4, 40), (40, 3), (1, 1)])
def test_local_steps_that_are_cheapest(start, least):
    """Rounds fall like p and rise like 1/p: found to 5 %, though 4 is all of theory."""
    asked = []

    def mean_rounds(steps: int, most: float) -> float:
        asked.append(steps)
        rounds = 10 * max(steps / least, least / steps)
        return rounds if rounds <= most else math.inf

    _, rounds = climb(mean_rounds, start, math.inf, math.inf)
    assert rounds <= 10 * 2 ** (1 / 8)
    assert len(asked) == len(set(asked)) <= 14
    asked.clear()
    assert climb(mean_rounds, 4 * least, 20.0, 12.0) == (4 * least, math.inf)
    assert asked == [4 * least]  # out of reach


def scafflix(found: Problem) -> Any:
    return next(one for one in candidates(found) if one.solver == "scafflix")


FAR = "model.l2=0.01"
"""With a large L/mu, typical rounds need many more local steps than proofs do."""


@pytest.mark.slow
def test_longer_local_steps_are_tried(compiled):
    """The choice costs at most 1.05 of the best of a dense search, on fresh seeds."""
    found = problem(check(changed(FLIX, FAR), "here"))
    (made,) = offers(found, TINY, alpha=0.5, among=[scafflix(found)])
    first, chosen = scafflix(found).steps, made.candidate.steps
    assert chosen is not None and chosen >= 4 * first
    config = config_of(found, made.candidate, "algorithm.alpha=0.5")
    run = trial(found, config, TINY)
    fresh = jax.random.split(jax.random.key(1), (3, 10))

    def rounds(steps: int) -> float:
        return float(np.mean([run(k, steps, 30) for k in fresh]))

    dense = {round(first * 2 ** (number / 2)) for number in range(3, 8)}
    assert rounds(chosen) <= 1.05 * min(map(rounds, dense | {chosen}))


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["scafflix", "compressed_scaffnew"])
def test_typical_rounds_hold_for_fresh_seeds(solver, found, compiled):
    """Half are done by the median, nine of ten by the 90 % point."""
    one = next(one for one in candidates(found) if one.solver == solver)
    (made,) = offers(found, TINY, alpha=0.5, among=[one])
    assert made.median is not None and made.p90 is not None
    config = config_of(found, made.candidate, "algorithm.alpha=0.5")
    run = trial(found, config, TINY)
    fresh = jax.random.split(jax.random.key(2), (10, 10))
    runs = [run(some, made.candidate.steps, 400) for some in fresh]
    rounds = np.concatenate(runs)
    for point, part, apart in ((made.median.rounds, 0.5, 0.15), (made.p90, 0.9, 0.08)):
        assert np.mean(rounds < point) - apart <= part  # rounds are whole numbers
        assert np.mean(rounds <= point) + apart >= part


@pytest.mark.slow
def test_solvers_on_flix_run_by_settings_of_a_configuration(found):
    """LoCoDL and CompressedScaffnew: with 1/p of theory or half, at any alpha."""
    made = offers(found, EPS, alpha=0.5, trials=False)
    for one in made:
        if one.candidate.solver in ("locodl", "compressed_scaffnew"):
            config = config_of(found, one.candidate, "algorithm.alpha=0.5")
            options: Any = config.algorithm
            assert options.name == f"flix_{one.candidate.solver}"
            assert options.rate == "theory" and options.alpha == 0.5
            known, dim = found.smoothness, found.personal.shape[1]
            papers = options.local_training(known, dim).steps
            assert options.steps in (papers, -(-papers // 2))


def test_a_client_that_shares_nothing_leaves_out_solvers_that_need_all(found):
    shape = found.shape.copy()
    shape[0] = 0.0
    names = {one.solver for one in candidates(found._replace(shape=shape))}
    assert "scafflix" in names
    assert not names & {"locodl", "compressed_scaffnew"}


def test_the_table_is_a_grid(found):
    made = table(found, EPS)
    assert [p.alpha for p in made[:10]] == [a / 10 for a in range(1, 11)]
    assert [p.candidate.solver for p in made] == ["dgd"] * 10 + ["diana"] * 10
    assert made[0].settings == ()
    assert made[10].settings[0] == "algorithm.alpha=0.1"


TABLES = {
    "plain": None,
    "diana": {"how": "diana", "compressor": RAND},
    "first": {"how": "diana", "compressor": RAND, "start": "first"},
    "ragged": {"how": "diana", "compressor": {"name": "rand_k", "k": [K, 2, 2, K]}},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "width"),
    [("plain", "float32"), ("diana", "float64"), ("first", "float32"),
     ("ragged", "float64")],
)  # fmt: skip
def test_bits_are_those_of_the_ledger(name, width, compiled, found):
    """Each way, for any number of rounds."""
    content = changed(FLIX, f"run.precision={width}")
    if TABLES[name]:
        content["compress"] = TABLES[name]
    config = check(content, "here")
    cost = ways(found._replace(config=config), config)
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
    up, down = bits["up"], bits["down"] + bits["last_broadcast"]
    assert cost.at_most == (name == "ragged")
    if name == "ragged":  # two of four clients send 2 entries, not 8, in both rounds
        up += 2 * 2 * (K - 2) * (64 if width == "float64" else 32)
    assert (cost.up.bits(3), cost.down.bits(3)) == (up, down)
    assert cost.both.bits(3) == up + down


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
    assert warnings(check(DIANA, "here"), found, EPS, 1.0) == []
    rough = changed(DIANA, "algorithm.personal.tolerance=1e-3")
    (line,) = warnings(check(rough, "here"), found, EPS, 1.0)
    assert "may miss the bound" in line
    single = check(changed(DIANA, "run.precision=float32"), "x")
    with pytest.raises(SettingError, match="eps: 1e-06 is below 1e-05: float32"):
        plan(single, eps=1e-6, alpha=0.5)


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
        "fedblend.runs.plan.problem._local_models",
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
    together, alone = theory_values(config, known, DIM)
    own, omega = 0.25 * known.smooth, DIM / K - 1
    step = 1 / (own.mean() + 2 * own.max() * omega / CLIENTS)
    assert together["rate"] == pytest.approx(step if convex else step / 4)
    assert alone["rate"] == pytest.approx(1 / known.smooth.max())
    config = check(DIANA, "here")
    together, _ = theory_values(config, known, DIM)
    step = 1 / (own.mean() + 6 * own.max() * omega / CLIENTS)
    if convex:  # the best weights of its Lyapunov function allow more
        assert step < together["rate"] < 1.5 * step
    else:
        assert together["rate"] == pytest.approx(step / 4)


def test_a_number_stays_what_it_is(found):
    config = check(changed(FLIX, "algorithm.rate=0.25"), "here")
    together, alone = theory_values(config, found.smoothness, DIM)
    assert not together and not alone
