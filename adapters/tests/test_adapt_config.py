# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table [adapt]: a run, what follows it, and what is refused in one line."""

import copy
import hashlib
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import fedblend as fb
from fedblend import checkpoint
from fedblend.cli import main, screen
from fedblend.config import config as configs
from fedblend.config import toml
from fedblend.config.config import check
from fedblend.errors import ConfigError
from fedblend.trees import leaves_by_path

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
    "model": {"name": "mlp", "hidden": [6, 5]},
    "algorithm": {
        "name": "apfl",
        "alpha": 0.5,
        "mix": "products",
        "rate": 0.3,
        "steps": 2,
        "batch_size": 4,
    },
    "adapt": {"rank": 2, "base": "base.safetensors"},
    "run": {"rounds": 2, "every": 1},
    "measure": {"local": False, "metrics": ["accuracy"], "splits": ["test"]},
}
HEAD = "hospital,age,pressure,outcome\n"
MODEL = fb.models.mlp(2, 1, hidden=(6, 5))
ENTRIES = 2 * (2 + 6) + 2 * (6 + 5)


def rows(hospital, number):
    ages = np.linspace(-1, 1, number)
    return "".join(
        f"{hospital},{age},0.5,{'ill' if age > 0 else 'well'}\n" for age in ages
    )


def write_base(**changed):
    base = MODEL.init(jax.random.key(7))
    leaves = {path: np.asarray(leaf) for path, leaf in leaves_by_path(base).items()}
    save_file({**leaves, **changed}, "base.safetensors")


def write(path="tiny.toml", **tables):
    content = copy.deepcopy(CONFIG)
    for name, table in tables.items():
        content[name] = {**content.get(name, {}), **table}
    Path(path).write_text(toml.write(content))
    return path


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(screen, "compile_cache", lambda: None)
    Path("visits.csv").write_text(HEAD + rows("north", 12) + rows("south", 16))
    write_base()
    return tmp_path


def fails(capsys, *arguments) -> str:
    """The line of complaint of a command that must fail."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1, said.err
    return said.err.removeprefix("error: ").strip()


def test_a_run_with_adapters_from_start_to_prediction(capsys):
    assert main(["run", write(), "--out", "out"]) == 0
    sha = hashlib.sha256(Path("base.safetensors").read_bytes()).hexdigest()
    kept = toml.read(Path("out/config.toml"))["adapt"]
    assert kept["sha256"] == sha
    assert sha in checkpoint.read_about(Path("out/checkpoint"))["config"]
    assert load_file("out/model.safetensors").keys() == {
        f"['hidden/{layer}/weight']['{part}']" for layer in (0, 1) for part in "ab"
    }
    last = json.loads(Path("out/metrics.jsonl").read_text().splitlines()[-1])
    assert last["bits_up"] == 2 * 2 * 32 * ENTRIES
    assert Path("out/model.safetensors").stat().st_size < 4 * ENTRIES + 2000
    Path("new.csv").write_text(HEAD + rows("north", 4) + rows("south", 4))
    assert main(["predict", "out", "new.csv", "--probabilities"]) == 0
    assert main(["predict", "out", "new.csv", "--client", "north"]) == 0
    for to in ("safetensors", "onnx"):
        assert main(["export", "out", "--all", "--to", to]) == 0
    [exported] = map(str, Path("out/exports").glob("*north*.safetensors"))
    capsys.readouterr()
    assert main(["predict", exported, "new.csv"]) == 0
    said = capsys.readouterr().out
    assert main(["predict", "out", "new.csv", "--client", "north"]) == 0
    assert capsys.readouterr().out == said
    [onnx] = map(str, Path("out/exports").glob("*north*.onnx"))
    assert main(["predict", onnx, "new.csv"]) == 0
    assert capsys.readouterr().out == said
    Path("joined.csv").write_text(HEAD + rows("east", 10))
    assert main(["personalize", "out", "--data", "joined.csv"]) == 0
    assert main(["report", "out"]) == 0
    write_base(**{"last/bias": np.ones(1, np.float32)})
    for command in (
        ("predict", "out", "new.csv"),
        ("export", "out", "--shared"),
        ("personalize", "out", "--data", "joined.csv"),
        ("report", "out"),
    ):
        said = fails(capsys, *command)
        assert "base.safetensors" in said and sha in said
    line = fails(capsys, "run", "tiny.toml", "--out", "out", "--resume")
    assert "holds a run of another config: adapt.sha256" in line
    Path("base.safetensors").unlink()
    assert main(["report", "out"]) == 0
    assert "No such file" in fails(capsys, "predict", "out", "new.csv")


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ({"sha256": "0" * 64}, "adapt.base: "),
        ({"sha256": "0"}, 'adapt.sha256: "0" is not 64 digits of a sha256'),
        ({"base": "none.safetensors"}, "none.safetensors: No such file"),
        ({"how": "ia3"}, 'adapt.rank: goes with how = "lora", not with "ia3"'),
        ({"where": "nothing"}, "adapt.where: 'nothing' is not some of hidden/0/weight"),
        ({"dtype": "int4"}, "adapt.dtype"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(table, line, capsys):
    assert line in fails(capsys, "run", write(adapt=table), "--out", "out")


def test_a_base_of_another_model_is_refused_in_one_line(capsys):
    file = {"hidden/0/weight": np.ones((6, 2), np.float32)}
    save_file(file, "base.safetensors")
    line = fails(capsys, "run", write(), "--out", "out")
    assert line.endswith("base.safetensors has no weight 'hidden/0/bias'")
    write_base(**{"hidden/0/bias": np.ones(3, np.float32)})
    line = fails(capsys, "run", write(), "--out", "out")
    assert line.endswith("hidden/0/bias has the shape [3], the model's [6]")
    Path("base.safetensors").write_bytes(b"not a file of arrays")
    assert "adapt.base: " in fails(capsys, "run", write(), "--out", "out")


@pytest.mark.parametrize(
    ("model", "line"),
    [({"name": "logistic"}, "adapt: logistic has no layer before its last one")],
)
def test_a_model_that_cannot_be_adapted_is_refused(model, line, capsys):
    path = write()
    content = toml.read(Path(path))
    content["model"] = model
    Path(path).write_text(toml.write(content))
    assert line in fails(capsys, "run", path, "--out", "out")


@pytest.mark.parametrize(
    "adapt",
    [
        {"how": "full", "where": ["hidden/*"], "dtype": "bfloat16"},
        {"how": "bias", "dtype": "int8"},
        {"how": "ia3", "two": True},
        {"how": "lora", "train": "b", "alpha": 4.0, "rank": 2},
    ],
)
def test_every_kind_is_built(adapt):
    content = copy.deepcopy(CONFIG)
    content["adapt"] = {"base": "base.safetensors", **adapt}
    Path("kind.toml").write_text(toml.write(content))
    from fedblend.config.build import build

    built = build(configs.load(Path("kind.toml")))
    params = built.model.init(jax.random.key(0))
    assert ("shared" in params) == adapt.get("two", False)
    assert len(built.federated_data.train.counts) == 2


@pytest.mark.parametrize(
    ("name", "adapt", "line"),
    [
        ("fedsa_lora", {"how": "ia3"}, "adapt: fedsa_lora is for the factors of"),
        ("ffa_lora", {"train": "b"}, "adapt: ffa_lora is for the factors of adapters"),
        ("fedalt_lora", {"how": "lora"}, "adapt: fedalt_lora is for two adapters"),
        ("fedavg", {"how": "gated_lora", "two": True}, "adapt.two: is not for how = "),
    ],
)
def test_algorithms_on_adapters_get_those_that_they_train(name, adapt, line):
    content = {"data": {"source": "digits"}, "model": {"name": "mlp"}, "adapt": adapt}
    with pytest.raises(ConfigError, match=f"^here: {line}"):
        check({**content, "algorithm": {"name": name}}, "here")
    del content["adapt"]
    config = check({**content, "algorithm": {"name": "fedalt_lora"}}, "here")
    assert config.adapt is not None and config.adapt.how == "gated_lora"
