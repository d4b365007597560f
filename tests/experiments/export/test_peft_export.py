# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend export --to peft``: the files of an adapter of a run."""

import json

import jax
import numpy as np
import pytest

from fedblend.config.config import check
from fedblend.data.dataset import Task
from fedblend.errors import RunError
from fedblend.experiments.export.peft_model import as_peft
from fedblend.experiments.export.portable import Portable
from fedblend.models.adapt.peft import import_peft

pytest.importorskip("safetensors")
TASK = Task("sequence", 7, (5,))
SMALL = {"name": "transformer", "width": 8, "layers": 2, "heads": 2}
GPT2 = {
    "positions": "learned",
    "norm": "layer",
    "bias": "all",
    "activation": "gelu_tanh",
}


def portable(model, adapt, algorithm="fedavg"):
    content = {"data": {"source": "shakespeare"}, "model": {**SMALL, **model}}
    content |= {"algorithm": {"name": algorithm}, "adapt": {"rank": 2, **adapt}}
    found = Portable(check(content, "here"), TASK)
    drawn = found.model.init(jax.random.key(0))
    found.params = jax.tree.map(lambda leaf: leaf + 0.1, drawn)
    return found


@pytest.mark.parametrize(
    ("kind", "model", "adapt"),
    [
        ("gpt2", GPT2, {"two": True}),
        *(
            pytest.param(kind, model, adapt, marks=pytest.mark.slow)
            for kind, model in (("llama", {}), ("gpt2", GPT2))
            for adapt in ({}, {"train": "b", "alpha": 4.0})
        ),
    ],
)
def test_the_files_have_the_adapter(kind, model, adapt, tmp_path):
    own = portable(model, adapt)
    for name, content in as_peft(own).items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    adapter, _ = import_peft(tmp_path, base=tmp_path)
    plain = portable(model, {"rank": len(adapter["layers/out/weight"]["a"])})
    rows = np.arange(10).reshape(2, 5) % 7
    plain.params = adapter
    # The same products, in another order of float32.
    np.testing.assert_allclose(plain.outputs(rows), own.outputs(rows), atol=1e-5)
    assert (
        np.abs(own.outputs(rows) - plain.model.apply(own_start(plain), rows)).max()
        > 0.01
    )


def own_start(own):
    """An adapter that changes nothing."""
    return jax.tree.map(np.zeros_like, own.params)


def test_what_has_no_names_in_peft_is_refused():
    odd = portable({"norm": "layer"}, {})
    with pytest.raises(RunError, match="no names for the layers of transformer"):
        as_peft(odd)
    gated = portable({}, {"how": "gated_lora"}, "rest_of_world")
    with pytest.raises(RunError, match="peft is for one adapter of"):
        as_peft(gated)
