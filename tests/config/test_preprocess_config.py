# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A configuration of a raw table: fitted on training rows, kept with the run."""

import json
from typing import Any

import numpy as np
import pandas
import pytest
from sklearn.preprocessing import StandardScaler

import fedblend as fb
from fedblend.cli import main, screen
from fedblend.config.build import build
from fedblend.config.config import check, dump, loads
from fedblend.data.dataset import DataError
from fedblend.data.preprocess import Preprocessing
from fedblend.errors import ConfigError, RunError
from fedblend.runs.personalize import personalize_from
from fedblend.runs.run import run_config
from fedblend.runs.run_folder import Folder, read_preprocessing

pytestmark = pytest.mark.usefixtures("compiled")

DRAW = np.random.default_rng(0)
ROWS = 200


def visits() -> pandas.DataFrame:
    age = DRAW.normal(60, 10, ROWS)
    ward = DRAW.choice(["icu", "surgery", "NA"], ROWS)
    frame = pandas.DataFrame(
        {
            "hospital": DRAW.choice([f"h{n}" for n in range(6)], ROWS),
            "age": age.round(2),
            "ward": ward,
            "admitted": np.datetime64("2023-01-01") + DRAW.integers(0, 500, ROWS),
            "notes": [f"note {n}" for n in range(ROWS)],
            "outcome": np.where(age + 8 * (ward == "icu") > 66, "died", "recovered"),
        }
    )
    frame.loc[::11, "age"] = np.nan
    return frame


FRAME = visits()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "visits.csv"
    FRAME.to_csv(path, index=False)
    return path


@pytest.fixture
def content(file):
    return {
        "version": 1,
        "name": "visits",
        "data": {
            "file": str(file),
            "target": "outcome",
            "client": "hospital",
            "partition": "by_key",
        },
        "model": {"name": "logistic"},
        "algorithm": {"name": "fedavg", "rate": 0.3, "steps": 2, "batch_size": 8},
        "run": {"rounds": 1, "seed": [0, 1]},
        "measure": {"local": False},
    }


def ages(rows: np.ndarray, fitted: Preprocessing) -> np.ndarray:
    """The ages of rows, from their inputs; NaN where they are missing."""
    place, known = fitted.features.index("age"), fitted.fitted[0]
    back = rows[:, place].astype(float) * known.deviation + known.mean
    return np.where(rows[:, place + 1] == 1, np.nan, back)


def test_statistics_are_those_of_training_rows_of_clients_that_train(content):
    content["data"] |= {"unseen": 0.3, "validation": 0.2}
    built = build(check(content, "here"))
    assert len(built.preprocessing) == len(built.federations) == 2
    first, second = built.preprocessing
    assert first.columns == ("age", "ward", "admitted") == built.task.columns
    assert built.task.shape == (first.schema.width,)
    assert first.fitted[0].mean != second.fitted[0].mean  # seeds split on their own
    for data, unseen, fitted in zip(
        built.federations, built.unseen, built.preprocessing, strict=True
    ):
        train = ages(data.train.examples[0], fitted)
        assert data.train.total == len(train) < 0.7 * ROWS
        theirs: Any = StandardScaler().fit(train[:, None])
        assert fitted.fitted[0].mean == pytest.approx(theirs.mean_[0], rel=1e-6)
        assert fitted.fitted[0].deviation == pytest.approx(theirs.scale_[0], rel=1e-6)
        whole = np.concatenate(
            [
                ages(split.examples[0], fitted)
                for one in (data, unseen)
                for split in one.splits.values()
            ]
        )
        np.testing.assert_allclose(
            np.sort(whole), np.sort(FRAME["age"].to_numpy()), atol=1e-3
        )


def test_the_run_says_what_was_done(content):
    (said,) = [
        line
        for line in build(check(content, "here")).warnings
        if line.startswith("preprocessing: ")
    ]
    assert "3 columns make" in said and "'notes' has 200 different texts" in said


def test_choices_stand_in_the_configuration(content):
    chosen = {"ward": ["surgery", "icu"], "notes": "drop", "age": "as_is"}
    content["data"]["preprocess"] = chosen
    config = check(content, "here")
    assert loads(dump(config), "dumped") == config
    (fitted, _) = build(config).preprocessing
    assert [one.encoding for one in fitted.schema.kept] == ["as_is", "ordinal", "date"]
    content["data"]["preprocess"] = {"ward": "one-hot"}
    with pytest.raises(DataError, match=r"preprocess\.ward: 'one-hot' is unknown"):
        build(check(content, "here"))
    content["data"]["preprocess"] = "sometimes"
    with pytest.raises(ConfigError, match=r"data\.preprocess"):
        check(content, "here")
    content["data"]["preprocess"] = "none"
    with pytest.raises(DataError, match="column 'ward' is not numeric"):
        build(check(content, "here"))
    content["data"] = {"source": "digits", "partition": "iid", "clients": 4}
    assert check(content, "here").data.preprocess == "auto"
    content["data"]["preprocess"] = "always"
    with pytest.raises(ConfigError, match="preprocess: goes with file"):
        check(content, "here")


def test_a_table_of_complete_numbers_is_standardized_or_keeps_its_bits(
    content, tmp_path
):
    frame = FRAME[["hospital", "outcome"]].assign(
        x=DRAW.normal(1e6, 1e5, ROWS), k=DRAW.integers(0, 9, ROWS)
    )
    frame.to_csv(tmp_path / "numbers.csv", index=False)
    content["data"]["file"] = str(tmp_path / "numbers.csv")
    auto = build(check(content, "here"))
    assert auto.preprocessing[0].features == ("x", "k")
    train = auto.federated_data.train.examples[0]
    np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(train.std(axis=0), 1, atol=1e-6)
    content["data"] |= {"preprocess": "none", "drop": ["k"]}
    none = build(check(content, "here"))
    assert none.preprocessing == ()
    kept = np.sort(
        np.concatenate(
            [one.examples[0] for one in none.federated_data.splits.values()]
        ),
        axis=None,
    )
    np.testing.assert_array_equal(kept, np.sort(frame["x"].to_numpy(np.float32)))


def test_clipped_values_and_leaks_are_said_once(content, tmp_path):
    frame = FRAME.assign(code=np.where(FRAME["outcome"] == "died", 7, 9))
    frame["age"] = frame["age"].mask(frame.index.isin((1, 2)), 1e9)
    frame.to_csv(tmp_path / "odd.csv", index=False)
    content["data"]["file"] = str(tmp_path / "odd.csv")
    told = build(check(content, "here")).warnings
    (line,) = [one for one in told if "clipped" in one]
    assert "more than 10 deviations" in line and "2 in 'age'" in line
    (line,) = [one for one in told if "tell the target" in one]
    assert "'code' (AUC 1)" in line and line.endswith('drop = ["code"]')
    content["data"]["drop"] = ["code"]
    told = build(check(content, "here")).warnings
    assert not [one for one in told if "tell the target" in one]
    content["data"]["drop"] = ["cod"]
    with pytest.raises(DataError, match=r"drop: .*; did you mean 'code'\?"):
        build(check(content, "here"))


@pytest.mark.parametrize("own", [{"share": 0.3}, {"classes": [0]}, {"file": ""}])
def test_the_servers_rows_have_the_same_inputs(content, file, own):
    own = {"file": str(file)} if "file" in own else own
    content["central"] = {"how": "one_way", "weight": 0.5, **own}
    with pytest.raises(DataError, match=r"central: .* data\.split_seed makes them one"):
        build(check(content, "here"))
    content["data"]["split_seed"] = 0
    built = build(check(content, "here"))
    assert built.server is not None
    (fitted,) = built.preprocessing
    for split in built.server.splits.values():
        assert split.examples[0].shape[1] == fitted.schema.width
        assert np.isfinite(split.examples[0]).all()


@pytest.fixture(scope="module")
def finished(file, tmp_path_factory, compiled):
    out = tmp_path_factory.mktemp("run") / "out"
    content = {
        "version": 1,
        "name": "visits",
        "data": {
            "file": str(file),
            "target": "outcome",
            "client": "hospital",
            "partition": "by_key",
        },
        "model": {"name": "logistic"},
        "algorithm": {"name": "fedavg", "rate": 0.3, "steps": 2, "batch_size": 8},
        "run": {"rounds": 3, "seed": [0, 1], "every": 3},
        "measure": {"local": False},
    }
    run_config(check(content, "here"), out)
    return out


def test_a_run_keeps_its_preprocessing_and_predicts_raw_tables(finished):
    assert sorted(path.name for path in finished.glob("preprocessing*")) == [
        "preprocessing-seed0.json",
        "preprocessing-seed1.json",
    ]
    one = read_preprocessing(Folder(finished), 0)
    other = read_preprocessing(Folder(finished), 1)
    assert one is not None and other is not None and one != other
    raw = {name: FRAME[name].to_numpy() for name in FRAME.columns}
    run = fb.load(finished)
    assert run.preprocessing(1) == other
    found = run.predictions(FRAME.drop(columns="outcome"), shared=True, seed=1)
    by_hand = run.model(None, 1).outputs(other.transform(raw))
    np.testing.assert_array_equal(found.outputs, by_hand)
    assert set(found.labels) == {"died", "recovered"}


def test_new_clients_of_a_run_bring_raw_tables(finished, tmp_path):
    new = FRAME[:60].assign(hospital="new", ward="never seen")
    new.to_parquet(tmp_path / "new.parquet")
    found = personalize_from(finished, tmp_path / "new.parquet", seed=1)
    (line,) = found.gains()
    assert (line["name"], line["train"] + line["test"]) == ("new", 60)
    assert np.isfinite([line["shared_accuracy"], line["personal_accuracy"]]).all()


def test_damage_is_one_line(finished, tmp_path):
    (tmp_path / "preprocessing.json").write_text("{")
    with pytest.raises(RunError, match=r"preprocessing\.json: .* damaged"):
        read_preprocessing(Folder(tmp_path), 0)


def test_describe_command(file, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(screen, "compile_cache", lambda: None)
    asked = ["--client", "hospital", "--target", "outcome"]
    assert main(["data", "describe", str(file), *asked]) == 0
    said = capsys.readouterr().out
    for part in ("200 rows", "6 clients with", "2 classes: recovered", "one-hot"):
        assert part in said
    assert main(["data", "describe", str(file), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["column"] for one in found["columns"]] == list(FRAME.columns)
    assert main(["data", "describe", str(file), "--target", "outcom"]) == 2
    assert "there is no column 'outcom'" in capsys.readouterr().err
    assert main(["data", "describe", str(file), "--client", "hospitl"]) == 2
    assert "there is no column 'hospitl'" in capsys.readouterr().err
    assert main(["data", "describe", str(tmp_path / "none.csv")]) == 2
    assert "none.csv: no such file" in capsys.readouterr().err
    path = tmp_path / "numbers.csv"
    path.write_text("x,y\n1,0\n2,1\n3,0\n")
    assert main(["data", "describe", str(path), "--target", "y"]) == 0
    assert "standardized" in capsys.readouterr().out
