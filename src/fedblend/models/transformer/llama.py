# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The layout of Llama's weights."""

from typing import Any

from fedblend.models.feedforward import Affine
from fedblend.models.transformer.architecture import Architecture
from fedblend.models.transformer.checkpoint import CONFIG, Checkpoint
from fedblend.models.transformer.parameters import (
    Embedding,
    Layer,
    Scaling,
    Scores,
    Transformer,
)

ACTIVATIONS = {"silu": "silu_gated", "swish": "silu_gated", "gelu": "gelu_gated"}
UNUSED = ("rotary_emb.inv_freq", "lm_head.weight")
"""Speeds of angles, and the weight of scores where it is that of the embedding."""


def architecture(files: Checkpoint) -> Architecture:
    """The architecture by the configuration."""
    files.expect(pretraining_tp=1)
    heads = files.count("num_attention_heads")
    biased = files.setting("attention_bias", False), files.setting("mlp_bias", False)
    return Architecture(
        files.count("vocab_size"),
        files.count("max_position_embeddings", 2048),
        files.count("hidden_size"),
        files.count("num_hidden_layers"),
        heads,
        files.count("num_key_value_heads", heads),
        files.count("head_dim", files.count("hidden_size") // heads),
        files.count("intermediate_size"),
        rotary_base=_rotary_base(files),
        epsilon=files.setting("rms_norm_eps", 1e-6),
        activation=files.word("hidden_act", "silu", ACTIVATIONS),
        bias={
            (False, False): "none",
            (True, False): "attention",
            (False, True): "hidden",
            (True, True): "all",
        }[bool(biased[0]), bool(biased[1])],
        tied=bool(files.setting("tie_word_embeddings", False)),
    )


def _rotary_base(files: Checkpoint) -> float:
    """The base of the angles, if these are not scaled otherwise."""
    for key in ("rope_scaling", "rope_parameters"):
        table = files.config.get(key) or {}
        kind = table.get("rope_type", table.get("type", "default"))
        if kind != "default" or table.get("partial_rotary_factor", 1.0) != 1.0:
            why = f"{key} = {table} is not supported, only plain angles"
            files.refuse(f"{CONFIG}: {why}")
    own = (files.config.get("rope_parameters") or {}).get("rope_theta")
    return float(own or files.setting("rope_theta", 10000.0))


def parameters(files: Checkpoint, form: Architecture) -> Transformer:
    """The weights by their names."""
    top = files.below("model.")

    def stacked(name: str) -> Any:
        return files.stacked(f"{top}layers.{{}}.{name}", form.layers)

    def product(name: str) -> Affine:
        part = "attention" if name.startswith("self_attn") else "hidden"
        biased = form.bias in (part, "all")
        bias = stacked(f"{name}.bias") if biased else None
        return Affine(stacked(f"{name}.weight"), bias)

    def scaling(name: str) -> Scaling:
        return Scaling(stacked(f"{name}.weight"), None)

    layers = Layer(
        scaling("input_layernorm"),
        product("self_attn.q_proj"),
        product("self_attn.k_proj"),
        product("self_attn.v_proj"),
        product("self_attn.o_proj"),
        scaling("post_attention_layernorm"),
        product("mlp.gate_proj"),
        product("mlp.up_proj"),
        product("mlp.down_proj"),
    )
    tokens = files.take(f"{top}embed_tokens.weight")
    norm = Scaling(files.take(f"{top}norm.weight"), None)
    own = None if form.tied else files.take("lm_head.weight")
    files.all_taken(*UNUSED)
    embedding = Embedding(tokens, None, None)
    return Transformer(embedding, layers, norm, None, Scores(own, None))
