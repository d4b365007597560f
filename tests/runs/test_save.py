# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Runs that Python code set up: their folders, and comparing them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fedblend as fb
from fedblend.cli import main
from fedblend.config.build import build
from fedblend.errors import InputError, RunError
from fedblend.report.page.content import page_content
from fedblend.runs.run_folder import Folder, read_config
from fedblend.simulation.simulate import simulate

pytestmark = pytest.mark.usefixtures("compiled")

rng = np.random.default_rng(0)
ROWS = rng.normal(size=(120, 3)).astype("f4"), rng.normal(size=120).astype("f4")
PARTS = np.array_split(np.arange(120), 5)
DATA = fb.federate(ROWS, PARTS, validation=0.2, test=0.4)
MODEL = fb.Model(
    lambda key: {"w": 3 * jax.random.normal(key, (3,))},
    lambda params, inputs: inputs @ params["w"],
)
KEYS = jax.random.split(jax.random.key(0), 2)


def loss(params, rows):
    return jnp.abs(MODEL.apply(params, rows[0]) - rows[1]) ** 1.5


def within(model, batch):
    """A metric of one's own: the part of targets that are near."""
    near = jnp.abs(fb.predict(MODEL.apply, model, batch.rows[0]) - batch.rows[1]) < 1
    return (near * batch.mask).sum() / batch.mask.sum()


def run(algorithm=None, data=DATA, key=KEYS, **more):
    work = fb.Work(0.1, steps=2, batch_size=8)
    measure = {"within": fb.Metric(within, True), "loss": fb.metrics.mean_loss(loss)}
    algorithm = algorithm or fb.fedavg(loss, work)
    settings: Any = {"rounds": 2, "every": 1, "measure": measure, **more}
    return fb.simulate(algorithm, MODEL.init, data, key, **settings)


@pytest.fixture(scope="module")
def alone(compiled):
    return run(fb.local_only(loss, fb.Work(0.1, steps=2, batch_size=8)))


def test_a_saved_run_has_the_models_of_the_run(alone, tmp_path, capsys):
    alone.save(tmp_path / "run", "on its own")
    saved = fb.load(tmp_path / "run", MODEL)
    assert saved.seeds == [0, 1] and saved.names == tuple("01234")
    for seed in saved.seeds:
        mine = alone.personal(3)["w"][seed]
        assert np.array_equal(saved.personal(3, seed)["w"], mine)
    mean = alone.results[1].test.personal.within.mean
    (line,) = (
        saved.frame()
        .query("seed == 1 and round == 2 and split == 'test' and metric == 'within'")
        .query("model == 'personal'")["mean"]
    )
    assert line == pytest.approx(mean)
    for ask in (lambda: saved.config, lambda: saved.task, lambda: saved.predict({})):
        with pytest.raises(RunError, match=r"fb\.simulate made this run, so it has no"):
            ask()
    with pytest.raises(RunError, match=r"fb\.load\(folder, model\) reads its models"):
        fb.load(tmp_path / "run").personal(0)
    assert main(["show", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "run"), "rows.csv"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    page = alone.report(tmp_path / "page.html")
    assert page.is_file() and Folder(tmp_path / "page").summary.is_file()


def test_p_values_of_a_metric_of_ones_own_are_those_of_scipy(alone, tmp_path):
    many = fb.federate(ROWS, np.array_split(np.arange(120), 15), test=0.5)
    one: Any = {"key": KEYS[0], "data": many}
    runs = {"Ours (new)": run(**one), "theirs": run(**one, rounds=30, every=30)}
    found = fb.compare(runs, tmp_path, metrics=["within", "loss"])
    for tested in found.differences:
        first, second = (
            own.evidence.measured[0]["test"]["personal"][tested.metric]
            for own in runs.values()
        )
        expected: Any = stats.ttest_rel(first, second)
        assert tested.p == pytest.approx(expected.pvalue, rel=1e-4)
    within_lost, loss_lost = (one.significant for one in found.differences)
    row = next(
        line
        for line in (tmp_path / "table.tex").read_text().splitlines()
        if "Ours (new)" in line
    )
    _, within, _, lost, *_ = row.split(" & ")
    assert loss_lost and lost.endswith("^\\dagger$")
    assert within.endswith("^\\dagger$") == within_lost
    assert "test within" in found.markdown()
    # The same call again is no error, as a cell of a notebook that runs twice.
    again = fb.compare(runs, tmp_path, metrics=["within", "loss"])
    assert again.markdown() == found.markdown()
    content = page_content(list(found.folders.values()))
    assert [one["label"] for one in content["runs"]] == ["Ours (new)", "theirs"]
    assert content["differences"][0]["p"] == pytest.approx(found.differences[0].p, 1e-3)
    assert found.report(tmp_path / "page.html").stat().st_size > 10_000


def test_a_folder_and_a_run_are_compared_alike(tiny_run, tmp_path):
    spec = build(read_config(Folder(tiny_run))).spec
    fields: Any = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    found = fb.compare({"folder": tiny_run, "code": simulate(**fields)}, tmp_path)
    (only,) = found.differences
    assert (only.name, only.other) == ("folder", "code")
    assert (only.gain.value == 0).all()
    assert list(found.folders) == ["folder", "code"]


def test_what_cannot_be_compared_or_saved(alone, tiny_run, tmp_path):
    other = fb.federate(ROWS, PARTS, validation=0.2, test=0.4, split=1)
    cases: Any = (
        ({"a": alone, "b": run(data=other)}, "b: has other data than a.*rows_sha256"),
        ({"a": alone, "b": run(key=KEYS[::-1])}, "b: has other data than a.*keys"),
        ({"a": alone, "b": run(data=other, key=KEYS[0])}, "b: has other data"),
        ({"a b": alone, "a-b": alone}, "a b, a-b: two runs have the same folder"),
        (
            [alone, alone],
            "runs by name, too: name: 'local_only' is the name of another",
        ),
        ([3], "compare: 3 is not a configuration, a folder or a run of simulate"),
    )
    for wrong, match in cases:
        with pytest.raises(InputError, match=match):
            fb.compare(wrong, tmp_path / "out")
    with pytest.raises(RunError, match="holds the run of a configuration"):
        alone.save(tiny_run)
    sweep = fb.simulate(
        lambda rate: fb.fedavg(loss, fb.Work(rate, steps=1, batch_size=8)),
        MODEL.init,
        DATA,
        KEYS[0],
        rounds=1,
        over=np.array([0.1, 0.2]),
    )
    with pytest.raises(InputError, match="save: a sweep is not a run of one value"):
        sweep.save(tmp_path / "sweep")
    sweep.complete().select_replicas(1).save(tmp_path / "one")
    assert fb.load(tmp_path / "one").seeds == [0]


def test_runs_and_data_say_what_they_are_in_a_line():
    one = run(rounds=5, every=2)
    assert repr(one) == "Run of fedavg: 0 of 5 rounds, 5 clients, 2 replicas"
    assert len(one) == len(list(one)) == 4
    rows = ", ".join(f"{of.total} {name}" for name, of in DATA.splits.items())
    assert repr(DATA) == f"FederatedData: 5 clients, {rows} rows"
