# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The layout of BERT's weights.

Rows are of one segment, the first: its vector is added to those of all places.
A file with the scores of masked tokens has scores at every place, one with a classifier
those of the classes of a row. Without either, or for other classes, the scores of
classes are new: they start as those of a new model.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedblend.models.feedforward import Affine
from fedblend.models.transformer.architecture import Architecture
from fedblend.models.transformer.checkpoint import Checkpoint
from fedblend.models.transformer.parameters import (
    Embedding,
    HeadLayer,
    Layer,
    Scaling,
    Scores,
    Transformer,
    start,
)

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu"}
MASKED, CLASSIFIER, POOLER = "cls.predictions.", "classifier.", "pooler.dense."
UNUSED = ("position_ids", "decoder.weight", "decoder.bias")
"""Counters, and weights of scores that are those of the embedding."""


def architecture(files: Checkpoint, classes: int | None = None) -> Architecture:
    """The architecture by the configuration and, for the head, by the weights.

    Args:
        files: the checkpoint.
        classes: of a new classifier; None to keep the head of the file.
    """
    files.expect(
        position_embedding_type="absolute", is_decoder=False, add_cross_attention=False
    )
    form = Architecture(
        files.count("vocab_size"),
        files.count("max_position_embeddings"),
        files.count("hidden_size"),
        files.count("num_hidden_layers"),
        files.count("num_attention_heads"),
        hidden=files.count("intermediate_size"),
        positions="learned",
        norm="layer",
        norm_order="after",
        norm_embedding=True,
        epsilon=files.setting("layer_norm_eps", 1e-12),
        activation=files.word("hidden_act", "gelu", ACTIVATIONS),
        bias="all",
        causal=False,
        tied=bool(files.setting("tie_word_embeddings", True)),
        pool="first",
    )
    if classes is None and f"{CLASSIFIER}weight" in files:
        classes = len(files.take(f"{CLASSIFIER}weight"))
    if classes is None and f"{MASKED}bias" in files:
        return dataclasses.replace(form, head="masked")
    if classes is None:
        files.refuse("has scores of neither tokens nor classes; give classes=")
    pooled = f"{files.below('bert.')}{POOLER}weight" in files
    return dataclasses.replace(
        form, classes=classes, head="pooler" if pooled else "linear"
    )


def parameters(files: Checkpoint, form: Architecture) -> Transformer:
    """The weights by their names."""
    top = files.below("bert.")

    def stacked(name: str) -> Any:
        return files.stacked(f"{top}encoder.layer.{{}}.{name}", form.layers)

    def product(name: str, of: Callable[[str], Any] = stacked) -> Affine:
        return Affine(of(f"{name}.weight"), of(f"{name}.bias"))

    def scaling(name: str, of: Callable[[str], Any] = stacked) -> Scaling:
        old = f"{name}.gamma" in files or f"{top}encoder.layer.0.{name}.gamma" in files
        both = ("gamma", "beta") if old else ("weight", "bias")
        return Scaling(*(of(f"{name}.{part}") for part in both))

    layers = Layer(
        scaling("attention.output.LayerNorm"),
        product("attention.self.query"),
        product("attention.self.key"),
        product("attention.self.value"),
        product("attention.output.dense"),
        scaling("output.LayerNorm"),
        None,
        product("intermediate.dense"),
        product("output.dense"),
    )
    place = f"{top}embeddings."
    tokens, positions, segments = (
        files.take(f"{place}{name}_embeddings.weight")
        for name in ("word", "position", "token_type")
    )
    embedding = Embedding(
        tokens,
        positions + segments[:1],
        scaling(f"{place}LayerNorm", files.take),
    )
    head = None
    if form.head == "masked":
        dense = product(f"{MASKED}transform.dense", files.take)
        head = HeadLayer(dense, scaling(f"{MASKED}transform.LayerNorm", files.take))
    elif form.head == "pooler":
        head = HeadLayer(product(f"{top}pooler.dense", files.take), None)
    last = _scores(files, form)
    unused = (*UNUSED, *_of_other_heads(files, form))
    files.all_taken(*unused)
    return Transformer(embedding, layers, None, head, last)


def _scores(files: Checkpoint, form: Architecture) -> Scores:
    if form.classes is None:
        own = None if form.tied else files.take(f"{MASKED}decoder.weight")
        # An untied file has both, of which transformers uses the decoder's.
        biases = [f"{MASKED}{name}" for name in ("decoder.bias", "bias")]
        taken = [files.take(name) for name in biases if name in files]
        return Scores(own, taken[0])
    given = f"{CLASSIFIER}weight" in files
    if given and len(files.take(f"{CLASSIFIER}weight")) == form.classes:
        weight, bias = (
            files.take(f"{CLASSIFIER}{name}") for name in ("weight", "bias")
        )
        return Scores(weight, bias)
    small = dataclasses.replace(form, vocabulary=1, length=1, layers=1, hidden=1)
    return start(small, jax.random.key(0), np.float32).last


def _of_other_heads(files: Checkpoint, form: Architecture) -> list[str]:
    """The names of weights of heads that the model does not have."""
    heads = ["cls.seq_relationship."]
    heads += [] if form.head == "masked" else [MASKED, CLASSIFIER]
    heads += [] if form.head == "pooler" else [f"{files.below('bert.')}{POOLER}"]
    return [name for name in files.names() if name.startswith(tuple(heads))]
