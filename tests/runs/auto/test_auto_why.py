"""Why clients differ, and what training together is worth, against planted truth."""

from pathlib import Path

import numpy as np
import pytest

from fedblend.config.build import build
from fedblend.data.dataset import generator
from fedblend.runs.auto import candidates, worth
from fedblend.runs.auto.candidates import Request
from fedblend.runs.auto.linear import PooledRows
from fedblend.runs.auto.why import explain_gaps, fitted_rows
from fedblend.runs.auto.worth import PARTS, shorten, worth_in_rows

CLIENTS = 12
UNITS = (2.2046, 1 / 2.54, 18.0, 0.1, 1000.0)


def columns(draw, ill=None):
    """A table like those of hospitals; clients have levels and inputs of their own."""
    counts = draw.integers(60, 200, CLIENTS)
    owner = np.repeat(np.arange(CLIENTS), counts)
    level = draw.normal(0, 0.3, CLIENTS)[owner]
    age = draw.normal(55 + 3 * draw.normal(size=CLIENTS)[owner], 10)
    weight = np.exp(draw.normal(4.3, 0.2, len(owner)))
    marker = draw.gamma(2.0, 3.0, len(owner))
    sex = draw.integers(0, 2, len(owner))
    score = level + 0.05 * (age - 55) + 0.04 * (weight - 75) + 0.2 * (marker - 6) + sex
    if ill is not None:
        score += 1.5 * (owner == ill)
    target = np.where(
        draw.random(len(owner)) < 1 / (1 + np.exp(1 - score)), "yes", "no"
    )
    return {
        "client": np.array([f"site {one}" for one in owner]),
        "age": age,
        "weight": weight,
        "marker": marker,
        "sex": sex,
        "target": target,
    }


def gaps_of(table, place: Path):
    path = place / "table.csv"
    rows = zip(*table.values(), strict=True)
    lines = [",".join(table), *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines))
    config = candidates.configuration(
        Request(path, "client", "target"), "fedavg", {"ridge": 1e-3}, seeds=[0]
    )
    built = build(config)
    data = built.federated_data
    names = [data.name(client) for client in range(data.clients)]
    rows, task = fitted_rows(built), built.task
    fitted = built.preprocessing[0]
    return explain_gaps(task.kind, rows, task.outputs, names, fitted), rows, built


@pytest.mark.parametrize("seed", range(10))
def test_planted_faults_are_named(seed, tmp_path):
    draw = generator(seed, "planted faults")
    what = ("unit", "constant", "level")[seed % 3]
    site = int(draw.integers(CLIENTS))
    table = columns(draw, ill=site if what == "level" else None)
    here = table["client"] == f"site {site}"
    name = str(draw.choice(["age", "weight", "marker"]))
    factor = float(draw.choice(UNITS))
    if what == "unit":
        table[name] = np.where(here, factor * table[name], table[name])
    elif what == "constant":
        table[name] = np.where(here, 0.0, table[name])
    gaps, _, _ = gaps_of(table, tmp_path)
    by_name = {gap.client: gap for gap in gaps}
    mine = by_name.pop(f"site {site}")
    assert not any(gap.faults for gap in by_name.values())
    if what == "level":
        assert "level" in mine.clear and not mine.faults
        return
    (fault,) = mine.faults
    assert (fault.column, fault.what) == (name, what)
    if what == "unit":
        assert abs(np.log(fault.value / factor)) < 0.3
    else:
        assert fault.value == 0


def test_a_table_without_faults_names_none(tmp_path):
    draw = generator(0, "no faults")
    gaps, rows, built = gaps_of(columns(draw), tmp_path)
    assert len(gaps) == CLIENTS and not any(gap.faults for gap in gaps)
    assert not any("slopes" in gap.clear for gap in gaps)
    # All rows of all splits, once, each client's together.
    assert rows.counts.sum() == sum(
        split.total for split in built.federated_data.splits.values()
    )


def test_parts_add_up_to_the_gain_of_an_own_model(tmp_path):
    draw = generator(1, "own slopes")
    table = columns(draw)
    here = table["client"] == "site 3"
    opposite = np.where(table["age"] > 55, "no", "yes")
    table["target"] = np.where(here, opposite, table["target"])
    gaps, _, _ = gaps_of(table, tmp_path)
    gap = next(gap for gap in gaps if gap.client == "site 3")
    assert "slopes" in gap.clear and gap.parts["slopes"] == max(gap.parts.values())
    assert 0 < sum(gap.parts.values()) < gap.loss


def curve_of(draw, clients=40, splits=6, power=1.0, noise=0.02):
    """A curve 1 + 0.5 f^-power of clients that differ."""
    own = draw.normal(0, 0.2, clients)
    mean = [1 + 0.5 * part**-power for part in PARTS]
    spread = noise * draw.normal(size=(len(PARTS), splits, clients))
    return np.reshape(mean, (-1, 1, 1)) + own + spread, own


@pytest.mark.parametrize("times", [0.6, 1.0, 2.0, 4.0])
def test_worth_is_where_the_curve_meets_the_loss(times):
    curve, own = curve_of(generator(0, "curve"), noise=0.0)
    method = np.broadcast_to(1 + 0.5 / times + own, curve.shape[1:])
    assert worth_in_rows(curve, method).times == pytest.approx(times, rel=1e-6)


def test_intervals_cover_the_truth():
    covered = 0
    for seed in range(100):
        draw = generator(seed, "curve with noise")
        times, power = draw.uniform(0.7, 4.0), draw.choice([0.5, 0.75, 1.0])
        curve, own = curve_of(draw, power=power)
        method = 1 + 0.5 * times**-power + own + 0.02 * draw.normal(size=(6, 40))
        found = worth_in_rows(curve, method)
        covered += found.low <= times <= found.high
    assert covered >= 90


def test_a_method_that_no_rows_reach_is_worth_the_most():
    curve, own = curve_of(generator(0, "floor"), noise=0.0)
    found = worth_in_rows(curve, np.broadcast_to(0.9 + own, curve.shape[1:]))
    assert found.times == worth.MOST and "more than 10" in str(found)


def test_parts_of_rows_are_nested_and_of_each_client():
    draw = generator(0, "rows")
    counts = np.array([10, 0, 7])
    rows = PooledRows(draw.normal(size=(17, 2)), np.arange(17), counts)
    half, more = shorten(rows, 0.5, 3), shorten(rows, 0.7, 3)
    assert half.counts.tolist() == [5, 0, 4] and more.counts.tolist() == [7, 0, 5]
    assert {*half.targets} <= {*more.targets}
    np.testing.assert_array_equal(half.inputs, rows.inputs[half.targets])
