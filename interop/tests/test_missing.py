# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Without the distribution: one line with the command that installs it."""

import sys

import equinox
import jax
import numpy as np
import pytest

import fedblend as fb
from fedblend.cli import main
from fedblend.errors import InputError


@pytest.fixture
def missing(monkeypatch):
    """As if fedblend-interop were not installed."""
    for name in [*sys.modules, "fedblend_interop"]:
        if name.split(".")[0] == "fedblend_interop":
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(vars(fb), "trackers", raising=False)
    monkeypatch.delitem(vars(fb), "FederatedClassifier", raising=False)


def line(what: str, extra: str) -> str:
    return f"{what}: needs fedblend-interop: pip install 'fedblend[{extra}]'"


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("models.from_torch", "torch"),
        ("models.to_torch", "torch"),
        ("models.state_dict", "torch"),
        ("models.from_flax", "models"),
        ("models.from_equinox", "models"),
        ("models.from_keras", "keras"),
        ("trackers", "trackers"),
        ("FederatedClassifier", "sklearn"),
    ],
)
def test_functions_name_their_extra(missing, name, extra):
    *parts, last = name.split(".")
    place = getattr(fb, parts[0]) if parts else fb
    with pytest.raises(InputError) as told:
        getattr(place, last)
    assert str(told.value) == line(f"fb.{name}", extra)


def test_import_star_does_not_need_it(missing):
    assert not {"trackers", "FederatedClassifier"} & {*fb.__all__}


def test_modules_of_a_configuration_name_their_extra(missing):
    layer = equinox.nn.Linear(2, 2, key=jax.random.key(0))
    with pytest.raises(InputError) as told:
        fb.models.model_from(lambda: layer, (2,))
    assert str(told.value) == line("a module of equinox", "models")
    pair = fb.models.model_from(lambda: (lambda key: key, lambda params, x: x), (2,))
    assert pair.apply(None, 3) == 3


def test_commands_name_their_extra(missing, write, tiny, tmp_path, capsys):
    out, file = tmp_path / "run", tmp_path / "shared.onnx"
    file.write_bytes(b"")
    np.savez(rows := tmp_path / "rows.npz", x=np.zeros((2, 64)))
    export = ["export", str(out), "--shared"]
    assert main(["run", str(write(tiny)), "--out", str(out)]) == 0
    capsys.readouterr()
    for command, said in (
        (["track", str(out), "--to", "tensorboard"], line("trackers", "trackers")),
        ([*export, "--to", "onnx"], line("export: onnx", "onnx")),
        ([*export, "--to", "torch"], line("export: torch", "torch")),
        (["predict", str(file), str(rows)], line("shared.onnx", "onnx")),
    ):
        assert main(command) == 2
        assert capsys.readouterr().err == f"error: {said}\n"
    assert main([*export, "--to", "safetensors"]) == 0
