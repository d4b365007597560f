# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Comparing run folders client by client."""

import copy
import json
import shutil

import numpy as np
import pytest
from scipy import stats

from fedblend.config.config import check, dump
from fedblend.errors import RunError
from fedblend.metrics import Metric
from fedblend.runs import per_row_scores
from fedblend.runs.paired import (
    ALONE,
    contenders,
    pair_differences,
)
from fedblend.runs.run_folder import Folder
from fedblend.stats.gains import TAIL, Evidence
from fedblend.stats.intervals import holm, p_value
from tiny_config import TINY

METRICS = {
    "accuracy": Metric(lambda model, batch: model, True, None, True, True),
    "loss": Metric(lambda model, batch: model, False),
}


def with_tables(**tables):
    """The small configuration with more keys in its tables."""
    content = copy.deepcopy(TINY)
    for name, more in tables.items():
        content[name] = {**content[name], **more}
    return check(content, "a test")


def copied(folder, place, config=None):
    """A folder with the facts of another, and the configuration if none is given."""
    place.mkdir()
    for name in ("config.toml", "run.json"):
        shutil.copy(folder / name, place)
    if config is not None:
        (place / "config.toml").write_text(config)
    return place


COUNTS = np.array([5, 0, 7, 3, 9, 4])
NUMBERS = {
    "test": np.random.default_rng(5).permuted(np.tile(np.arange(20), (2, 6, 1)), axis=2)
}


def written(place, config, right, alone):
    """A folder whose models are right so often on the test rows of six clients."""
    place.mkdir()
    (place / "config.toml").write_text(dump(config))
    facts = {"data": {"name": "digits", "rows": 1797}}
    (place / "run.json").write_text(json.dumps(facts))
    found: list[list] = [[], []]
    for seed in (0, 1):
        values, rows = {}, {}
        for model, often in (("personal", right), ("local", alone)):
            rng = np.random.default_rng([seed, int(100 * often)])
            hits = (rng.random((6, COUNTS.max())) < often).astype(np.float32)
            hits[np.arange(COUNTS.max()) >= COUNTS[:, None]] = np.nan
            by_row = {"accuracy": hits, "loss": 1 - hits / 2}
            rows[model] = by_row
            sums = {name: np.nansum(of, axis=1) for name, of in by_row.items()}
            values[model] = {
                name: np.where(COUNTS > 0, of / np.maximum(COUNTS, 1), np.nan)
                for name, of in sums.items()
            }
        found[0].append({"test": values})
        found[1].append({"test": rows})
    every = Evidence(found[0], found[1], {"test": COUNTS}, METRICS, NUMBERS)
    per_row_scores.write(Folder(place), every, np.arange(6), [0, 1])
    return place


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two runs with two seeds, whose clients train alone with other success."""
    place = tmp_path_factory.mktemp("runs")
    config = with_tables(run={"seed": [0, 1]})
    return {
        "slow": written(place / "slow", config, 0.5, 0.6),
        "fast": written(place / "fast", config, 0.9, 0.65),
    }


def test_the_differences_are_those_of_the_clients_on_the_same_rows(folders):
    """Against the definition, from the rows as they were written."""
    (found,) = pair_differences(contenders(folders))
    assert (found.name, found.other, found.metric) == ("slow", "fast", "accuracy")
    slow, fast = (per_row_scores.read(Folder(of)).evidence for of in folders.values())
    gaps = np.array([
        one["test"]["personal"]["accuracy"] - other["test"]["personal"]["accuracy"]
        for one, other in zip(slow.by_row, fast.by_row, strict=True)
    ])  # fmt: skip
    known = COUNTS > 0
    by_client = np.nanmean(gaps[:, known], axis=2)
    assert found.gain.value[known] == pytest.approx(by_client.mean(axis=0), abs=1e-6)
    assert np.isnan(found.gain.value[~known]).all()
    assert found.gain.mean[0] == pytest.approx(by_client.mean(), abs=1e-6)
    assert found.p == pytest.approx(p_value(by_client), rel=1e-4)
    assert (found.gain.low <= found.gain.value)[known].all()
    row = found.row()
    assert row["clients"] == 5 and row["mean_gain"] < 0
    (loss,) = pair_differences(contenders(folders), ["loss"])
    assert loss.gain.mean[0] == pytest.approx(by_client.mean() / 2, abs=1e-6)


def test_the_folder_knows_which_rows_the_seeds_share(folders):
    """Rows of client 4 that both seeds test are one unit: the interval is wider."""
    saved = contenders(folders)
    (whole,) = pair_differences(saved, ["loss"])
    numbers = saved["slow"].saved.evidence.numbers["test"]
    inside = np.arange(9) < COUNTS[:, None]
    np.testing.assert_array_equal(
        numbers[:, inside], NUMBERS["test"][:, :, :9][:, inside]
    )
    apart = {"test": numbers + 20 * np.arange(2)[:, None, None]}
    other = {
        name: one._replace(
            saved=one.saved._replace(
                evidence=one.saved.evidence._replace(numbers=apart)
            )
        )
        for name, one in saved.items()
    }
    (found,) = pair_differences(other, ["loss"])
    assert not np.array_equal(found.gain.low, whole.gain.low, equal_nan=True)


def test_training_alone_is_one_of_the_methods_where_it_is_the_same(folders, tmp_path):
    # The rates differ, so do the models that were trained alone.
    assert list(contenders(folders)) == ["slow", "fast"]
    found = contenders({"slow": folders["slow"]})
    assert list(found) == ["slow", ALONE]
    (alone,) = pair_differences(found, ["loss"])
    summary = per_row_scores.read(Folder(folders["slow"])).evidence
    assert alone.gain.mean == summary.gain("test", "loss", "local").mean


def test_one_seed_is_the_paired_t_test():
    rng = np.random.default_rng(0)
    one, other = rng.normal(0.3, 1, 12), rng.normal(0, 1, 12)
    expected = stats.ttest_rel(one, other).pvalue
    assert p_value((one - other)[None]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("shift", [0.2, 0.8, 3.0])
def test_the_test_of_several_seeds_inverts_the_interval(shift):
    rng = np.random.default_rng(1)
    gaps = rng.normal(shift, 1, (4, 9)) + rng.normal(0, 0.3, (4, 1))
    p = p_value(gaps)
    errors = gaps.mean(0).std(ddof=1) / 3, gaps.mean(1).std(ddof=1) / 2
    half = np.hypot(
        *(e * stats.t.isf(p / 2, n) for e, n in zip(errors, (8, 3), strict=True))
    )
    assert half == pytest.approx(abs(gaps.mean()), rel=1e-6)
    wide = np.hypot(
        *(e * stats.t.isf(TAIL, n) for e, n in zip(errors, (8, 3), strict=True))
    )
    assert (p < 0.05) == (wide < abs(gaps.mean()))


def test_without_differences_the_test_finds_none():
    """Of 400 comparisons of equal methods, about 5 % or fewer have p < 0.05."""
    rng = np.random.default_rng(2)
    draws = rng.normal(0, 1, (400, 3, 10)) + rng.normal(0, 1, (400, 1, 10))
    draws += rng.normal(0, 0.5, (400, 3, 1))
    assert np.mean([p_value(gaps) < 0.05 for gaps in draws]) < 0.07


def test_where_there_is_nothing_to_test():
    assert p_value(np.zeros((2, 5))) == 1.0
    assert np.isnan(p_value(np.ones((1, 1))))
    assert np.isnan(p_value(np.full((3, 4), 0.1)))


def test_holm_is_the_step_down_of_many_comparisons():
    """By its definition: reject while p is at most 0.05 over what is left."""
    rng = np.random.default_rng(3)
    p = rng.random(12) ** 4
    left, rejected = len(p), set()
    for place in np.argsort(p):
        if p[place] >= 0.05 / left:
            break
        rejected.add(int(place))
        left -= 1
    assert set(np.flatnonzero(holm(p) < 0.05)) == rejected and rejected
    assert np.isnan(holm([0.01, np.nan])).tolist() == [False, True]
    assert holm([0.01, np.nan])[0] == 0.01


def test_other_data_is_refused_in_one_line(folders, tmp_path):
    for key, tables in (
        ("data.test: 0.25 there, 0.5 here", {"data": {"test": 0.5}}),
        ("run.seed", {"run": {"seed": [0, 2]}}),
    ):
        text = dump(with_tables(**({"run": {"seed": [0, 1]}} | tables)))
        other = copied(folders["slow"], tmp_path / key[:8], text)
        with pytest.raises(RunError, match=f"^other: has other data than slow.*{key}"):
            pair_differences(contenders({"slow": folders["slow"], "other": other}))
    changed = copied(folders["slow"], tmp_path / "changed")
    facts = changed / "run.json"
    facts.write_text(facts.read_text().replace('"rows": 1797', '"rows": 1798'))
    with pytest.raises(RunError, match="rows: 1797 there, 1798 here"):
        pair_differences(contenders({"slow": folders["slow"], "changed": changed}))
    with pytest.raises(RunError, match=r"'acuracy': was not measured.*'accuracy'"):
        pair_differences(contenders(folders), ["acuracy"])
    with pytest.raises(RunError, match="'quick': is not a run of the comparison"):
        pair_differences(contenders(folders), reference="quick")


def test_a_run_without_evidence_is_refused(folders, tmp_path):
    empty = tmp_path / "empty"
    with pytest.raises(RunError, match=r"is not the folder of a run"):
        pair_differences(contenders({"empty": empty}))
    copied(folders["slow"], empty)
    with pytest.raises(RunError, match=r"has no evidence.safetensors"):
        pair_differences(contenders({"empty": empty}))
    whole = Folder(folders["slow"]).evidence.read_bytes()
    Folder(empty).evidence.write_bytes(whole[:-3])
    with pytest.raises(RunError, match=r"evidence.safetensors: is damaged"):
        pair_differences(contenders({"empty": empty}))
