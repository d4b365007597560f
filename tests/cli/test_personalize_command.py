# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend personalize``: what it prints, writes, leaves alone and refuses."""

import csv
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import fedblend as fb
from fedblend.cli import main, screen
from fedblend.config import toml
from fedblend.simulation.serialize import name_leaves, unpack

CONFIG = {
    "version": 1,
    "name": "tiny",
    "data": {
        "file": "visits.csv",
        "target": "outcome",
        "client": "hospital",
        "preprocess": "none",
        "partition": "by_key",
    },
    "model": {"name": "logistic"},
    "algorithm": {
        "name": "apfl",
        "alpha": 0.5,
        "rate": 0.3,
        "steps": 2,
        "batch_size": 4,
    },
    "run": {"rounds": 2, "every": 2},
    "measure": {"local": False, "metrics": ["accuracy"], "splits": ["test"]},
}
HEAD = ("hospital", "age", "pressure", "outcome")


def rows_of(hospital, number, flipped=False):
    """Whoever is older is ill, or the reverse."""
    ages = np.linspace(-1, 1, number)
    ill = (ages > 0) != flipped
    pairs = zip(ages.tolist(), ill.tolist(), strict=True)
    return [[hospital, age, 0.5, "ill" if bad else "well"] for age, bad in pairs]


def write(path, rows, head=HEAD):
    with Path(path).open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])


@pytest.fixture(scope="module")
def finished(tmp_path_factory, compiled):
    """A folder with a finished run."""
    place = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(screen, "compile_cache", lambda: None)
        write("visits.csv", [row for name in "ABC" for row in rows_of(name, 12)])
        Path("tiny.toml").write_text(toml.write(CONFIG))
        assert main(["run", "tiny.toml"]) == 0
    (place / "visits.csv").unlink()
    return place / "runs" / "tiny"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """An empty folder to stand in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(screen, "compile_cache", lambda: None)


def contents(folder):
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_new_clients_get_models_and_the_run_stays_as_it_was(finished, capsys):
    # Columns in another order, and one that the run does not know.
    rows = rows_of("D/1", 20, flipped=True) + rows_of("E", 2)
    turned = [[outcome, "x", age, who, p] for who, age, p, outcome in rows]
    write("new.csv", turned, ("outcome", "note", "age", "hospital", "pressure"))
    before = contents(finished)
    asked = ["--steps", "40", "--format", "json", "--out", "own.safetensors"]
    asked += ["--test", "0.5"]
    assert main(["personalize", str(finished), "--data", "new.csv", *asked]) == 0
    assert contents(finished) == before
    first, second = json.loads(capsys.readouterr().out)
    assert (first["name"], first["train"], first["test"]) == ("D/1", 10, 10)
    gain = first["personal_accuracy"] - first["shared_accuracy"]
    assert 0 < first["gain_low"] < gain <= first["gain_high"]
    assert (second["name"], second["test"], second["harmed"]) == ("E", 0, "")
    assert sorted(path.name for path in Path().glob("*.safetensors")) == [
        "own-D-1.safetensors",
        "own-E.safetensors",
    ]
    arrays, words = unpack(Path("own-D-1.safetensors").read_bytes())
    shared, _ = unpack((finished / "model.safetensors").read_bytes())
    assert {n: a.shape for n, a in arrays.items()} == {
        n: a.shape for n, a in shared.items()
    }
    assert words["client"] == "D/1"


def test_any_name_makes_a_file_that_predict_reads(finished, capsys):
    write("new.csv", rows_of("D", 12))
    asked = ["--data", "new.csv", "--out", "v1.2"]
    assert main(["personalize", str(finished), *asked]) == 0
    assert "model: v1.2.safetensors" in capsys.readouterr().out
    assert main(["predict", "v1.2.safetensors", "new.csv"]) == 0


def test_personal_models_predict_and_are_exported(finished, capsys):
    write("new.csv", rows_of("D", 12))
    assert main(["personalize", str(finished), "--data", "new.csv"]) == 0
    capsys.readouterr()
    assert main(["predict", "personal.safetensors", "new.csv"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "row,prediction"
    assert [line.split(",")[0] for line in printed[1:]] == [str(i) for i in range(12)]
    assert main(["export", "personal.safetensors", "--to", "onnx"]) == 0
    assert main(["predict", "personal.onnx", "new.csv"]) == 0
    assert capsys.readouterr().out.splitlines()[-13:] == printed
    assert main(["export", "personal.safetensors", "--to", "onnx"]) == 2
    assert "not overwritten" in capsys.readouterr().err
    assert main(["export", "personal.safetensors", "--shared"]) == 2
    assert "is one model" in capsys.readouterr().err


def test_nothing_is_compared_with_a_model_that_nobody_trained(
    finished, tmp_path, capsys
):
    """A run in which no client sent anything has only an untrained shared model."""
    copied = shutil.copytree(finished, tmp_path / "alone")
    summary = json.loads((copied / "summary.json").read_text())
    summary["runs"][0]["bits"]["up"] = 0
    (copied / "summary.json").write_text(json.dumps(summary))
    write("new.csv", rows_of("D", 20))
    assert main(["personalize", str(copied), "--data", "new.csv"]) == 0
    said = capsys.readouterr().out
    assert "no shared model" in said
    assert " yes" not in said


def test_one_new_client_of_one_class_in_the_terminal(finished, capsys):
    ill = [row for row in rows_of("", 20) if row[3] == "ill"]
    write("alone.csv", [row[1:] for row in ill], HEAD[1:])
    assert main(["personalize", str(finished), "--data", "alone.csv"]) == 0
    said = capsys.readouterr()
    assert "accuracy on held-out rows" in said.out
    assert "alone" in said.out
    assert "model: personal.safetensors" in said.out
    assert main(["personalize", str(finished), "--data", "alone.csv"]) == 2
    assert "not overwritten" in capsys.readouterr().err
    found = fb.personalize_from(finished, "alone.csv")
    saved, _ = unpack(Path("personal.safetensors").read_bytes())
    mine = name_leaves(found.clients.personal(0))
    assert saved.keys() == mine.keys()
    for name, leaf in mine.items():
        np.testing.assert_array_equal(saved[name], leaf)


GOOD = rows_of("D", 6)


@pytest.mark.parametrize(
    ("head", "rows", "says"),
    [
        (("hospital", "age", "outcome"), [["D", 1, "ill"]] * 4, "no column 'pressure'"),
        (HEAD, [*GOOD, ["D", 1, 2, "dead"]], "dead is no class"),
        (HEAD, [*GOOD, ["D", "old", 2, "ill"]], "'age' is not numeric"),
        (HEAD, [*GOOD, ["D", "inf", 2, "ill"]], "only finite"),
        (HEAD, [], "no rows"),
        (("who", "age", "pressure", "result"), GOOD, "no column 'outcome'"),
    ],
)
def test_rows_that_are_not_of_the_task(finished, capsys, head, rows, says):
    write("bad.csv", rows, head)
    fails(capsys, says, str(finished), "--data", "bad.csv")


def fails(capsys, says, *arguments):
    assert main(["personalize", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert says in said.err
    assert not list(Path().glob("*.safetensors"))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["--data", "none.csv"], "no such file"),
        (["--data", "good.csv", "--rate", "0"], "rate: 0.0"),
        (["--data", "good.csv", "--test", "1"], "test: 1.0"),
        (["--data", "good.csv", "--seed", "7"], "seed: 7"),
        (["--data", "good.csv", "--out", "no/way"], "no folder"),
        (["--data", "good.csv", "--client", "who"], "no column 'who'"),
        (["--data", "wide.npz"], "inputs of shape (3,)"),
    ],
)
def test_wrong_requests(finished, capsys, asked, says):
    write("good.csv", GOOD)
    np.savez("wide.npz", inputs=np.ones((4, 3)), outcome=np.array(["ill"] * 4))
    fails(capsys, says, str(finished), *asked)


@pytest.mark.parametrize(
    ("lost", "says"),
    [
        ("config.toml", "not the folder of a run"),
        ("run.json", "not the folder of a run"),
        ("model.safetensors", "saved no shared model"),
    ],
)
def test_folders_that_will_not_do(finished, tmp_path, capsys, lost, says):
    write("good.csv", GOOD)
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / lost).unlink()
    fails(capsys, says, str(folder), "--data", "good.csv")


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("model.safetensors", "rubbish", "model.safetensors: "),
        ("run.json", "{}", "older fedblend"),
        ("run.json", '{"task": {"kind": 3}}', "damaged"),
        ("config.toml", "version = 1", "is missing"),
    ],
)
def test_damaged_folders(finished, tmp_path, capsys, file, text, says):
    write("good.csv", GOOD)
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / file).write_text(text)
    fails(capsys, says, str(folder), "--data", "good.csv")
