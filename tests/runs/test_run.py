# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Running configurations: every algorithm, the folder, going on, refusing."""

import csv
import io
import json

import jax
import numpy as np
import pytest
from rich.console import Console

import example_arguments as examples
import fedblend as fb
from fedblend.config.build import build
from fedblend.config.config import check, dump, load
from fedblend.errors import CheckpointError, ConfigError, RunError
from fedblend.registry import ALGORITHMS
from fedblend.report.measures import training_alone
from fedblend.report.terminal import show
from fedblend.report.verdict import sentences
from fedblend.runs import results, run_folder
from fedblend.runs.run import Step, run_config, stages
from fedblend.runs.run_folder import Folder
from fedblend.simulation import checkpoint, train_alone
from fedblend.simulation.serialize import unpack
from fedblend.simulation.simulate import simulate

LBFGS = {"solver": "lbfgs", "most": 3, "tolerance": 1e-6}
OWN = {
    "fedopt": {"server": {"name": "adam", "rate": 0.01}},
    "fedprox": {"mu": 0.1},
    "svrg": {"refresh": 0.5},
    "fomaml": {"server": 1.0, "batch_size": "all"},
    "reptile": {"server": 1.0},
    "perfedavg": {"inner_rate": 0.1},
    "pfedme": {"lam": 1.0, "inner_rate": 0.1, "inner_steps": 3},
    "apfl": {"alpha": 0.5, "held_out": 0.2},
    "apfl_agnostic": {"alpha": 0.5, "q_rate": 0.01},
    "ditto": {"lam": 0.5, "personal": {"rate": 0.1, "steps": 3, "batch_size": 4}},
    "finetune": {"finetune": {"rate": 0.1, "epochs": 1, "batch_size": "all"}},
    "l2gd": {"lam": 0.5},
    "fedrep": {"head": ["bias"], "head_steps": 2},
    "agnostic": {"q_rate": 0.01},
    "mapper": {"grid": 3},
    "flix": {"alpha": 0.5, "steps": 1, "personal": LBFGS},
    "flix_local_steps": {
        "alpha": [0.5, 0.6, 0.7, 0.8, 0.9, 1.0],
        "server": {"name": "adam", "rate": 0.01},
        "mix": "outputs",
        "personal": {"solver": "sgd", "rate": 0.1, "steps": 2, "batch_size": 4},
    },
}
OWN |= {name: examples.options(name) for name in ALGORITHMS if name not in OWN}
SHORT = {"rounds": 2, "every": 1}
LITTLE = {"splits": ["train"], "metrics": ["loss"]}
pytestmark = pytest.mark.usefixtures("compiled")


def comparable(path):
    """The rows and arrays of a run, less times and the name of the files on disk."""
    rows = run_folder.read_rows(Folder(path))
    arrays, _ = unpack((path / "checkpoint").read_bytes())
    arrays.pop("['store']['run']", None)
    return (
        [{k: v for k, v in row.items() if k != "seconds"} for row in rows],
        {name: array.tobytes() for name, array in arrays.items()},
        (path / "clients.csv").read_bytes(),
    )


class Stop(Exception):
    """Something that ends a run from outside."""


def run_with_stops(config, path):
    """Run, stopped after every step of the algorithm, and once before in each stage."""
    seen: set[Step] = set()

    def stop(step):
        early = step.stage != "federated" and step.round not in (0, 4)
        if step not in seen and not early:
            seen.add(step)
            raise Stop

    while True:
        try:
            return run_config(config, path, resume=True, on_step=stop)
        except Stop:
            continue


QUICK = ("fedavg", "finetune", "apfl", "flix", "partial", "fedem")
"""One algorithm of each kind of state that a personal model is made of."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in examples.DISTINCT
    ],
)
def test_every_algorithm_runs_and_its_personal_models_are_kept(
    name, tiny, tmp_path, monkeypatch
):
    tiny |= examples.tables(name)
    tiny["algorithm"] |= {"name": name, **OWN[name]}
    tiny["run"] |= SHORT | ({"cohort": 6} if examples.needs_everyone(name) else {})
    tiny["measure"] |= LITTLE
    runs, write = [], run_folder.write_personal_models

    def written(folder, run, *more):
        runs.append(run)
        return write(folder, run, *more)

    monkeypatch.setattr(run_folder, "write_personal_models", written)
    summary = run_config(check(tiny, "here"), tmp_path / "out")
    (result,) = summary["runs"]
    assert result["round"] == 2
    saved = fb.load(tmp_path / "out")
    for client in range(6):
        there, here = saved.personal(client), runs[0].personal(client)
        assert jax.tree.structure(there) == jax.tree.structure(here)
        pairs = zip(jax.tree.leaves(there), jax.tree.leaves(here), strict=True)
        assert all(a.tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    before = run_folder.read_rows(Folder(tmp_path / "out"))[0]
    first, last = (
        row["measures"]["train"]["personal"]["loss"]["mean"] for row in (before, result)
    )
    assert last < first


def test_local_models_that_were_not_found_are_reported(tiny, tmp_path):
    tiny["algorithm"] |= {"name": "flix", **OWN["flix"]}
    tiny["run"] |= SHORT
    tiny["measure"] |= LITTLE
    warned: list[str] = []
    summary = run_config(
        check(tiny, "here"), tmp_path / "out", on_warning=warned.append
    )
    assert summary["local_models"]["clients_above_tolerance"] == 6
    worst = summary["local_models"]["worst_gradient_norm"]
    assert worst > 1e-6
    with open(tmp_path / "out" / "clients.csv") as file:
        norms = [float(c["local_model_gradient_norm"]) for c in csv.DictReader(file)]
    assert len(norms) == 6
    assert max(norms) == pytest.approx(worst)
    assert "the local models of 6 clients were not found" in warned[-1]
    assert summary["warnings"] == warned


def test_local_models_that_were_not_trained_are_reported(tiny):
    """Steps that are far too long leave the initial model the best one seen."""
    personal = {"solver": "sgd", "rate": 1e9, "steps": 1, "batch_size": 4, "turns": 1}
    tiny["algorithm"] |= {"name": "flix", "alpha": 0.5, "steps": 1}
    tiny["algorithm"]["personal"] = personal
    config = check(tiny, "here")
    built = build(config)
    start = (built.algorithm, built.model.init, built.federated_data, built.key)
    run = simulate(*start, rounds=0).complete()
    _, summary, (warning,) = results.diagnostics(run, config.algorithm)
    assert summary["local_models"]["clients_not_trained"] == 6
    assert warning.startswith("the local models of 6 clients (0, 1, 2, 3, 4, ...) ")


@pytest.mark.slow
def test_training_alone_is_as_long_as_asked(tiny, tmp_path):
    tiny["measure"] |= {"local": 7}
    steps: list[Step] = []
    summary = run_config(check(tiny, "here"), tmp_path / "out", on_step=steps.append)
    assert [s for s in steps if s.stage != "federated"][-1] == Step("local", 7, 7)
    assert "trial" not in {step.stage for step in steps}
    assert summary["runs"][0]["alone"]["rounds"] == 7
    assert summary["runs"][0]["alone"]["chosen_on"] is None
    assert training_alone(summary["runs"][0]["alone"]) == "7 rounds, as asked"


@pytest.mark.slow
def test_training_alone_has_its_own_best_round_whatever_the_cohort(tiny, tmp_path):
    tiny["data"] |= {"validation": 0.25}
    tiny["run"]["cohort"] = 1
    tiny["measure"] |= {"local": True, "local_rate": "same", "splits": ["validation"]}
    summary = run_config(check(tiny, "here"), tmp_path / "out")
    (one,) = summary["runs"]
    printed = one["measures"]["validation"]["local"]["accuracy"]["mean"]
    tiny["algorithm"]["name"] = "local_only"
    rounds = one["alone"]["rounds"]
    tiny["run"] |= {"rounds": max(rounds, 40), "every": 1, "cohort": 6}
    run_config(check(tiny, "here"), tmp_path / "alone")
    rows = run_folder.read_rows(Folder(tmp_path / "alone"))
    reached = [
        row["measures"]["validation"]["personal"]["accuracy"]["mean"] for row in rows
    ]
    assert printed >= max(reached) - 0.01
    assert reached[1] < max(reached) - 0.2  # 4 rounds with 1 of 6 clients each
    assert printed == reached[rounds]
    with open(tmp_path / "out" / "clients.csv") as file:
        assert {float(c["local_rounds"]) for c in csv.DictReader(file)} == {rounds}
    assert training_alone(one["alone"]).startswith(f"{rounds} rounds, the best of")
    text = io.StringIO()
    show(summary, Console(file=text, width=99))
    assert f"local, training alone: {rounds} rounds, the best of" in text.getvalue()


@pytest.mark.slow
def test_training_alone_that_is_cut_short_is_reported(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(train_alone, "MOST", 1)
    monkeypatch.setattr(train_alone, "LITTLE", -1.0)
    tiny["measure"] |= {"local": True, "local_rate": "same", "metrics": ["loss"]}
    warned: list[str] = []
    summary = run_config(
        check(tiny, "here"), tmp_path / "out", on_warning=warned.append
    )
    assert summary["warnings"] == warned
    assert "training alone still improved after 22 rounds" in warned[-1]


@pytest.mark.slow
@pytest.mark.parametrize("of_splits", [False, True], ids=["rate", "theory of splits"])
def test_a_tuned_rate_of_training_alone_is_reported(
    of_splits, tiny, tmp_path, monkeypatch
):
    """A rate that is too small, and the theory's, of two seeds with own splits."""
    monkeypatch.setattr(train_alone, "MOST", 1)
    monkeypatch.setattr(train_alone, "TRIES", 1)
    tiny["run"]["seed"] = [3, 5]
    tiny["algorithm"]["rate"] = 0.0003
    tiny["measure"] |= {"local": True, "metrics": ["loss"]}
    if of_splits:
        tiny["measure"]["local_rate"] = "tune"
        tiny["model"]["l2"] = 0.1
        tiny["run"]["cohort"] = 6
        tiny["algorithm"] = {"name": "flix", "rate": "theory", "alpha": 0.5, "steps": 1,
                             "batch_size": "all"}  # fmt: skip
    warned: list[str] = []
    summary = run_config(check(tiny, "here"), tmp_path / "a", on_warning=warned.append)
    rate = summary["runs"][0]["alone"]["rate"]
    assert rate == 10 or (of_splits and rate in train_alone.FACTORS)
    at = "" if rate == 1 else f" at {rate:.3g} times the rate"
    assert f" rounds{at}, the best of" in training_alone(summary["runs"][0]["alone"])
    again = [line for line in warned if "training alone still improved" in line]
    assert len(again) <= 1  # once for all seeds


def test_a_rate_is_tuned_once_and_stays_in_the_checkpoint(tiny, tmp_path, monkeypatch):
    """By default; a run that goes on, and one that shares it, take it from there."""
    asked = iter([(3.0, 7.0)])
    monkeypatch.setattr(train_alone, "tune_rate", lambda *arguments: next(asked))
    tiny["measure"] |= {"local": True, "metrics": ["loss"]}
    config, first, second = check(tiny, "here"), tmp_path / "first", tmp_path / "second"

    def stop(step):
        raise Stop

    with pytest.raises(Stop):
        run_config(config, first, on_step=stop)
    second.mkdir()
    old, new = (Folder(at).checkpoint("trial") for at in (first, second))
    checkpoint.copy(old, new, {})
    built = build(config)
    for place in (first, second):
        local = stages(config, built, Folder(place), "loss")["local"]
        assert local.budget is not None
        assert (local.budget.rate, local.earlier_seconds) == (3, 7)


def test_the_folder(tiny, tmp_path):
    tiny["measure"] |= {"local": True, "local_rate": "same"}
    tiny["measure"]["metrics"] = ["loss", "recall@3"]
    tiny["run"]["seed"] = [3, 5]
    out = tmp_path / "out"
    config = check(tiny, "here")
    steps: list[Step] = []
    summary = run_config(config, out, on_step=steps.append)
    rounds = summary["runs"][0]["alone"]["rounds"]
    assert [s for s in steps if s.stage == "local"][-1] == Step("local", rounds, rounds)
    assert steps[0].stage == "trial"
    assert steps[-1] == Step("federated", 4, 4)
    assert load(out / "config.toml") == config
    assert summary == json.loads((out / "summary.json").read_text())
    assert summary["warnings"] == []
    assert [one["seed"] for one in summary["runs"]] == [3, 5]
    rows = run_folder.read_rows(Folder(out))
    assert [(r["round"], r["seed"]) for r in rows] == [
        (r, s) for r in (0, 2, 4) for s in (3, 5)
    ]
    assert set(rows[-1]["measures"]["test"]) == {"shared", "personal", "local"}
    with open(out / "clients.csv") as file:
        clients = list(csv.DictReader(file))
    assert len(clients) == 12
    assert int(clients[0]["train"]) > int(clients[0]["test"]) > 0
    assert {"test_local_loss", "test_personal_recall@3"} <= set(clients[0])
    bits = sum(int(c["bits_up"]) for c in clients if c["seed"] == "3")
    assert bits == summary["runs"][0]["bits"]["up"]
    with open(out / "harm.csv") as file:
        harmed = list(csv.DictReader(file))
    assert len(harmed) == 6
    assert float(harmed[0]["harm"]) == max(float(row["harm"]) for row in harmed)
    counted = summary["harmed"]["test"]["recall@3"]["than_local"]["count"]
    assert counted == sum(row["harmed"] == "yes" for row in harmed)
    for seed in (3, 5):
        arrays, words = unpack((out / f"model-seed{seed}.safetensors").read_bytes())
        assert arrays[".weight"].shape == (10, 64)
        assert words["seed"] == str(seed)


def test_what_is_not_finite_is_null(tiny, tmp_path):
    work = {"rate": 1e38, "steps": 2, "batch_size": 4}
    tiny["algorithm"] |= {"name": "finetune", "finetune": work}
    tiny["run"]["rounds"] = 2
    tiny["measure"] |= {"local": 2, "splits": ["test"], "metrics": ["loss"]}
    summary = run_config(check(tiny, "here"), tmp_path / "out")
    (line,) = sentences(summary)[1]
    assert line.startswith("The models of 6 clients are broken")
    again = run_config(check(tiny, "here"), tmp_path / "out", resume=True)
    assert again == summary
    for name in ("summary.json", "metrics.jsonl"):
        text = (tmp_path / "out" / name).read_text()
        assert "NaN" not in text
        assert "Infinity" not in text


def test_double_precision(tiny, tmp_path):
    tiny["run"] |= {"precision": "float64", "rounds": 1}
    run_config(check(tiny, "here"), tmp_path / "out")
    arrays, _ = unpack((tmp_path / "out" / "model.safetensors").read_bytes())
    assert arrays[".weight"].dtype == np.float64


@pytest.mark.slow
@pytest.mark.parametrize(
    "store",
    [
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("device", "host")),
        "disk",
    ],
)
def test_stopped_and_gone_on_is_the_same_run(store, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(train_alone, "MOST", 1)
    tiny["algorithm"]["name"] = "scaffold"
    tiny["run"] |= {"store": store, "dropout": 0.2}
    # How long training alone takes is tried alike whatever the store.
    tiny["measure"] |= {"local": True if store == "disk" else 2, "metrics": ["loss"]}
    config = check(tiny, "here")
    run_config(config, tmp_path / "whole")
    run_with_stops(config, tmp_path / "stopped")
    assert comparable(tmp_path / "stopped") == comparable(tmp_path / "whole")


def test_a_finished_run_is_left_alone(tiny, copy_run):
    config, out = check(tiny, "here"), copy_run
    summary = json.loads((out / "summary.json").read_text())
    written = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert run_config(config, out, resume=True) == summary
    assert written == {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with pytest.raises(RunError, match="holds a run already; --resume continues"):
        run_config(config, out)
    tiny["algorithm"]["rate"] = 0.2
    with pytest.raises(RunError, match=r"algorithm\.rate: 0\.1 there, 0\.2 here"):
        run_config(check(tiny, "here"), out, resume=True)


def test_a_damaged_config_in_the_folder(tiny, tmp_path):
    (tmp_path / "config.toml").write_text("version = ")
    with pytest.raises(RunError, match=r"config\.toml: not valid TOML"):
        run_config(check(tiny, "here"), tmp_path, resume=True)


def test_changed_data_is_noticed(tiny, copy_run):
    config, out = check(tiny, "here"), copy_run
    (out / "summary.json").unlink()
    origin = json.loads((out / "run.json").read_text())
    origin["data"]["sha256"] = "0"
    (out / "run.json").write_text(json.dumps(origin))
    with pytest.raises(RunError, match="the data changed since the run began: sha256"):
        run_config(config, out, resume=True)


def test_the_checkpoint_of_another_config(tiny, copy_run):
    tiny["algorithm"]["name"] = "scaffold"
    other = check(tiny, "here")
    (copy_run / "config.toml").write_text(dump(other))
    (copy_run / "summary.json").unlink()
    with pytest.raises(CheckpointError, match=r"another config: algorithm\.name"):
        run_config(other, copy_run, resume=True)


def test_what_simulate_refuses_names_the_key(tiny, tmp_path):
    tiny["run"]["cohort"] = 7
    with pytest.raises(ConfigError) as caught:
        run_config(check(tiny, "here"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    line = "run.cohort: 7 is not between 1 and the 6 clients there are"
    assert str(caught.value) == line
    tiny["run"]["cohort"] = 3
    tiny["measure"]["splits"] = ["validation"]
    with pytest.raises(ConfigError, match=r"^measure\.splits: 'validation' is not one"):
        run_config(check(tiny, "here"), tmp_path / "out")


def test_long_measuring_is_said_once(tiny, write, tmp_path, monkeypatch):
    monkeypatch.setattr("fedblend.runs.run.LONG", 0.0)
    said: list[str] = []
    found = run_config(load(write(tiny)), tmp_path, on_warning=said.append)
    (line,) = [text for text in said if text.startswith("measuring took")]
    assert "every 2 rounds" in line and "measure.on" in line
    assert found["runs"][0]["measure_seconds"] > 0
