# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend export --to peft``: the files of an adapter of a run."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import fedblend as fb
from fedblend.cli import main
from fedblend.config import toml
from fedblend.config.config import check
from fedblend.data.dataset import Task
from fedblend.errors import RunError
from fedblend.models.adapt.peft import import_peft
from fedblend.models.adapt.uses import leaves_by_path
from fedblend.runs.export.peft_model import as_peft
from fedblend.runs.export.portable import Portable
from fedblend.runs.saved_run import load

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
    gated = portable({}, {"how": "gated_lora"}, "fedalt_lora")
    with pytest.raises(RunError, match="peft is for one adapter of"):
        as_peft(gated)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_from_a_llama_to_peft_by_commands(data_home, tmp_path):
    """A base that transformers wrote; what peft loads has a personal model's scores."""
    transformers, peft = map(pytest.importorskip, ("transformers", "peft"))
    torch = pytest.importorskip("torch")
    rows = fb.datasets.load("shakespeare", length=16)
    config = transformers.LlamaConfig(
        vocab_size=rows.outputs,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,  # that of `transformer`
    )
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(config)
    llama.save_pretrained(tmp_path / "llama")
    _, base = fb.models.load_transformer(tmp_path / "llama")
    arrays = {name: np.asarray(leaf) for name, leaf in leaves_by_path(base).items()}
    save_file(arrays, tmp_path / "base.safetensors")
    size = {"width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "hidden": 24}
    content = {
        "version": 1,
        "data": {
            "source": "shakespeare",
            "partition": "by_key",
            "options": {"length": 16},
            "test": 0.2,
        },
        "model": {"name": "transformer", **size},
        "adapt": {"rank": 2, "base": str(tmp_path / "base.safetensors")},
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
    with torch.no_grad():
        plain = llama(tokens).logits.numpy()
        loaded = peft.PeftModel.from_pretrained(llama, folder)
        theirs = loaded(tokens).logits.numpy()
    assert np.abs(theirs - plain).max() > 0.01
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
