# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Errors in the user's functions: what Python and the command line print of them."""

import importlib
import sys
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.cli import main
from fedblend.config import toml
from fedblend.errors import LIBRARIES, CodeError
from fedblend.losses import row_losses
from tiny_config import TINY

OWN = """
import jax

def layer(params, inputs):
    return inputs @ params["last"]

def apply(params, inputs):
    hidden = jax.vmap(lambda row: 2 * row)(inputs)
    return layer(params, hidden)

def loss(params, rows):
    inputs, targets = rows
    return apply(params, inputs)[:, 0] - targets

def network(shape, outputs):
    return lambda key: {"last": jax.numpy.ones((7, outputs))}, apply
"""
DATA = fb.federate((np.ones((9, 4)), np.ones(9)), np.arange(9).reshape(3, 3))


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of a user, whose layer multiplies 4 columns by 7 rows in line 5."""
    (tmp_path / "own_loss.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("own_loss", None)
    return importlib.import_module("own_loss")


def print_error(loss, measure=None, size=2):
    work = fb.Work(0.1, steps=1, batch_size=size)
    params, key = {"last": jnp.ones((7, 1))}, jax.random.key(0)
    with pytest.raises(CodeError) as caught:
        fb.simulate(
            fb.fedavg(loss, work), params, DATA, key, rounds=1, measure=measure
        ).complete()
    return caught.value, "".join(traceback.format_exception(caught.value)).splitlines()


@pytest.mark.parametrize("size", [2, None])
def test_an_error_begins_with_the_lines_of_the_user(own, size):
    error, lines = print_error(own.loss, size=size)
    seen = [line for line in lines[:8] if "File " in line]
    places = ("line 13, in loss", "line 9, in apply", "line 5, in layer")
    for line, place in zip(seen, places, strict=False):
        assert "own_loss.py" in line and line.endswith(place)
    assert lines[1] == seen[0] and "own_loss.py" in seen[0]
    assert isinstance(error.__cause__, TypeError)
    assert lines[-1].endswith(f"({own.__file__}:5)")
    libraries = [line for line in lines if "site-packages" in line]
    assert not libraries and len(lines) < 25


def test_an_error_in_evaluation_says_that_there_is_no_key():
    def noisy(params, rows, key):
        return params["last"].sum() * jax.random.normal(key, rows[1].shape)

    error, lines = print_error(noisy, {"loss": fb.metrics.mean_loss(noisy)})
    assert "test_user_code.py" in lines[1] and lines[1].endswith(", in noisy")
    assert ", key None, as in evaluation: " in str(error)


def test_an_error_in_pytorch_says_what_to_use_instead():
    names: dict[str, Any] = {"__name__": "torch.nn"}
    code = "def cross_entropy(scores, targets): raise TypeError('no Tensor')"
    exec(compile(code, f"{LIBRARIES[1]}/torch/nn.py", "exec"), names)
    with pytest.raises(CodeError, match="do not take arrays of JAX"):
        row_losses(names["cross_entropy"], (), fb.Batch(np.ones((2, 3))))


def test_the_command_line_names_the_line_of_the_user(own, tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text(toml.write(TINY | {"model": {"name": "own_loss:network"}}))
    assert main(["run", str(path), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err.splitlines()[:5]
    assert any(line.endswith(f"({own.__file__}:5)") for line in said), said
