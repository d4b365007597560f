# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters of ``peft`` have its scores here, and those written here have them there."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from write_peft_adapters import BASES, HERE, MODULES, ROWS, base_of, scores, write

import fedblend as fb
from fedblend import mixing
from fedblend.errors import InputError, UserError
from fedblend.models import load_transformer
from fedblend.models.adapt.peft import export_peft, import_peft

safetensors = pytest.importorskip("safetensors.numpy")
GAP = 1e-4
"""Of scores of about 1 to 10 in float32, by two libraries."""
OTHERS_LATER = [
    pytest.param(kind, marks=() if kind == "gpt2" else pytest.mark.slow)
    for kind in MODULES
]


def adapted(kind, how, where=None):
    model, base = load_transformer(BASES / kind)
    return fb.adapt(model, base, how=how, inputs=ROWS, where=where)


def moved(params, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: leaf + jnp.asarray(0.3 * rng.normal(size=leaf.shape), leaf.dtype),
        params,
    )


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, atol=GAP, rtol=GAP)


def files(folder):
    arrays = safetensors.load_file(folder / "adapter_model.safetensors")
    return json.loads((folder / "adapter_config.json").read_text()), arrays


@pytest.mark.parametrize("kind", OTHERS_LATER)
def test_adapters_of_peft_have_its_scores(kind):
    adapter, how = import_peft(HERE / kind, base=BASES / kind)
    found = adapted(kind, how, where=list(adapter)).apply(adapter, ROWS)
    wanted = np.load(HERE / f"{kind}.npy")
    close(found, wanted)
    model, base = load_transformer(BASES / kind)
    assert np.abs(wanted - model.apply(base, ROWS)).max() > 0.1


@pytest.mark.parametrize("kind", MODULES)
def test_what_is_read_and_written_again_are_the_same_products(kind, tmp_path):
    """By name: what peft wrote, and what is written of it here, with its scales."""
    adapter, how = import_peft(HERE / kind, base=BASES / kind)
    export_peft(tmp_path, adapter, how=how, base=BASES / kind)
    (first, ours), (second, theirs) = files(tmp_path), files(HERE / kind)
    assert sorted(ours) == sorted(theirs)
    for name in theirs:
        if "lora_A" not in name:
            continue
        other = name.replace("lora_A", "lora_B")
        scale = second["lora_alpha"] / len(theirs[name])
        wanted = scale * theirs[other] @ theirs[name]
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        alpha = first["alpha_pattern"].get(module, first["lora_alpha"])
        rank = first["rank_pattern"].get(module, first["r"])
        assert module in first["target_modules"] and rank == len(ours[name])
        np.testing.assert_allclose(
            ours[other] @ ours[name] * alpha / rank, wanted, atol=1e-5
        )
    assert first["fan_in_fan_out"] == (kind == "gpt2")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # between peft and transformers
@pytest.mark.parametrize("kind", MODULES)
def test_peft_computes_what_the_adapted_model_does(kind, tmp_path):
    """A mixture of two adapters with a scale, loaded and merged by peft."""
    peft = pytest.importorskip("peft")
    close(np.load(HERE / f"{kind}.npy"), write(kind, tmp_path / "again"))
    how = fb.lora(2, alpha=6)
    model = adapted(kind, how)
    one, other = (moved(model.init(jax.random.key(0)), seed) for seed in (1, 2))
    mixed = mixing.products(0.3, one, other)
    export_peft(tmp_path, mixed, how=how, base=BASES / kind)
    module = peft.PeftModel.from_pretrained(base_of(kind), tmp_path).eval()
    wanted = model.apply(mixed, ROWS)
    assert np.abs(wanted - scores(base_of(kind))).max() > 0.1
    close(scores(module), wanted)
    close(scores(module.merge_and_unload()), wanted)


@pytest.mark.slow
def test_peft_loads_adapters_of_any_module_of_torch(tmp_path):
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(48, 6),
        torch.nn.GELU(),
        torch.nn.Linear(6, 2),
    )
    images = np.random.default_rng(0).normal(size=(3, 1, 6, 6)).astype(np.float32)
    how = fb.lora(2)
    model = fb.adapt(fb.models.from_torch(net, images), how=how, inputs=images)
    adapter = moved(model.init(jax.random.key(0)))
    assert sorted(adapter) == ["0.weight", "3.weight"]
    export_peft(tmp_path, adapter, how=how)
    module = peft.PeftModel.from_pretrained(net, tmp_path).eval()
    close(
        module(torch.as_tensor(images)).detach().numpy(), model.apply(adapter, images)
    )
    again, how = import_peft(tmp_path)
    close(again["0.weight"]["a"], adapter["0.weight"]["a"])


def test_an_adapter_with_a_frozen_a_is_written_with_it(tmp_path):
    how = fb.lora(2, train="b")
    model, base = load_transformer(BASES / "llama_grouped")
    own = fb.adapt(model, base, how=how, inputs=ROWS, where="layers/query/weight")
    adapter = moved(own.init(jax.random.key(0)))
    with pytest.raises(UserError, match="with b is not factors a and b; two adapters"):
        export_peft(tmp_path, adapter, how=how, base=BASES / "llama_grouped")
    whole = fb.with_frozen(model, adapter, how=how, inputs=ROWS)
    export_peft(tmp_path, whole, how=how, base=BASES / "llama_grouped")
    again, plain = import_peft(tmp_path, base=BASES / "llama_grouped")
    both = adapted("llama_grouped", plain, where=list(again))
    close(both.apply(again, ROWS), own.apply(adapter, ROWS))


def test_bad_files_get_one_line(tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(HERE / "gpt2", folder)
    with pytest.raises(InputError, match="c_attn is no module of that base"):
        import_peft(folder, base=BASES / "llama_grouped")
    table, arrays = files(folder)
    (folder / "adapter_config.json").write_text(json.dumps({**table, "use_dora": True}))
    with pytest.raises(InputError, match="use_dora = True is not supported, only Fals"):
        import_peft(folder, base=BASES / "gpt2")
    (folder / "adapter_config.json").write_text(json.dumps(table))
    arrays.pop("base_model.model.transformer.h.0.mlp.c_fc.lora_A.weight")
    safetensors.save_file(arrays, folder / "adapter_model.safetensors")
    with pytest.raises(InputError, match=r"transformer\.h\.0\.mlp\.c_fc lacks a fact"):
        import_peft(folder, base=BASES / "gpt2")
    (folder / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(InputError, match="no adapter of peft: "):
        import_peft(folder, base=BASES / "gpt2")
    with pytest.raises(InputError, match=r"config\.json: no configuration of a base"):
        import_peft(folder, base=tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(UserError, match="model_type 't5' is not one with model_type"):
        import_peft(folder, base=tmp_path)
    change = {"last/bias": {"a": jnp.ones((1, 2)), "b": jnp.ones((2, 1))}}
    with pytest.raises(UserError, match="'last/bias' is not one of layers/query/w"):
        export_peft(tmp_path, change, how=fb.lora(1), base=BASES / "gpt2")
