# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``auto`` on times until an event: what it says, keeps and refuses."""

import csv
import json
from typing import Any

import numpy as np
import pytest

import fedblend as fb
from fedblend.cli import main
from fedblend.data.preprocess.preprocessing import Preprocessing
from fedblend.data.readers.tables import read_table
from fedblend.errors import InputError
from fedblend.runs.auto import comparison
from fedblend.runs.auto.candidates import Request, configuration
from fedblend.runs.auto.comparison import Screen
from fedblend.runs.auto.description import look_at
from fedblend.runs.auto.survival import build_rows
from fedblend.runs.auto.survival_rows import read_survival, views

HOSPITALS, ROWS = 12, 30


def columns(seed=0, signal=1.5):
    """Hospitals with hazards of their own, and the same effect of age."""
    draw = np.random.default_rng(seed)
    site = np.repeat(np.arange(HOSPITALS), ROWS)
    age, noise = draw.normal(size=(2, len(site)))
    hazard = np.exp(signal * age + draw.normal(size=HOSPITALS)[site])
    event, leaves = draw.exponential(1 / hazard), draw.exponential(2.0, len(site))
    return {
        "site": np.array([f"site {number}" for number in site]),
        "age": age.round(3),
        "noise": noise.round(3),
        "months": np.minimum(event, leaves).round(3),
        "died": (event <= leaves).astype(int),
    }


ASKED: dict[str, Any] = {"client": "site", "target": "months", "event": "died"}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "SPLITS", 4)
        out, lines = tmp_path_factory.mktemp("auto") / "out", []
        table = {
            **columns(),
            "died": columns()["died"] * (columns()["site"] != "site 3"),
        }
        auto = fb.auto(table, **ASKED, out=out, screen=Screen(lines.append))
    return auto, "\n".join(lines), table


def test_alike_hospitals_share_their_slopes(found):
    auto, lines, _ = found
    assert auto.deploy == "fedavg" and "Deploy FedAvg" in auto.verdict[0]
    assert "C-index, mean over clients, with 95 % intervals" in auto.verdict[3]
    assert "all rows of 'site 3' are censored" in lines
    rows = {row["method"]: row for row in auto.table}
    assert rows["fedavg"]["test_c_index"] > 0.75
    assert rows["kaplan_meier"]["test_c_index"] == 0.5
    for metric in ("test_cox_loss", "test_brier"):
        assert rows["fedavg"][metric] < rows["kaplan_meier"][metric]


def test_the_folder_has_clients_and_models(found):
    auto, _, table = found
    with (auto.folder / "clients.csv").open() as file:
        clients = list(csv.DictReader(file))
    assert len(clients) == HOSPITALS and clients[0]["rows"] == "30"
    assert int(clients[0]["events"]) == table["died"][:ROWS].sum()
    models = json.loads((auto.folder / "models.json").read_text())
    text = (auto.folder / "preprocessing.json").read_text()
    inputs = Preprocessing.parse(text).transform(read_table(table).columns)
    one = models["methods"]["fedavg"]["site 0"]
    slope = dict(zip(models["inputs"], one["coefficients"], strict=True))
    assert 1.0 < slope["age"] / np.std(table["age"]) < 2.0 and abs(slope["noise"]) < 0.3
    # As many events are expected as there were (a property of Breslow's hazard).
    risk = np.exp(inputs[:ROWS] @ one["coefficients"])
    hazard = -np.log([1.0, *one["survival"]])
    # Targets are single precision.
    months = table["months"][:ROWS] + 1e-4
    place = np.searchsorted(one["times"], months, "right")
    assert risk @ hazard[place] == pytest.approx(table["died"][:ROWS].sum(), rel=1e-3)


def test_a_finished_comparison_is_said_again(found, tmp_path, capsys):
    auto, _, _ = found
    words = ["auto", str(auto.folder / "table.csv"), "--out", str(auto.folder)]
    words += ["--client", "site", "--target", "months", "--event", "died"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "Deploy FedAvg" in said and "Kaplan-Meier" in said and "page:" in said
    assert main(["export", str(auto.folder), "--shared"]) == 2
    assert "holds models of times until an event" in capsys.readouterr().err


def test_predict_has_risks_and_survival(found, capsys):
    """By a client's own model, until its last row was seen; or by the shared one."""
    auto, _, table = found
    file = str(auto.folder / "table.csv")
    assert main(["predict", str(auto.folder), file]) == 0
    made = [*csv.DictReader(capsys.readouterr().out.splitlines())]
    names = [name for name in made[0] if name.startswith("probability")]
    assert len(made) == len(table["age"]) and len(names) == 3
    own = [row for row in made if row["client"] == "site 0"]
    risks = [float(row["prediction"]) for row in own]
    assert np.corrcoef(risks, table["age"][:ROWS])[0, 1] > 0.95
    for name in names:
        horizon = float(name.removeprefix("probability to survive "))
        chances = [float(row[name]) for row in own if row[name] != "nan"]
        later = table["months"][:ROWS].max() < horizon
        assert len(chances) == (0 if later else ROWS)
        # Survival falls with the risk, all rows have the same curve at heart.
        base = np.log(chances) / np.exp(risks[: len(chances)])
        np.testing.assert_allclose(base, base[:1].repeat(len(base)), rtol=1e-6)
    assert main(["predict", str(auto.folder), file, "--shared"]) == 0
    assert "client" not in capsys.readouterr().out.splitlines()[0]
    strangers = {**table, "site": np.full(len(table["age"]), "elsewhere")}
    with pytest.raises(InputError, match=r"client 'elsewhere' .* took no part"):
        auto.run().predictions(strangers)


def asked_for(path, **more):
    """A request about a table in a file, with the times and more columns."""
    table = {**columns(), **more}
    with path.open("w") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))
    return Request(path, "site", "months", event="died")


def test_columns_that_tell_the_time_or_the_event_are_dropped(tmp_path):
    """Unless they are kept."""
    died, months = columns()["died"], columns()["months"]
    more = {"status": np.where(died, "dead", "alive"), "days": months * 30.4}
    request = asked_for(tmp_path / "t.csv", **more)
    found, _ = look_at(request, *views(read_survival(request)))
    assert found.preprocess == {"status": "drop", "days": "drop"}
    kept = request._replace(keep=("days",))
    assert "days" not in (
        look_at(kept, *views(read_survival(kept)))[0].preprocess or {}
    )


@pytest.mark.parametrize("use", ["time", "group"])
def test_rows_are_held_out_by_time_or_by_group(use, tmp_path):
    """The last rows of each client, or those of the same patients."""
    request = asked_for(tmp_path / "t.csv", column=np.arange(HOSPITALS * ROWS) // 3)
    request = request._replace(**{use: "column"}, inputs=("age",))
    config = configuration(request, "fedavg", {}, seeds=[0])
    data = build_rows(config, request).federated_data
    times, tested = (
        {float(abs(of)) for client in range(HOSPITALS) for of in rows.rows(client)[1]}
        for rows in (data.train, data.splits["test"])
    )
    months = columns()["months"].astype(np.float32).reshape(-1, 3)
    if use == "group":
        assert all(
            {*one.tolist()} <= times or {*one.tolist()} <= tested for one in months
        )
    else:
        last = months.reshape(HOSPITALS, ROWS)[:, -3:].ravel()
        assert {*last.tolist()} == tested


def test_without_effects_nothing_is_deployed(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "SPLITS", 4)
    auto = fb.auto(columns(1, signal=0.0), **ASKED, out=tmp_path / "o", quiet=True)
    assert auto.deploy is None


@pytest.mark.parametrize(
    ("change", "asked", "line"),
    [
        (
            {"died": np.full(360, 2)},
            {},
            "column 'died' has 2 in row 0 .* or 0 .censored",
        ),
        ({"died": np.full(360, "yes")}, {}, "column 'died' has yes in row 0"),
        (
            {"died": np.zeros(360, int)},
            {},
            "column 'died' has 0 events; a comparison needs 10",
        ),
        (
            {"months": -columns()["months"]},
            {},
            "column 'months' has .* a time, a number",
        ),
        ({}, {"target": "weeks"}, "there is no column 'weeks'"),
        ({}, {"event": "death"}, "there is no column 'death'"),
        ({"site": np.full(360, "one")}, {}, "site: all rows belong to one client"),
        ({}, {"kind": "regression"}, "kind: .*left out where event"),
        ({}, {"once": True}, "once: .*left out where event"),
    ],
)
def test_bad_tables_are_one_line(change, asked, line, tmp_path):
    with pytest.raises(InputError, match=line) as error:
        table = {**columns(), **change}
        fb.auto(table, **{**ASKED, **asked}, out=tmp_path / "out", quiet=True)
    assert "\n" not in str(error.value)


def test_rows_without_a_time_or_an_event_are_left_out(tmp_path):
    table = columns()
    months, died = table["months"].astype(object), table["died"].astype(object)
    months[0], died[1] = None, None
    request = asked_for(tmp_path / "t.csv", months=months, died=died)
    dataset = read_survival(request)
    assert len(dataset.rows[1]) == len(months) - 2
