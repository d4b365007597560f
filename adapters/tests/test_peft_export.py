# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend export --to peft``: the files of an adapter of a run."""

import jax
import numpy as np
import pytest
import torch

import fedblend as fb
from fedblend.cli import main
from fedblend.config import toml
from fedblend.config.config import check
from fedblend.data.dataset import Task
from fedblend.errors import RunError
from fedblend.runs.export.portable import Portable
from fedblend.runs.saved_run import load
from fedblend_adapters.configured import export_files
from fedblend_adapters.peft import import_peft

TASK = Task("sequence", 7, (5,))
MODULES = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

nn = torch.nn


def network(shape, outputs):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(outputs, 8), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, outputs)
    )


class Llama(LlamaForCausalLM):
    def forward(self, tokens):
        return super().forward(tokens, use_cache=False).logits


def llama(shape, outputs):
    config = LlamaConfig(
        vocab_size=outputs, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Llama(config)
"""


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    (tmp_path / "modules_of_peft.py").write_text(MODULES)
    monkeypatch.syspath_prepend(str(tmp_path))


def portable(model, adapt, algorithm="fedavg"):
    content = {"data": {"source": "shakespeare"}, "model": model}
    content |= {"algorithm": {"name": algorithm}, "adapt": {"rank": 2, **adapt}}
    found = Portable(check(content, "here"), TASK)
    drawn = found.model.init(jax.random.key(0))
    found.params = jax.tree.map(lambda leaf: leaf + 0.1, drawn)
    return found


@pytest.mark.parametrize("adapt", [{"two": True}, {"train": "b", "alpha": 4.0}])
def test_the_files_have_the_adapter(adapt, tmp_path):
    pytest.importorskip("transformers")
    own = portable({"name": "modules_of_peft:network"}, adapt)
    for name, content in export_files(own).items():
        (tmp_path / name).write_bytes(content)
    adapter, _ = import_peft(tmp_path)
    plain = portable(
        {"name": "modules_of_peft:network"}, {"rank": len(adapter["1.weight"]["a"])}
    )
    rows = np.arange(10).reshape(2, 5) % 7
    plain.params = adapter
    # The same products, in another order of float32.
    np.testing.assert_allclose(plain.outputs(rows), own.outputs(rows), atol=1e-5)
    start = jax.tree.map(np.zeros_like, adapter)
    assert np.abs(own.outputs(rows) - plain.model.apply(start, rows)).max() > 0.01


def test_what_has_no_names_in_peft_is_refused():
    small = {"name": "transformer", "width": 8, "layers": 2, "heads": 2}
    with pytest.raises(RunError, match="no names for the layers of transformer"):
        export_files(portable(small, {}))
    gated = portable(small, {"how": "gated_lora"}, "fedalt_lora")
    with pytest.raises(RunError, match="peft is for one adapter of"):
        export_files(gated)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_from_a_llama_to_peft_by_commands(data_home, tmp_path):
    """A module of transformers; what peft loads has a personal model's scores."""
    peft = pytest.importorskip("peft")
    modules = pytest.importorskip("modules_of_peft")
    rows = fb.datasets.load("shakespeare", length=16)
    content = {
        "version": 1,
        "data": {
            "source": "shakespeare",
            "partition": "by_key",
            "options": {"length": 16},
            "test": 0.2,
        },
        "model": {"name": "modules_of_peft:llama"},
        "adapt": {"rank": 2},
        "algorithm": {"name": "apfl", "rate": 2.0, "steps": 5, "batch_size": 4}
        | {"alpha": 0.5},
        "run": {"rounds": 2, "every": 2, "cohort": 5},
        "measure": {"local": False, "on": 5, "splits": ["test"]},
    }
    (tmp_path / "run.toml").write_text(toml.write(content))
    out = tmp_path / "run"
    assert main(["run", str(tmp_path / "run.toml"), "--out", str(out)]) == 0
    files = tmp_path / "files"
    command = ["export", str(out), "--client", "0", "--to", "peft"]
    assert main([*command, "--out", str(files)]) == 0
    (folder,) = (path.parent for path in files.rglob("adapter_config.json"))
    inputs = rows.rows[0][:3]
    saved = load(out)
    ours = saved.apply(saved.personal(0), inputs)
    tokens = torch.from_numpy(np.array(inputs)).long()
    llama = modules.llama((16,), rows.outputs).eval()
    with torch.no_grad():
        plain = llama(tokens).numpy()
        theirs = peft.PeftModel.from_pretrained(llama, folder)(tokens).numpy()
    assert np.abs(theirs - plain).max() > 0.01
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
