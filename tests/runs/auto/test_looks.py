# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Looks at real tables: what matters stays, and faults that are planted are found."""

import os
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedblend as fb
from fedblend.config.build import build
from fedblend.config.tables.data import load_dataset
from fedblend.data.dataset import DataError
from fedblend.runs.auto.candidates import Request, configuration
from fedblend.runs.auto.description import look_at
from fedblend.runs.auto.looks import look

TABLES = Path(os.environ.get("FEDBLEND_DATA", "nowhere")) / "tables"
needs_tables = pytest.mark.skipif(not TABLES.is_dir(), reason="no $FEDBLEND_DATA")
CODES = ["communityName", "countyCode", "communityCode"]
KINDS = ("murd", "rapes", "robb", "assault", "burgl", "larc", "autoTheft", "arsons")
COUNTS = ("murders", "rapes", "robberies", "assaults", "burglaries", "larcenies")
CRIMES = [*COUNTS, "autoTheft", "arsons", "nonViolPerPop"]
CRIMES += [f"{kind}PerPop" for kind in KINDS]
KNOWN = {
    "heart": ("center", "disease", [], []),
    "eicu_demo": (
        "region",
        "hospitaldischargestatus",
        ["apachescore", "predictedhospitalmortality", "hospitalid"],
        ["hospitalid"],
    ),
    "opt_trial": ("Clinic", "Preg.ended...37.wk", ["PID"], ["PID"]),
    "indo_rct": ("site", "outcome", ["id", "bleed"], ["id"]),
    "taxi": ("company", "tip", [], []),
    "communities": (
        "state",
        "ViolentCrimesPerPop",
        ["fold", *CODES, *CRIMES],
        [*CODES, "murdPerPop", "rapesPerPop", "robbPerPop", "assaultPerPop"],
    ),
    "contraception": ("district", "use", ["woman"], ["woman"]),
    "exam_london": ("school", "normexam", ["student"], ["student"]),
    "school_ilea": ("school", "exam_score", ["bias"], ["bias"]),
    "radon": ("county.name", "log.radon", ["county"], ["county"]),
    "cheese": ("RETAILER", "LOG_VOLUME", ["VOLUME", "PRICE"], ["VOLUME"]),
    "tcga_brca": (
        "flamby_client",
        "T",
        ["pid", "tss", "Source Site", "Region", "flamby"],
        ["pid", "Region", "flamby"],
    ),
    "heart_flamby_split": ("center", "num", ["flamby"], ["flamby"]),
}
"""Client, target, what the README drops, and what of it is named by itself."""
READ_OTHERWISE = {
    "heart": {"cp": "one_hot", "slope": "one_hot", "chol": "missing 0"},
    "heart_flamby_split": {"cp": "one_hot", "slope": "one_hot", "chol": "missing 0"},
    "contraception": {"livch": "one_hot"},
}


@cache
def table(name):
    return pd.read_csv(TABLES / f"{name}.csv.gz", low_memory=False)


def found_in(frame, client, target, **options):
    return look(fb.data.read(frame, client=client, target=target), **options)


@needs_tables
@pytest.mark.parametrize("name", KNOWN)
def test_what_matters_stays(name):
    client, target, drop, _ = KNOWN[name]
    found = found_in(table(name).drop(columns=drop), client, target)
    done = {one.column: one.choice for one in found if one.choice}
    assert done == READ_OTHERWISE.get(name, {})


@needs_tables
@pytest.mark.parametrize("name", [name for name in KNOWN if KNOWN[name][3]])
def test_identifiers_and_leaks_are_named(name):
    client, target, _, named = KNOWN[name]
    dataset = fb.data.read(table(name), client=client, target=target)
    assert dataset.schema is not None
    gone = {one.name for one in dataset.schema.columns if one.encoding == "drop"}
    assert gone | {one.column for one in look(dataset)} >= {*named}


def numbers_of_rows(frame, client, target, draw):
    shuffled = frame.groupby(client).cumcount().sample(frac=1, random_state=draw)
    by_client = shuffled.groupby(frame[client]).transform(lambda one: one.to_numpy())
    return by_client + int(draw.integers(1, 500))


def copy_of_target(frame, client, target, draw):
    own = frame[target]
    if own.nunique() > 2:
        return own + 0.01 * own.std() * draw.normal(size=len(own))
    wrong = draw.random(len(own)) < 0.005
    return np.where((own == own.iloc[0]) ^ wrong, "a", "b")


def coded_missing(frame, client, target, draw):
    code = draw.choice([0, -1, 999])
    return np.where(
        draw.random(len(frame)) < 0.1, code, draw.normal(120, 15, len(frame))
    )


def missing_by_client(frame, client, target, draw):
    largest = frame[client].value_counts().index[:4]
    never = frame[client].isin(draw.choice(largest, 2, replace=False))
    rare = ~frame[client].isin(largest) & (draw.random(len(frame)) < 0.3)
    return np.where(never | rare, np.nan, draw.normal(size=len(frame)))


def date_order(frame, client, target, draw):
    codes = (
        frame[target].rank() if frame[target].nunique() > 2 else frame[target] == "yes"
    )
    wave = codes / codes.std() + draw.normal(size=len(frame))
    order = wave.groupby(frame[client]).rank(method="first")
    return pd.Timestamp("2020-01-01") + pd.to_timedelta(order, "D")


PLANTED = {
    numbers_of_rows: ("drop", "repeat within a client"),
    copy_of_target: ("", "alone tells the target"),
    coded_missing: ("missing", "all others"),
    missing_by_client: ("", "missing in all rows of"),
    date_order: ("", "--time"),
}


@needs_tables
@pytest.mark.parametrize("plant", PLANTED)
def test_planted_faults_are_found_and_nothing_else_is_touched(plant):
    choice, words = PLANTED[plant]
    right = 0
    for seed in range(10):
        name = ("exam_london", "heart", "school_ilea", "taxi")[seed % 4]
        client, target, drop, _ = KNOWN[name]
        draw = np.random.default_rng(seed)
        frame = table(name).drop(columns=drop).sample(frac=0.9, random_state=seed)
        planted = frame.assign(planted=plant(frame, client, target, draw))
        before, after = (found_in(one, client, target) for one in (frame, planted))
        own = [one for one in after if one.column == "planted"]
        right += any(one.choice.startswith(choice) and words in one.what for one in own)
        others = {(one.column, one.choice) for one in after if one.column != "planted"}
        if plant is not copy_of_target:  # which says what categories would
            assert {one for one in others if one[1]} <= {
                (o.column, o.choice) for o in before
            }
    assert right >= 9


def test_random_columns_raise_no_alarm():
    """Whatever their distribution: alarms in 10 tables of 12 columns of chance."""
    alarms = []
    for seed in range(10):
        draw = np.random.default_rng(seed)
        rows = int(draw.integers(200, 1500))
        columns = {
            "site": draw.integers(0, draw.integers(2, 40), rows).astype(str),
            **{f"n{k}": draw.normal(size=rows) * 10.0**k for k in range(3)},
            **{f"c{k}": draw.integers(0, 3 + 2 * k, rows) for k in range(3)},
            **{f"p{k}": draw.poisson(10.0**k, rows) for k in range(3)},
            "cost": np.exp(2 * draw.normal(size=rows)).round(),
            "income": (1e4 * np.exp(draw.normal(size=rows))).round(),
            "sparse": np.where(draw.random(rows) < 0.5, np.nan, draw.normal(size=rows)),
            "y": draw.choice(["a", "b"], rows) if seed % 2 else draw.normal(size=rows),
        }
        alarms += [one.line for one in found_in(columns, "site", "y")]
    assert not alarms


@pytest.fixture
def visits(tmp_path):
    """Patients of clinics, whose number and yearly visits are columns."""
    draw = np.random.default_rng(0)
    rows = 600
    patient = draw.integers(0, 120, rows)
    year = pd.Series(patient % 4).groupby(patient % 4).cumcount()
    frame = pd.DataFrame(
        {
            "clinic": [f"clinic {one}" for one in patient % 4],
            "patient_no": 1000 + patient,
            "year": 1800 + year,
            "x": draw.normal(size=rows),
            "y": np.sin(year / 9) + 0.3 * draw.normal(size=rows),
        }
    )
    path = tmp_path / "visits.csv"
    frame.to_csv(path, index=False)
    return Request(path, "clinic", "y")


def test_request_has_what_was_done_and_keep_undoes_it(visits):
    data = load_dataset(configuration(visits, "fedavg", {}, seeds=[0]).data)
    found, lines = look_at(visits, data)
    assert found.preprocess == {"patient_no": "drop"}
    assert any("--group patient_no" in one for one in lines)
    assert any(one.startswith("year:") and "--time COLUMN" in one for one in lines)
    kept, lines = look_at(visits._replace(keep=("patient_no",)), data)
    assert not kept.preprocess and any("patient_no" in one for one in lines)
    named = visits._replace(inputs=("patient_no", "x"))
    assert not look_at(named, data)[0].preprocess
    with pytest.raises(DataError, match="keep: there is no input 'z'"):
        look_at(visits._replace(keep=("z",)), data)


def test_letters_by_time_are_refused(visits):
    """Their folds are random."""
    with pytest.raises(DataError, match="once: holds out rows at random"):
        fb.auto(visits.table, client="clinic", target="y", once=True, time="year")


def test_the_run_that_is_kept_has_the_rows_of_the_comparison(visits):
    """By time and by group; the configuration says how."""
    for asked in ({"time": "year"}, {"group": "patient_no"}):
        request = visits._replace(**asked)
        data = configuration(request, "fedavg", {}, seeds=[0]).data
        request = look_at(request, load_dataset(data))[0]
        config = configuration(
            request, "fedavg", {"ridge": 0.1}, seeds=[0, 1, 2], kind="regression"
        )
        assert config.data.model_dump()[next(iter(asked))] == next(iter(asked.values()))
        frame = pd.read_csv(visits.table)
        for one in build(config).federations:
            for client in range(4):
                train, test = (
                    frame.iloc[
                        np.asarray(part.origin)[part.starts[client] :][
                            : part.counts[client]
                        ]
                    ]
                    for part in (one.train, one.splits["test"])
                )
                if "time" in asked:
                    assert train.year.max() < test.year.min()
                else:
                    assert not {*train.patient_no} & {*test.patient_no}
