# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Comparing configurations: one federation, one training alone, tables."""

import copy
import csv
import shutil
from typing import Any

import numpy as np
import pytest

import fedblend as fb
from fedblend.config.config import check, dump
from fedblend.errors import ConfigError, RunError
from fedblend.runs import per_row_scores, run_folder
from fedblend.runs.compare import compare
from fedblend.runs.paired import ALONE
from fedblend.runs.run import run_config
from fedblend.runs.run_folder import Folder
from fedblend.simulation.serialize import unpack
from tiny_config import TINY

pytestmark = pytest.mark.usefixtures("compiled")


def config(name="fedavg", tables=None, **options):
    """The small configuration with two seeds and another algorithm."""
    made = copy.deepcopy(TINY)
    made["name"] = name
    made["algorithm"] = {**made["algorithm"], "name": name, **options}
    made["run"] = {**made["run"], "seed": [0, 1]}
    made["measure"] = {"local": 2}
    for key, more in (tables or {}).items():
        made[key] = {**made[key], **more}
    return check(made, "a test")


BOTH = [config(), config("apfl", alpha=0.5, learn="fixed")]
TARGET = "accuracy=0.3"


class Stop(Exception):
    """Something that ends a comparison from outside."""


@pytest.fixture(scope="module")
def made(tmp_path_factory, compiled):
    """A comparison of two methods, with the stages that ran."""
    out, steps = tmp_path_factory.mktemp("compared"), []
    patch = pytest.MonkeyPatch()
    found = compare(
        BOTH,
        out,
        target=TARGET,
        on_step=lambda name, step: steps.append((name, *step)),
    )
    patch.undo()
    return out, found, steps


def table(path):
    """The rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_referee_finds_what_the_comparison_found(made):
    """From the table of clients alone, without the rows."""
    out, found, _ = made
    asked: Any = {"method": "run", "client": "id", "score": "test_personal_accuracy"}
    judged = fb.judge(
        out / "clients.csv", baseline="fedavg", higher_is_better=True, **asked
    )
    (one,) = judged.candidates
    tested = next(
        of for of in found.differences if {of.name, of.other} == {"fedavg", "apfl"}
    )
    sign = 1 if tested.name == "apfl" else -1
    mean, *ends = tested.gain.mean
    assert one.gain == pytest.approx(sign * mean, rel=1e-4, abs=1e-9)
    ends = sorted(sign * end for end in ends)
    assert [one.low, one.high] == pytest.approx(ends, rel=1e-4, abs=1e-9)
    assert one.p == pytest.approx(tested.p, rel=1e-3)


@pytest.mark.slow
def test_training_alone_is_computed_once(made, tmp_path):
    out, found, steps = made
    own = [stage for name, stage, *_ in steps if name == "fedavg"]
    assert own.count("local") == 2
    # The second run begins where training alone has ended.
    other = [(stage, at) for name, stage, at, _ in steps if name == "apfl"]
    assert other[0] == ("local", 2) and other[1][0] == "federated"
    assert list(found.table.rows) == ["fedavg", "apfl", ALONE]
    # And has the same bits as a run by itself.
    run_config(BOTH[1], tmp_path / "single")
    for name in ("checkpoint", "local_checkpoint"):
        mine, theirs = (
            unpack((of / name).read_bytes())[0]
            for of in (out / "runs" / "apfl", tmp_path / "single")
        )
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[key], theirs[key]) for key in mine)


def test_the_tables_are_tidy(made):
    out, found, _ = made
    rows = table(out / "results.csv")
    keys = [
        tuple(row[k] for k in ("run", "seed", "split", "model", "metric"))
        for row in rows
    ]
    assert len(set(keys)) == len(keys) == 2 * 2 * 2 * 3 * 2
    summary = run_folder.read_summary(Folder(out / "runs" / "apfl"))
    (row,) = (
        of
        for of in rows
        if keys[rows.index(of)] == ("apfl", "1", "test", "local", "loss")
    )
    spread = summary["runs"][1]["measures"]["test"]["local"]["loss"]
    assert float(row["mean"]) == spread["mean"]
    assert float(row["worst_tenth"]) == spread["worst_tenth"]
    assert len(table(out / "clients.csv")) == 2 * 2 * 6
    differences = table(out / "differences.csv")
    assert [(of["run"], of["other"]) for of in differences] == [
        ("fedavg", "apfl"),
        ("fedavg", ALONE),
        ("apfl", ALONE),
    ]
    assert len(table(out / "client_differences.csv")) == 3 * 6
    assert found.differences[0].p == float(differences[0]["p"])


def test_rounds_and_bits_to_a_target(made):
    out, found, _ = made
    for row in found.target:
        rows = run_folder.read_rows(Folder(out / "runs" / row["run"]))
        own = [one for one in rows if one["seed"] == row["seed"]]
        means = [one["measures"]["test"]["personal"]["accuracy"]["mean"] for one in own]
        there = [place for place, mean in enumerate(means) if mean >= 0.3]
        assert row["reached"] == bool(there)
        at = own[there[0]] if there else {}
        for key in ("round", "bits_up", "bits_down"):
            assert row[key] == at.get(key)
    reached = [row["reached"] for row in found.target]
    assert any(reached)
    again = compare([out / "runs" / "fedavg"], out / "again", target="accuracy=0.99")
    assert "not reached" in again.markdown() and "not reached" in again.latex()
    assert [row["round"] for row in again.target] == [None, None]


@pytest.mark.slow
def test_a_killed_comparison_goes_on(made, tmp_path):
    """While clients train alone, and in the second run, that has it from the first."""
    out, _, _ = made
    place = tmp_path / "killed"
    for stop in (("fedavg", "local"), ("apfl", "federated")):

        def on_step(name, step, stop=stop):
            if (name, step.stage) == stop and step.round:
                raise Stop

        with pytest.raises(Stop):
            compare(BOTH, place, resume=True, on_step=on_step)
    compare(BOTH, place, target=TARGET, resume=True)
    for name in ("results.csv", "differences.csv", "target.csv", "table.tex"):
        assert (place / name).read_bytes() == (out / name).read_bytes()
    with pytest.raises(RunError, match="holds a comparison already; --resume"):
        compare(BOTH, place)


def test_the_rows_of_a_run_are_small_and_whole(made):
    out, _, _ = made
    saved = per_row_scores.read(Folder(out / "runs" / "apfl"))
    assert (saved.split, saved.seeds) == ("test", [0, 1])
    for seed in (0, 1):
        rows = saved.evidence.by_row[seed]["test"]["personal"]
        values = saved.evidence.measured[seed]["test"]["personal"]
        known = ~np.isnan(rows["accuracy"])
        assert (known.sum(axis=1) == saved.counts).all()
        for metric in ("accuracy", "loss"):
            means = np.nanmean(rows[metric], axis=1)
            assert means == pytest.approx(values[metric], rel=1e-5)
    # Two seeds, three models: a byte for right or wrong, four for a loss; and four for
    # the number of a row.
    size = Folder(out / "runs" / "apfl").evidence.stat().st_size
    assert size < saved.counts.sum() * 2 * (3 * 5 + 4) + 8000


def test_finished_runs_are_compared_as_they_are(made, tmp_path):
    out, found, _ = made
    again = compare(
        [out / "runs" / "fedavg", out / "runs" / "apfl"], tmp_path, target=TARGET
    )
    assert again.markdown() == found.markdown()
    assert not (tmp_path / "runs").exists()


def test_winners_of_sweeps_have_the_names_of_their_runs(made, tmp_path):
    """Folders of sweeps are named by the value alone."""
    out, found, _ = made
    places = [tmp_path / name / "rate=0.1" for name in ("fedavg", "apfl")]
    for place in places:
        shutil.copytree(out / "runs" / place.parent.name, place)
    again = compare(places, tmp_path / "out")
    assert list(again.folders) == list(found.folders) == ["fedavg", "apfl"]


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (
            config("apfl", {"data": {"test": 0.5}}, alpha=0.5),
            "data.test: 0.25 there, 0.5 here",
        ),
        (
            config("apfl", {"data": {"clients": 7}}, alpha=0.5),
            "data.clients: 6 there, 7 here",
        ),
        (config("apfl", {"run": {"seed": 1}}, alpha=0.5), "run.seed"),
    ],
)
def test_other_data_is_refused_before_anything_runs(other, key, tmp_path):
    with pytest.raises(RunError, match=r"^apfl: has other data than") as error:
        compare([config(), other], tmp_path / "out")
    assert key in str(error.value)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_compared(made, tmp_path):
    out, _, _ = made
    with pytest.raises(RunError, match="nothing to compare"):
        compare([], tmp_path)
    with pytest.raises(ConfigError, match="'fedavg' is the name of another run"):
        compare([config(), config()], tmp_path)
    with pytest.raises(RunError, match=r"summary.json"):
        compare([tmp_path], tmp_path)
    runs = [out / "runs" / "fedavg"]
    for target in ("accuracy", "accuracy=high", "=1", "accuracy=nan"):
        with pytest.raises(RunError, match=r"--target: .* is not METRIC=NUMBER"):
            compare(runs, tmp_path, target=target)
    with pytest.raises(RunError, match="--target: 'auc' was not measured; there is"):
        compare(runs, tmp_path, target="auc=1")
    with pytest.raises(RunError, match="'auc': was not measured in every run"):
        compare(runs, tmp_path, metrics=["auc"])
    with pytest.raises(ConfigError, match="--seeds: 0 is not 1 or more"):
        compare([config()], tmp_path, seeds=0)


def test_files_of_one_name_take_the_names_of_the_files(tmp_path):
    from fedblend.runs.compare import read_entries

    for stem in ("first", "second"):
        (tmp_path / f"{stem}.toml").write_text(dump(config()))
    found = read_entries([tmp_path / "first.toml", tmp_path / "second.toml"], 3)
    assert list(found) == ["first", "second"]
    second: Any = found["second"]
    assert second.run.seed == [0, 1, 2]
