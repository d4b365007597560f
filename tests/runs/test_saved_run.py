# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fb.load``: the models of a run come back from its folder alone."""

import copy
import json
import shutil

import jax
import numpy as np
import pytest

import fedblend as fb
from fedblend.cli import main
from fedblend.config.build import build
from fedblend.config.config import check, dump
from fedblend.errors import RunError
from fedblend.runs import run_folder
from fedblend.runs.run import run_config
from fedblend.simulation.run import Run
from fedblend.simulation.simulate import simulate
from tiny_config import TINY

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture(scope="module")
def blended(tmp_path_factory, compiled):
    """A run of two seeds whose personal models are blends, and the same in memory."""
    tables = copy.deepcopy(TINY)
    tables["algorithm"] |= {"name": "apfl", "alpha": 0.3, "mix": "outputs"}
    tables["run"] |= {"rounds": 2, "seed": [3, 5], "store": "disk"}
    tables["measure"] |= {"splits": ["test"], "metrics": ["loss", "accuracy"]}
    config, out = check(tables, "here"), tmp_path_factory.mktemp("run") / "blended"
    run_config(config, out)
    spec = build(config).spec
    fields = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    return out, simulate(**fields).complete()


def same(left, right) -> bool:
    return jax.tree.structure(left) == jax.tree.structure(right) and all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    )


@pytest.mark.slow
def test_models_of_every_seed_are_those_of_the_run(blended):
    out, run = blended
    saved = fb.load(out)
    for replica, seed in enumerate((3, 5)):
        assert same(saved.shared(seed), fb.trees.take(run.shared, replica))
        for client in (0, 5):
            found = saved.personal(client, seed)
            assert isinstance(found, fb.Blend)
            assert same(found, fb.trees.take(run.personal(client), replica))
    assert not same(saved.personal(1, 3), saved.personal(1, 5))


def test_training_alone_has_no_shared_model(blended, tmp_path, capsys):
    """A run whose folder says that no client sent anything."""
    run, table = str(tmp_path / "run"), str(tmp_path / "rows.npz")
    shutil.copytree(blended[0], run)
    path = tmp_path / "run" / "summary.json"
    content = json.loads(path.read_text())
    content["runs"][0]["bits"]["up"] = 0
    path.write_text(json.dumps(content))
    rows = np.zeros((2, 64), np.float32)
    np.savez(table, inputs=rows)
    saved = fb.load(run)
    assert saved.predict(rows, 0).shape == (2,)
    line = "run: no client sent anything, so there is no shared model; name a client"
    for call in (saved.shared, lambda: saved.predict(rows), saved.model):
        with pytest.raises(RunError, match=line):
            call()
    shared = ["predict", run, table, "--shared"]
    for command in (shared, shared[:3], ["export", run, "--shared"]):
        assert main(command) == 2
        said = capsys.readouterr()
        assert said.out == "" and line in said.err and said.err.count("\n") == 1
    assert not (tmp_path / "run" / "exports" / "shared.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "options", "whole"),
    [
        ("fedper", {"head": ["weight"]}, False),
        ("partial", {"personal": ["weight"]}, False),
        ("partial", {"personal": ["weight"], "personal_steps": 0}, True),
        ("fedbabu", {"head": ["weight"], "tuning_steps": 1}, True),
    ],
    ids=["fedper", "partial", "not trained", "fedbabu"],
)
def test_a_model_that_misses_the_clients_part_is_refused(
    blended, tmp_path, name, options, whole
):
    """A run whose folder says that it is of another algorithm."""
    shutil.copytree(blended[0], tmp_path / "run")
    tables = copy.deepcopy(TINY)
    tables["algorithm"] |= {"name": name, **options}
    tables["run"] |= {"seed": [3, 5]}
    (tmp_path / "run" / "config.toml").write_text(dump(check(tables, "here")))
    saved = fb.load(tmp_path / "run")
    if whole:
        assert len(jax.tree.leaves(saved.shared())) == 2
        return
    with pytest.raises(RunError, match="run: a part of the model never leaves its cl"):
        saved.predict(np.zeros((2, 64), np.float32), shared=True)


def test_outputs_are_those_of_the_model(blended):
    out, run = blended
    rows = np.random.default_rng(0).uniform(size=(7, 64)).astype(np.float32)
    saved = fb.load(out)
    model = fb.trees.take(run.personal(2), 1)
    expected = fb.predict(saved.apply, model, rows)
    assert np.array_equal(saved.model(2, seed=5).outputs(rows), expected)
    shared = saved.apply(fb.trees.take(run.shared, 0), rows)
    assert np.array_equal(saved.model().outputs(rows), shared)


def test_clients_by_id_and_by_name(blended):
    saved = fb.load(blended[0])
    assert saved.names == tuple("012345")
    assert saved.client_id("4") == saved.client_id(4) == 4
    saved.__dict__["names"] = ("b", "1", "0")
    assert [saved.client_id(word) for word in ("b", "0", "1", "2", 1)] == [
        0,
        2,
        1,
        2,
        1,
    ]
    for wrong, line in (
        (3, "3 is not between 0 and 2"),
        ("-1", "'-1' is not a client of this run"),
        ("7", "7 is not between"),
        ("c", "'c' is not a client of this run; known are b, 1, 0"),
    ):
        with pytest.raises(RunError, match=line):
            saved.client_id(wrong)


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda out: (out / "summary.json").unlink(), "is not finished"),
        (lambda out: (out / "config.toml").unlink(), "not the folder of a run"),
        (lambda out: (out / "clients.csv").unlink(), "clients.csv: No such file"),
        (lambda out: (out / "clients.csv").write_text("seed,id\n3,1\n"), "is damaged"),
        (lambda out: (out / "personal-seed3.safetensors").unlink(), "No such file"),
        (
            lambda out: (out / "personal-seed3.safetensors").write_bytes(b"12345678"),
            "not a fedblend file",
        ),
        (
            lambda out: shutil.copy(
                out / "model-seed3.safetensors", out / "personal-seed3.safetensors"
            ),
            "has 10 clients, not those",
        ),
    ],
)
def test_what_is_missing_or_damaged_is_one_line(blended, damage, line, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(blended[0], out)
    damage(out)
    with pytest.raises(RunError, match=line):
        fb.load(out).personal(0)


def test_an_unknown_seed(blended):
    with pytest.raises(RunError, match="4 is not a seed of this run: 3, 5"):
        fb.load(blended[0]).shared(4)


def stopped_after(calls, function):
    """The function, interrupted after so many calls."""
    left = iter(range(calls))

    def call(*arguments):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return function(*arguments)

    return call


@pytest.mark.slow
def test_personal_models_that_are_not_kept_or_interrupted(tiny, tmp_path, monkeypatch):
    tiny["algorithm"] |= {"name": "apfl", "alpha": 0.3}
    tiny["run"] |= {"rounds": 1, "every": 1}
    tiny["measure"] |= {"splits": ["test"], "metrics": ["loss"]}
    monkeypatch.setattr(run_folder, "MOST_BYTES", 100)
    lines: list[str] = []
    run_config(check(tiny, "here"), tmp_path / "auto", on_warning=lines.append)
    assert any("personal models of 6 clients" in line for line in lines)
    with pytest.raises(RunError, match=r'run\.keep_personal = "always" keeps them'):
        fb.load(tmp_path / "auto").personal(0)
    for keep, there in (("always", True), ("never", False)):
        tiny["run"]["keep_personal"] = keep
        summary = run_config(check(tiny, "here"), tmp_path / keep)
        assert (tmp_path / keep / "personal.safetensors").is_file() == there
        assert not any("personal models of" in line for line in summary["warnings"])
    interrupted, models = tmp_path / "interrupted", Run.personal_models
    tiny["run"]["keep_personal"] = "always"
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(run_folder, "AT_ONCE", 4)
        patch.setattr(Run, "personal_models", stopped_after(2, models))
        run_config(check(tiny, "here"), interrupted)
    assert not list(interrupted.glob("personal*"))
    with pytest.raises(RunError, match="not finished"):
        fb.load(interrupted)
    run_config(check(tiny, "here"), interrupted, resume=True)
    whole, again = (
        (folder / "personal.safetensors").read_bytes()
        for folder in (tmp_path / "always", interrupted)
    )
    assert whole == again
    path = tmp_path / "always" / "summary.json"
    summary = json.loads(path.read_text())
    del summary["personal_models"]
    path.write_text(json.dumps(summary))
    with pytest.raises(RunError, match="an older fedblend made it"):
        fb.load(tmp_path / "always").personal(0)


def test_the_records_as_a_frame_and_as_json(blended, capsys):
    out, run = blended
    frame = fb.load(out).frame()
    assert set(frame["seed"]) == {3, 5}
    assert set(frame["metric"]) == {"loss", "accuracy"}
    own = frame.query(
        "seed == 5 and split == 'test' and model == 'personal' and metric == 'loss'"
    )
    history = run.history(1)
    assert own["round"].tolist() == [record.round for record in history]
    means = [record.measures.test.personal.loss.mean for record in history]
    assert own["mean"].tolist() == pytest.approx(means)
    assert own["bits_up"].tolist() == [record.bits_up for record in history]
    again = run.frame()
    assert list(again) == list(frame)
    assert again["mean"].tolist() == pytest.approx(frame["mean"].tolist())
    assert main(["show", str(out), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == fb.load(out).summary
    assert main(["show", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "accuracy" in shown
    assert "loss" in shown
