# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of ``transformers`` have its scores here, and bad ones one line."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from write_checkpoints import HERE, KINDS, ROWS, write

from fedblend.errors import InputError
from fedblend.models import (
    Architecture,
    build_transformer,
    load_transformer,
    save_transformer,
)

safetensors = pytest.importorskip("safetensors.numpy")
KEY = jax.random.key(0)
GAP = 1e-4
"""Of scores of about 1 to 10 in float32, by two libraries."""


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_transformers(kind):
    model, params = load_transformer(HERE / kind)
    found = jax.jit(model.apply)(params, ROWS)
    wanted = np.load(HERE / kind / "scores.npy")
    apart = wanted - wanted.mean(axis=0, keepdims=True)
    assert np.std(apart) > 0.1  # scores that depend on the row
    np.testing.assert_allclose(found, wanted, atol=GAP, rtol=GAP)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_the_transformers_installed(kind, tmp_path):
    pytest.importorskip("transformers")
    wanted = write(kind, tmp_path)
    model, params = load_transformer(tmp_path)
    np.testing.assert_allclose(model.apply(params, ROWS), wanted, atol=GAP, rtol=GAP)


def test_a_checkpoint_of_several_files_has_an_index():
    assert len(list((HERE / "llama_sharded").glob("*.safetensors"))) > 1
    assert (HERE / "llama_sharded" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("kind", ["llama_grouped", "gpt2", "bert_classes"])
def test_init_draws_weights_of_the_same_shapes(kind):
    model, params = load_transformer(HERE / kind, dtype="bfloat16", remat=True)
    shapes = jax.eval_shape(model.init, KEY)
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
    for one, other in zip(
        jax.tree.leaves(shapes), jax.tree.leaves(params), strict=True
    ):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.dtype == jnp.bfloat16


def test_an_encoder_may_get_other_classes():
    model, params = load_transformer(HERE / "bert_masked", classes=5)
    assert jax.eval_shape(model.apply, params, ROWS).shape == (3, 5)
    other, own = load_transformer(HERE / "bert_classes", classes=5)
    assert jax.eval_shape(other.apply, own, ROWS).shape == (3, 5)
    assert own.head is not None and params.head is None  # a pooler, where there is one


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_transformer_of_ones_own_comes_back(dtype, tmp_path):
    form = Architecture(11, 8, 8, 2, 2, kv_heads=1, positions="learned", norm="layer")
    params = build_transformer(form, dtype=jnp.dtype(dtype)).init(KEY)
    save_transformer(tmp_path / "base", form, params)
    names = set(safetensors.load_file(tmp_path / "base" / "model.safetensors"))
    assert {"embedding/tokens", "layers/query/weight"} <= names
    model, again = load_transformer(tmp_path / "base")
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    wanted = build_transformer(form, dtype=jnp.dtype(dtype)).apply(params, ROWS)
    np.testing.assert_array_equal(model.apply(again, ROWS), wanted)


def changed(kind: str, folder: Path, **settings) -> Path:
    """A copy of a checkpoint with other settings; None takes one away."""
    shutil.copytree(HERE / kind, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    for key, value in settings.items():
        config.pop(key, None)
        config |= {} if value is None else {key: value}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("gpt2", {"model_type": "gpt3"}, "model_type = 'gpt3'; did you mean 'gpt2'?"),
        ("gpt2", {"n_embd": None}, "config.json has no 'n_embd'"),
        ("gpt2", {"n_embd": "8"}, "n_embd = '8' is not a whole number above 0"),
        ("gpt2", {"n_head": 3}, "transformer: heads: 3 is not a divisor"),
        (
            "gpt2",
            {"activation_function": "mish"},
            "activation_function = 'mish' is not supported, but 'gelu_new'",
        ),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx = True is not supported, only False",
        ),
        ("gpt2", {"n_layer": 3}, "has no weight 'transformer.h.2.attn.c_attn.weight'"),
        ("gpt2", {"n_layer": 1}, "weights that config.json has no place for"),
        ("gpt2", {"vocab_size": 12}, "embedding/tokens are \\[11, 8\\]"),
        ("llama_grouped", {"rope_scaling": YARN}, "rope_scaling = .* not supported"),
        ("llama_grouped", {"rope_parameters": YARN}, "rope_parameters = .* not supp"),
        ("llama_grouped", {"num_key_value_heads": 4}, "key/weight are \\[2, 8, 8\\]"),
        ("llama_tied_biased", {"tie_word_embeddings": False}, "no weight 'lm_head"),
        ("llama_tied_biased", {"mlp_bias": False}, "mlp.down_proj.bias' and 5 more"),
        ("bert_masked", {"position_embedding_type": "relative_key"}, "only 'absolute'"),
        ("bert_masked", {"is_decoder": True}, "is_decoder = True is not supported"),
    ],
)
def test_what_is_not_supported_is_one_line(kind, settings, message, tmp_path):
    folder = changed(kind, tmp_path / kind, **settings)
    with pytest.raises(InputError, match=message) as caught:
        load_transformer(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_files_that_are_missing_or_damaged_are_one_line(tmp_path):
    def refused(message: str, **options):
        with pytest.raises(InputError, match=message) as caught:
            load_transformer(tmp_path, **options)
        assert "\n" not in str(caught.value)

    refused("has no config.json")
    (tmp_path / "config.json").write_text("{")
    refused("config.json is not JSON")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    refused("has neither model.safetensors nor model.safetensors.index.json")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refused("pytorch_model.bin holds pickled weights, which are never read")
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 20)
    refused("model.safetensors is not intact")
    changed("gpt2", tmp_path)
    cut = (HERE / "gpt2" / "model.safetensors").read_bytes()[:-4]
    (tmp_path / "model.safetensors").write_bytes(cut)
    refused("model.safetensors is not intact")
    changed("gpt2", tmp_path)
    refused("classes: 3 is not for gpt2", classes=3)
    (tmp_path / "model.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    refused("names '../other.safetensors', which is no file of this folder")
    index.write_text(json.dumps({"weight_map": {"a": "other.safetensors"}}))
    refused("has no other.safetensors")
    shutil.copy(HERE / "gpt2" / "model.safetensors", tmp_path / "other.safetensors")
    refused("other.safetensors has no 'a', which .* says it has")
    index.write_text("[]")
    refused("is not a JSON object")


def test_a_setting_of_ones_own_that_is_unknown_is_one_line(tmp_path):
    form = Architecture(11, 8, 8, 2, 2)
    save_transformer(tmp_path, form, build_transformer(form).init(KEY))
    table = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**table, "widht": 8}))
    with pytest.raises(InputError, match="'widht' is unknown; did you mean 'width'"):
        load_transformer(tmp_path)
