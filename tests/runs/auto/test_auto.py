# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fb.auto`` from a table to a verdict: where the truth is known it is found."""

import csv

import numpy as np
import pandas as pd
import pytest

import fedblend as fb
from fedblend.cli import main
from fedblend.config.config import load
from fedblend.data.dataset import DataError
from fedblend.errors import InputError, RunError
from fedblend.report.page.content import page_content
from fedblend.runs import run_folder
from fedblend.runs.auto import candidates, comparison, contest, verdict
from fedblend.runs.auto.comparison import Screen
from fedblend.runs.model_card import model_card

SLOPE = np.array([2.0, -1.5, 1.0, 0.5, -0.5, 0.3])


def columns(clients=30, rows=24, sign=lambda client: 1, noise=False, seed=0):
    """A table of sites whose outcomes follow a logistic model, or nothing."""
    draw = np.random.default_rng(seed)
    inputs = draw.normal(size=(clients * rows, len(SLOPE)))
    site = np.repeat(np.arange(clients), rows)
    signs = np.array([sign(client) for client in range(clients)])[site]
    odds = 0 * signs if noise else signs * (inputs @ SLOPE)
    outcome = draw.random(len(site)) < 1 / (1 + np.exp(-odds))
    return {
        "site": np.array([f"site {number}" for number in site]),
        **{f"x{place}": values.round(4) for place, values in enumerate(inputs.T)},
        "outcome": np.where(outcome, "yes", "no"),
    }


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A comparison of few alike rows, killed after FedAvg, then continued."""
    out = tmp_path_factory.mktemp("auto") / "out"
    table, lines = columns(), []

    def stop():
        if lines and "FedAvg" in lines[-1]:
            raise KeyboardInterrupt

    asked = {"client": "site", "target": "outcome", "out": out}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "SPLITS", 3)
        with pytest.raises(KeyboardInterrupt):
            fb.auto(table, **asked, screen=Screen(lines.append, stop))
        begun = len(lines)
        found = fb.auto(table, **asked, screen=Screen(lines.append))
    return found, lines[:begun], lines[begun:], asked


def test_few_alike_rows_are_better_together(interrupted):
    found = interrupted[0]
    assert found.deploy == "fedavg"
    assert found.verdict[0].startswith("Deploy FedAvg")
    assert len(found.verdict) == 3


def test_interrupted_comparison_continues(interrupted):
    """Settings that were found before are not looked for again."""
    _, before, after, _ = interrupted
    assert any("local only: test log loss" in line for line in before)
    assert not any("own intercepts: test log loss" in line for line in before)
    assert any("own intercepts: test log loss" in line for line in after)


def test_says_what_it_sees(interrupted):
    said = "\n".join(interrupted[1])
    assert "720 rows of 30 clients, 24 to 24 each" in said
    assert "2 classes" in said and "by log loss" in said
    # With what was seen, such as bounds that were read as numbers.
    assert "  x0: numbers, -" in said and "; standardized (mean" in said
    assert "and 3 splits" in said
    (first,) = [line for line in interrupted[1] if line.startswith("first answer")]
    assert ": Deploy FedAvg" in first


def test_folder_is_complete(interrupted):
    folder = interrupted[0].folder
    with (folder / "results.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert [*rows] == [one.name for one in comparison.CANDIDATES]
    assert float(rows["fedavg"]["mean_gain"]) > 0
    config = load(folder / "config.toml")
    assert config.algorithm.name == "hierarchical" and config.run.seed == [0, 1, 2]
    assert config.algorithm.model_dump()["level"] == 0
    assert interrupted[0].verdict[0][:30] in (folder / "report.html").read_text()


def test_tables_of_clients_are_those_of_the_table(interrupted):
    """Rows and shares of every client; what each gains is the mean of the verdict."""
    folder, table = interrupted[0].folder, columns()
    clients = run_folder.read_table(folder / "clients.csv")
    for row in clients:
        here = table["site"] == row["client"]
        assert int(row["rows"]) == here.sum()
        yes = (table["outcome"][here] == "yes").mean()
        assert float(row["target"]) == pytest.approx(yes)
    gained = np.mean([float(row["gain"]) for row in clients])
    state = run_folder.read_json(folder / "auto.json")
    assert gained == pytest.approx(state["findings"]["mean_gain"][0])
    assert state["worth"]["low"] <= state["worth"]["times"] <= state["worth"]["high"]
    assert len(run_folder.read_table(folder / "why.csv")) == len(clients)
    effects = run_folder.read_table(folder / "effects.csv")[1:]
    assert [row["input"][:7] for row in effects] == [f"x{i}, per" for i in range(6)]


def test_runs_have_the_scores_of_the_verdict(interrupted):
    """Rounds end at the models that were solved for with all rows in one place."""
    folder = interrupted[0].folder
    state = run_folder.read_json(folder / "auto.json")
    for name in ("local_only", "fedavg"):
        summary = run_folder.read_json(folder / "runs" / name / "summary.json")
        tested = [run["measures"]["test"]["personal"] for run in summary["runs"]]
        scores = np.mean([one["log_loss"]["mean"] for one in tested])
        assert scores == pytest.approx(state["methods"][name]["test"], rel=1e-4)


def test_folder_of_a_method_has_training_alone_as_tuned(interrupted):
    """The run of local only, and what FedAvg's folder compares with, are the same."""
    runs = interrupted[0].folder / "runs"
    tables = {}
    for name in ("local_only", "fedavg"):
        with (runs / name / "clients.csv").open() as file:
            tables[name] = list(csv.DictReader(file))
    for alone, together in zip(tables["local_only"], tables["fedavg"], strict=True):
        assert alone["test_personal_log_loss"] == together["test_local_log_loss"]


def test_page_and_files_judge_by_the_criterion(interrupted):
    """The page, harm.csv and the verdict speak of one metric, and of the same names."""
    folder = interrupted[0].folder
    metrics = load(folder / "config.toml").measure.metrics
    assert metrics and metrics[0] == "log_loss"
    with (folder / "runs" / "fedavg" / "harm.csv").open() as file:
        assert "personal_log_loss" in next(csv.reader(file))
    content = page_content([folder])
    assert content["verdict"] == interrupted[0].verdict
    (methods,) = (one for one in content["sections"] if one["id"] == "methods")
    rows = methods["blocks"][0]["rows"]
    assert rows[0][0] == "FedAvg" and len(rows) == len(comparison.CANDIDATES) + 1


def test_a_page_that_is_gone_is_written_again(interrupted):
    found, *_, asked = interrupted
    (found.folder / "report.html").unlink()
    fb.auto(columns(), **asked, quiet=True)
    assert (found.folder / "report.html").is_file()


def test_finished_comparison_is_said_again(interrupted):
    found, *_, asked = interrupted
    lines = []
    again = fb.auto(columns(), **asked, screen=Screen(lines.append))
    assert again.verdict == found.verdict
    assert not any("test log loss" in line for line in lines)


def test_command_prints_methods_and_verdict(interrupted, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = interrupted[0]
    table = str(found.folder / "table.csv")
    words = ["--client", "site", "--target", "outcome", "--out", str(found.folder)]
    assert main(["auto", table, *words]) == 0
    said = capsys.readouterr()
    assert "log_loss" in said.out and "FedAvg" in said.out and "…" not in said.out
    assert found.verdict[0] in said.out and "report.html" in said.out
    assert "720 rows of 30 clients" in said.err


def test_the_folder_is_the_run_that_it_deploys(interrupted, tmp_path):
    found = interrupted[0]
    loaded = fb.load(found.folder)
    assert loaded.folder.path == found.run().folder.path
    assert loaded.folder.path == found.run("fedavg").folder.path
    assert main(["show", str(found.folder)]) == 0
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    (nothing / "auto.json").write_text('{"deploy": null, "verdict": []}')
    with pytest.raises(RunError, match="deploys nothing"):
        fb.load(nothing)


def test_models_to_deploy_are_of_all_rows_and_numbers_are_not(interrupted, capsys):
    """No score of a model on rows that it saw is written, nor in its card."""
    found = interrupted[0]
    names = {path.name for path in (found.folder / "deployed").iterdir()}
    assert names == {
        *("model.safetensors", "personal.safetensors", "preprocessing.json")
    }
    said = "The deployed model is trained on all 720 rows"
    assert said in str(page_content([found.folder]))
    assert main(["show", str(found.folder)]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    deployed, kept = fb.load(found.folder), found.run("fedavg")
    assert deployed.personal(3).bias != kept.personal(3).bias
    fitted, first = deployed.preprocessing(), columns()["x0"]
    assert fitted is not None
    assert fitted.fitted[0].mean == pytest.approx(first.mean())
    assert fitted.fitted[0].deviation == pytest.approx(first.std())
    card = model_card(deployed, 3, 0, "model", "0")
    score = float(kept.clients(0)[3]["test_personal_log_loss"])
    assert "trained on all rows" in card and "| train rows | 24 |" in card
    assert f"| log_loss | {score:.4f} |" in card and "test rows |" not in card
    assert "| trained without these rows |" in card and "this model |" not in card
    with pytest.raises(InputError, match="seed: 1 is not a seed"):
        deployed.personal(3, seed=1)


def test_another_table_needs_another_folder(interrupted):
    with pytest.raises(InputError, match="another sha256"):
        fb.auto(columns(seed=1), **interrupted[3])


def test_models_of_clients_are_there(interrupted):
    found = interrupted[0]
    assert found.run("fedavg").personal("site 3").weight.shape == (1, 6)
    assert found.table[0]["method"] == "local_only"
    rows = {name: values[:5] for name, values in columns().items()}
    assert set(found.predict(rows, client="site 3")) <= {"yes", "no"}
    assert "Deploy FedAvg" in repr(found)
    with pytest.raises(InputError, match="there is no shared model"):
        found.run("local_only").predict(rows, shared=True)
    with pytest.raises(InputError, match="'flix' has no run; there is fedavg"):
        found.run("flix")


@pytest.mark.parametrize(
    ("change", "asked", "said"),
    [
        ({}, {"client": "hospital"}, "hospital"),
        ({}, {"target": "death"}, "death"),
        ({"outcome": np.array(["yes"] * 720)}, {}, "all 720 targets are yes"),
        ({"site": np.array(["one"] * 720)}, {}, "2 clients or more"),
        ({"outcome": np.full(720, 1.5)}, {}, "same in all rows"),
        ({"site": np.arange(720)}, {}, "none of the 720 clients has 4 rows"),
        ({"outcome": np.r_[1e300, np.ones(719) / 3]}, {}, "a target is 1e.300"),
        (
            {"outcome": np.array([f"code {row % 300}" for row in range(720)])},
            {},
            "outcome: 300 classes in 720 rows, most of them with fewer than 5",
        ),
    ],
)
def test_bad_tables_are_one_line(change, asked, said, tmp_path):
    given = {"client": "site", "target": "outcome", **asked}
    with pytest.raises(InputError, match=said) as error:
        fb.auto({**columns(), **change}, **given, out=tmp_path / "out")
    assert "\n" not in str(error.value)


def test_no_table_is_one_line(tmp_path, capsys):
    words = ["auto", str(tmp_path / "no.csv"), "--client", "a", "--target", "b"]
    assert main(words) == 2
    assert "no such file" in capsys.readouterr().err
    with pytest.raises(DataError, match="is no path"):
        fb.auto(3, client="a", target="b", out=tmp_path / "out")


def test_a_method_that_there_is_no_time_for_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison.AutoComparison, "_run", lambda self, seeds: None)
    monkeypatch.setattr(comparison.AutoComparison, "_write", lambda self: None)
    path = tmp_path / "table.csv"
    pd.DataFrame(columns(4)).to_csv(path, index=False)
    request = candidates.Request(path, "site", "outcome")
    found = comparison.AutoComparison(request, tmp_path / "out", 1e-6, Screen())
    what, *_ = found.complete()["verdict"]
    assert "There was no time for" in what and "which may be better" in what
    assert "FLIX" in what


def test_a_folder_without_a_verdict_is_read_again(tmp_path, monkeypatch):
    """There is no page then, and none is looked for."""
    monkeypatch.setattr(comparison, "SPLITS", 3)
    monkeypatch.setattr(contest, "find_untrained", lambda *_: {"local_only": "a test"})
    asked = {"client": "site", "target": "outcome", "out": tmp_path / "out"}
    for _ in range(2):
        (what,) = fb.auto(columns(4), **asked, minutes=1e-6, quiet=True).verdict
        assert "No run, configuration or page is written" in what
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"auto.json", "results.csv", "table.csv"}


def test_a_leak_is_said_before_training_and_on_top(tmp_path):
    """A copy of the target: on the console first, and dropped unless it is kept."""
    table, lines = columns(6), []
    table["discharge"] = np.where(table["outcome"] == "yes", "dead", "alive")
    path = tmp_path / "table.csv"
    pd.DataFrame(table).to_csv(path, index=False)
    request = candidates.Request(path, "site", "outcome")
    found = comparison.AutoComparison(
        request, tmp_path / "out", 1, Screen(lines.append)
    )
    found.judge()
    assert lines[0].startswith("warning: discharge: is the target in other words")
    assert lines[0].endswith("; dropped")
    assert found.state["warnings"] == [lines[0].removeprefix("warning: ")]
    assert found.state["seen"]["inputs"] == 6
    kept = candidates.Request(path, "site", "outcome", keep=("discharge",))
    again = comparison.AutoComparison(kept, tmp_path / "other", 1, Screen())
    again.judge()
    assert again.state["seen"]["inputs"] == 8
    assert again.state["warnings"][0].endswith("left in, look at it")


@pytest.mark.parametrize(("wild", "warned"), [(1e6, True), (6.0, False)])
def test_a_target_of_one_wild_value_is_warned_about_first(wild, warned, tmp_path):
    """Its squared errors are those of this row; negative ones have no logarithm."""
    table, lines = columns(4), []
    outcome = np.random.default_rng(0).normal(size=len(table["site"]))
    table["outcome"] = np.r_[outcome[:-1], wild]
    path = tmp_path / "table.csv"
    pd.DataFrame(table).to_csv(path, index=False)
    request = candidates.Request(path, "site", "outcome")
    found = comparison.AutoComparison(
        request, tmp_path / "out", 1, Screen(lines.append)
    )
    found._look(found._build("fedavg", [0], candidates.VALIDATION))
    assert ("1e+06" in lines[0] and "outcome: one of 96 rows" in lines[0]) == warned


def test_inputs_are_the_columns_to_predict_from(tmp_path):
    path = tmp_path / "table.csv"
    pd.DataFrame(columns(6)).to_csv(path, index=False)
    request = candidates.Request(path, "site", "outcome", inputs=("x0", "x1"))
    found = comparison.AutoComparison(request, tmp_path / "out", 1, Screen())
    found.judge()
    assert found.state["seen"]["inputs"] == 2


def test_too_many_coefficients_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "MOST_ENTRIES", 5)
    with pytest.raises(InputError, match="at most 5") as error:
        fb.auto(columns(4), client="site", target="outcome", out=tmp_path / "out")
    assert "--drop" in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "said"),
    [
        (columns(20, 40), "Deploy FedAvg"),
        (columns(12, 300, sign=lambda client: (-1) ** client), "Train alone"),
        (columns(12, 100, noise=True), "Deploy nothing yet"),
    ],
    ids=["alike", "opposite", "noise"],
)
def test_truth_is_found_by_all_methods(table, said, tmp_path):
    asked = {"client": "site", "target": "outcome", "out": tmp_path / "out"}
    assert fb.auto(table, **asked, minutes=10).verdict[0].startswith(said)


@pytest.mark.slow
def test_one_unlike_client_is_named(tmp_path):
    table = columns(20, 80, sign=lambda client: -1 if client == 7 else 1)
    asked = {"client": "site", "target": "outcome", "out": tmp_path / "out"}
    found = fb.auto(table, **asked, minutes=10)
    assert found.verdict[0].startswith("Deploy")
    assert "site 7" in found.verdict[1] and "site 6" not in found.verdict[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flix", "hierarchical"])
@pytest.mark.parametrize("kind", ["classes", "regression"])
def test_every_run_has_the_scores_of_the_verdict(kind, name, tmp_path, monkeypatch):
    """Whichever method is the candidate: rounds end at the models of the verdict."""
    monkeypatch.setattr(comparison, "SPLITS", 3)
    usual = verdict.choose

    def choose(validated, constant):
        # The first answer and training alone choose among other methods.
        return (name, [name]) if name in validated else usual(validated, constant)

    monkeypatch.setattr(verdict, "choose", choose)
    table = columns(12, 60)
    score = sum(table[f"x{place}"] * slope for place, slope in enumerate(SLOPE))
    score = score + np.random.default_rng(1).normal(size=np.size(score))
    if kind == "regression":
        table["outcome"] = score.round(4)
    else:
        table["outcome"] = np.array(["low", "middle", "high"])[
            np.digitize(score, [-1.5, 1.5])
        ]
    asked = {"client": "site", "target": "outcome", "out": tmp_path / "out"}
    found = fb.auto(table, **asked, minutes=10, quiet=True)
    state = run_folder.read_json(found.folder / "auto.json")
    kept = {path.name for path in (found.folder / "runs").iterdir()}
    assert state["kind"] == kind and kept == {"local_only", "fedavg", name}
    for method in kept:
        runs = found.run(method).summary["runs"]
        tested = [run["measures"]["test"]["personal"] for run in runs]
        for metric, value in state["methods"][method]["metrics"].items():
            mean = np.mean([one[metric]["mean"] for one in tested])
            assert mean == pytest.approx(value, rel=1e-5), (method, metric)
