# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Sweeps: the grid, one program for many values, the numbers of single runs."""

import copy
from typing import Any

import numpy as np
import pytest

from fedblend.config.build import build
from fedblend.config.config import check
from fedblend.config.sweep import grid, join_points, parse, programs
from fedblend.errors import ConfigError, RunError
from fedblend.runs import run_folder, side_by_side
from fedblend.runs.compare import read_points, sweep
from fedblend.runs.paired import contenders
from fedblend.runs.run import run_config
from fedblend.runs.run_folder import Folder
from fedblend.runs.side_by_side import NotTogether, run_together
from fedblend.simulation.serialize import unpack
from tiny_config import TINY

TOLERANCE: Any = {"rel": 2e-5, "abs": 2e-6}
"""Of single precision: constants are rounded before or after they are combined."""
APFL = {"name": "apfl", "learn": "fixed", "alpha": 0.5}
FLIX = {
    "name": "flix",
    "alpha": 0.5,
    "steps": 1,
    "rate": "theory",
    "batch_size": "all",
    "personal": {"solver": "lbfgs", "most": 3, "tolerance": 1e-6},
}
pytestmark = pytest.mark.usefixtures("compiled")


def content(algorithm, **tables):
    """The small configuration with another algorithm, and more keys."""
    made = copy.deepcopy(TINY)
    base = {} if algorithm.get("batch_size") == "all" else made["algorithm"]
    made["algorithm"] = {**base, **algorithm}
    if algorithm["name"] == "flix":
        del made["run"]["cohort"]
    for name, more in tables.items():
        made[name] = {**made[name], **more}
    return made


def numbers(path):
    """All that a run measured, by what it is."""
    rows = run_folder.read_rows(Folder(path))
    found: dict[Any, Any] = {
        (row["seed"], row["round"], split, model, metric, name): value
        for row in rows
        for split, models in row["measures"].items()
        for model, metrics in models.items()
        for metric, spread in metrics.items()
        for name, value in spread.items()
    }
    for row in rows:
        for key in ("bits_up", "bits_down", "received"):
            found[row["seed"], row["round"], key] = row[key]
    return found


def cells(path):
    """The lines of ``clients.csv``."""
    return [line.split(",") for line in (path / "clients.csv").read_text().split()]


def same_as_single(config, path, place):
    """Whether the folder of a swept value is that of a run by itself."""
    run_config(config, place)
    mine, theirs = numbers(path), numbers(place)
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        assert mine[key] == pytest.approx(value, **TOLERANCE), key
    files = {one.name for one in place.iterdir()}
    kept = {name for name in files if "checkpoint" not in name}
    there = {one.name for one in path.iterdir() if "checkpoint" not in one.name}
    assert there == kept
    for row, other in zip(*(cells(of) for of in (path, place)), strict=True):
        for cell, expected in zip(row, other, strict=True):
            if cell != expected:
                assert float(cell) == pytest.approx(float(expected), **TOLERANCE)
    for name in kept:
        if name.endswith(".safetensors"):
            (mine, _), (theirs, _) = (
                unpack((of / name).read_bytes()) for of in (path, place)
            )
            assert mine.keys() == theirs.keys()
            for leaf, value in theirs.items():
                assert mine[leaf] == pytest.approx(value, **TOLERANCE, nan_ok=True)
    summary, other = (run_folder.read_summary(Folder(of)) for of in (path, place))
    alike(summary, other)


TIMES = ("seconds", "compile_seconds", "measure_seconds")


def alike(mine, theirs):
    """Whether two summaries are the same, but for rounding and times."""
    assert type(mine) is type(theirs)
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys()
        for key in mine.keys() - set(TIMES):
            alike(mine[key], theirs[key])
    elif isinstance(mine, list):
        for one, other in zip(mine, theirs, strict=True):
            alike(one, other)
    elif isinstance(mine, float):
        assert mine == pytest.approx(theirs, **TOLERANCE)
    elif not isinstance(mine, str) or not any(sign.isdigit() for sign in mine):
        assert mine == theirs


def swept(made, over, out, **options):
    """A sweep of a configuration as tables."""
    return sweep(check(made, "a test"), over, out, **options)


OVER = {"algorithm.alpha": [0.0, 0.3]}


@pytest.fixture(scope="module")
def apfl(tmp_path_factory, compiled):
    """A sweep of two seeds, that have splits of their own, and training alone."""
    made = content(APFL, run={"seed": [0, 1]}, measure={"local": 2})
    out = tmp_path_factory.mktemp("apfl")
    return made, out, swept(made, OVER, out)


@pytest.mark.slow
def test_a_value_is_what_a_run_by_itself_would_be(apfl, tmp_path):
    _, out, found = apfl
    assert found.programs == 1 and not (out / "programs").exists()
    point = found.points[1]
    same_as_single(point.config, out / "runs" / point.name, tmp_path / "single")


@pytest.mark.slow
def test_one_seed_and_the_rate_of_theory_for_each_value(tmp_path):
    made = content(FLIX, run={"rounds": 2})
    points = read_points(check(made, "a test"), ["algorithm.alpha=0.4,0.8"], None)
    folders = {of.name: Folder(tmp_path / of.name) for of in points}
    run_together(points, folders, Folder(tmp_path / "programs"))
    path = folders["alpha=0.8"].path
    same_as_single(points[1].config, path, tmp_path / "single")


def test_every_value_has_the_rate_of_theory():
    """In every split, as a single run has it."""
    made = content(FLIX, run={"seed": [0, 1]})
    points = read_points(check(made, "a test"), ["algorithm.alpha=0.4,0.8"], None)
    found = join_points(points, build(points[0].config)).over
    alphas = found["values"]["algorithm.alpha"]
    assert alphas == pytest.approx([0.4, 0.4, 0.8, 0.8])
    for number, point in enumerate(points):
        single = build(point.config).by_split
        assert single is not None
        mine = found["rates"][2 * number : 2 * number + 2]
        np.testing.assert_allclose(mine, single.over["rates"], rtol=1e-6)
        own = found["smooth"][2 * number : 2 * number + 2]
        np.testing.assert_allclose(own, single.over["smooth"], rtol=1e-6)


@pytest.mark.slow
def test_every_rate_trains_alone_with_its_own(tmp_path, monkeypatch):
    """In two programs, as if three rates had too many models for one."""
    monkeypatch.setattr(side_by_side, "MOST_ENTRIES", 2 * 6 * 650)
    made = content({"name": "fedavg"}, run={"rounds": 2}, measure={"local": 2})
    points = read_points(check(made, "a test"), ["algorithm.rate=0.01,0.2,0.3"], None)
    folders = {of.name: Folder(tmp_path / of.name) for of in points}
    run_together(points, folders, Folder(tmp_path / "programs"))
    assert len(list((tmp_path / "programs").glob("part*"))) == 2
    path = folders["rate=0.2"].path
    same_as_single(points[1].config, path, tmp_path / "single")
    paths = {name: folder.path for name, folder in folders.items()}
    assert list(contenders(paths)) == ["rate=0.01", "rate=0.2", "rate=0.3"]


def test_other_keys_are_programs_of_their_own(tmp_path):
    made = content(APFL)
    over = {"algorithm.steps": [1, 2], "algorithm.alpha": [0.2, 0.4, 0.6]}
    points = read_points(check(made, "a test"), over, None)
    found = [[point.name for point in of] for of in programs(points)]
    assert [len(of) for of in found] == [3, 3]
    assert found[1][2] == "steps=2,alpha=0.6"
    over = {"algorithm.name": ["apfl", "fedavg"]}
    with pytest.raises(ConfigError, match="unknown key"):
        read_points(check(made, "a test"), over, None)
    over = {"run.cohort": [2, 3], "run.rounds": [2, 4]}
    assert len(programs(read_points(check(made, "a test"), over, 2))) == 4


@pytest.mark.slow
def test_what_decides_by_the_value_runs_one_by_one(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise NotTogether

    monkeypatch.setattr("fedblend.runs.compare.run_together", refuse)
    made = content(APFL, run={"rounds": 1, "every": 1}, measure={"local": 1})
    found = swept(made, {"algorithm.alpha": [0.2, 0.7]}, tmp_path)
    assert found.programs == 2
    copied = tmp_path / "runs" / "alpha=0.7" / "local_checkpoint"
    assert copied.exists()


class Stop(Exception):
    """Something that ends a sweep from outside."""


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_was_killed(apfl, tmp_path):
    """While clients train alone, in the program, and while the folders are written."""
    made, out, whole = apfl
    place = tmp_path / "killed"
    for stage in ("local", "federated"):

        def on_step(name, step, stage=stage):
            if step.stage == stage and step.round:
                raise Stop

        with pytest.raises(Stop):
            swept(made, OVER, place, resume=True, on_step=on_step)
    found = swept(made, OVER, place, resume=True)
    assert found.comparison.markdown() == whole.comparison.markdown()
    (place / "runs" / "alpha=0.3" / "summary.json").unlink()
    assert swept(made, OVER, place, resume=True).programs == 1
    assert swept(made, OVER, place, resume=True).programs == 0
    for name in ("alpha=0", "alpha=0.3"):
        assert numbers(out / "runs" / name) == numbers(place / "runs" / name)


@pytest.mark.slow
def test_another_sweep_is_not_continued(apfl):
    made, out, _ = apfl
    with pytest.raises(RunError, match="holds a sweep already; --resume"):
        swept(made, OVER, out)
    other = {**made, "algorithm": {**made["algorithm"], "rate": 0.2}}
    with pytest.raises(RunError, match="alpha=0: holds a run of another config"):
        swept(other, OVER, out, resume=True)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("algorithm.alpha=0:1:0.1", np.linspace(0, 1, 11)),
        ("algorithm.rate=0.1:0.3:0.1", [0.1, 0.2, 0.3]),
        ("run.rounds=10:30:10", [10, 20, 30]),
        ("algorithm.rate=1:0:-0.5", [1, 0.5, 0]),
        ("algorithm.rate=1e-2,1e-1", [0.01, 0.1]),
        ("algorithm.mix=outputs,parameters", ["outputs", "parameters"]),
    ],
)
def test_the_values_of_a_key(text, values):
    key, found = parse(text)
    assert key == text.partition("=")[0]
    assert found == (values if isinstance(values[0], str) else pytest.approx(values))
    if key == "run.rounds":
        assert all(isinstance(of, int) for of in found)


@pytest.mark.parametrize(
    ("over", "wrong"),
    [
        (["algorithm.alpha"], "--over algorithm.alpha: is not KEY=FIRST:LAST:STEP"),
        (["algorithm.alpha=0:1"], "is not KEY=FIRST:LAST:STEP"),
        (["algorithm.alpha=0:x:1"], "is not KEY=FIRST:LAST:STEP"),
        (["algorithm.alpha=1:0:0.1"], "the range is empty"),
        (["algorithm.alpha=0:1:0"], "the range is empty"),
        (["algorithm.alpha=0,,1"], "has an empty value"),
        (["algorithm.alpha=0:1:0.0001"], "has 10001 values, 1000 at most"),
        (
            ["algorithm.alpha=0.1:1:0.1", "run.rounds=1:200:1"],
            "2000 runs, 1000 at most",
        ),
        (["algorithm.alpha=0:2:0.5"], "a config: algorithm.alpha: 1.5 is not in"),
        (["algorithm.alhpa=0.1,0.2"], "unknown key; did you mean 'alpha'"),
        (["algorithm.alpha=high,low"], 'algorithm.alpha: "high" is not a number'),
        (["data.clients=5,6"], "cannot be swept; every value runs on the same"),
        (["run.seed=1,2"], "cannot be swept; --seeds N"),
        (["algorithm.alpha=0.5,0.5"], "alpha=0.5 occurs twice"),
        (["algorithm.alpha=0.1", "algorithm.alpha=0.2"], "the same key twice"),
        (["algorithm.rate.x=1,2"], "rate is 0.1; it is not a table"),
        ([], "nothing to sweep over"),
    ],
)
def test_a_wrong_grid_is_refused_in_one_line(over, wrong, tmp_path):
    with pytest.raises(ConfigError) as error:
        swept(content(APFL), over, tmp_path)
    assert wrong in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_grid_is_a_product():
    points = grid(
        content(APFL),
        {"algorithm.alpha": [0.1, 0.2], "algorithm.rate": [1.0]},
        "a test",
        None,
    )
    assert [point.name for point in points] == ["alpha=0.1,rate=1", "alpha=0.2,rate=1"]
    assert points[1].config.name == "tiny alpha=0.2,rate=1"


PERSONAL = {"rate": 0.1, "steps": 3, "batch_size": 4}
OTHERS = {
    "algorithm.lam": {"name": "ditto", "lam": 0.5, "personal": PERSONAL},
    "algorithm.personal.rate": {"name": "ditto", "lam": 0.5, "personal": PERSONAL},
    "algorithm.mu": {"name": "fedprox", "mu": 0.1},
    "algorithm.server.rate": {
        "name": "fedopt",
        "server": {"name": "adam", "rate": 0.01},
    },
    "algorithm.inner_rate": {"name": "perfedavg", "inner_rate": 0.1},
    "algorithm.alpha_rate": {"name": "apfl", "alpha": 0.5, "alpha_rate": 0.1},
    "algorithm.held_out": {"name": "apfl", "alpha": 0.5, "held_out": 0.2},
    "algorithm.rate": {
        "name": "fedavg",
        "schedule": {"unit": "round", "name": "exponential", "decay": 0.9},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("key", OTHERS)
def test_other_numbers_run_together_or_one_by_one(key, tmp_path):
    made = content(OTHERS[key], measure={"local": False})
    found = swept(made, {key: [0.1, 0.3]}, tmp_path / "out")
    assert found.programs == (2 if key == "algorithm.held_out" else 1)
    point = found.points[1]
    path = tmp_path / "out" / "runs" / point.name
    same_as_single(point.config, path, tmp_path / "single")
