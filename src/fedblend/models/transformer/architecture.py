# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a transformer is, apart from its parameters: sizes, and which kind of what."""

import dataclasses
from typing import Any

from fedblend.checks import COUNT, FLAG, POSITIVE, optional, words
from fedblend.errors import UserError

POSITIONS = ("rotary", "learned")
NORMS = ("rms", "layer")
ORDERS = ("before", "after")
ACTIVATIONS = ("silu_gated", "gelu_gated", "gelu", "gelu_tanh", "relu")
BIASES = ("none", "attention", "hidden", "all")
POOLS = ("mean", "first")
HEADS = ("linear", "pooler", "masked")

RULES = {
    "vocabulary": COUNT,
    "length": COUNT,
    "width": COUNT,
    "layers": COUNT,
    "heads": COUNT,
    "kv_heads": optional(COUNT),
    "head_width": optional(COUNT),
    "hidden": optional(COUNT),
    "positions": words(*POSITIONS),
    "rotary_base": POSITIVE,
    "norm": words(*NORMS),
    "norm_order": words(*ORDERS),
    "norm_embedding": FLAG,
    "epsilon": POSITIVE,
    "activation": words(*ACTIVATIONS),
    "bias": words(*BIASES),
    "causal": FLAG,
    "tied": FLAG,
    "classes": optional(COUNT),
    "pool": words(*POOLS),
    "head": words(*HEADS),
    "remat": FLAG,
    "unroll": FLAG,
}
"""What each field may be."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The sizes and kinds of a transformer; a ``UserError`` for what does not fit."""

    vocabulary: int
    """Number of tokens."""
    length: int = 1024
    """Places of the longest row; rotary positions do not need it."""
    width: int = 128
    """Of the states between layers."""
    layers: int = 4
    heads: int = 4
    """Of attention."""
    kv_heads: int | None = None
    """Heads of keys and values, a divisor of ``heads``, which share them in groups
    (grouped-query attention); as many as ``heads`` if None."""
    head_width: int | None = None
    """Of a head; ``width / heads`` if None."""
    hidden: int | None = None
    """Width inside of the feedforward half of a layer. If None, 4 times ``width``;
    gated, 8/3 of it (as many weights), up to a multiple of 8."""
    positions: str = "rotary"
    """"rotary": queries and keys are rotated by angles that grow with the place;
    "learned": a vector for each place."""
    rotary_base: float = 10000.0
    """The slowest angle turns about once in ``2 pi`` times as many places."""
    norm: str = "rms"
    """"rms": over the root of the mean square; "layer": less the mean, over the
    deviation, with an offset."""
    norm_order: str = "before"
    """"before" attention and the feedforward half, or "after", on the sum."""
    norm_embedding: bool = False
    """Whether embeddings are normalized."""
    epsilon: float = 1e-5
    """Under the root of a normalization."""
    activation: str = "silu_gated"
    """"silu_gated", "gelu_gated", "gelu" (exact), "gelu_tanh" or "relu"."""
    bias: str = "none"
    """Which products have a bias: "none", "attention", "hidden" or "all"."""
    causal: bool = True
    """Whether a place sees the places before it only."""
    tied: bool = True
    """Whether the scores of tokens have the weights of the embedding."""
    classes: int | None = None
    """Scores of a row; None for scores of the tokens at every place."""
    pool: str = "mean"
    """The features of a row: the "mean" over its places, or those of the "first"."""
    head: str = "linear"
    """"linear" scores; "pooler": after a layer with tanh; "masked": after a layer with
    the activation and a normalization. The last two are those of BERT."""
    remat: bool = False
    """Compute the inside of layers again for the gradient instead of keeping it: less
    memory, about a third more time."""
    unroll: bool = False
    """Compile every layer by itself: longer to compile, and faster on a GPU, where
    what the gradient needs is not copied from and to arrays of all layers."""

    def __post_init__(self):
        for name, rule in RULES.items():
            rule(f"transformer: {name}", getattr(self, name))
        if self.heads % self.kv:
            allowed = f"a divisor of heads = {self.heads}"
            raise UserError("transformer: kv_heads", self.kv_heads, allowed)
        if self.head_width is None and self.width % self.heads:
            allowed = f"a divisor of width = {self.width}, and no head_width is given"
            raise UserError("transformer: heads", self.heads, allowed)
        if self.positions == "rotary" and self.wide % 2:
            allowed = "even, which rotary positions need"
            raise UserError("transformer: head_width", self.wide, allowed)

    @property
    def kv(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def wide(self) -> int:
        """The width of a head."""
        return self.head_width or self.width // self.heads

    @property
    def gated(self) -> bool:
        """Whether the feedforward half has a gate."""
        return self.activation.endswith("_gated")

    @property
    def inner(self) -> int:
        """The width inside of the feedforward half."""
        usual = -(-8 * self.width // 24) * 8 if self.gated else 4 * self.width
        return self.hidden or usual

    def as_table(self) -> dict[str, Any]:
        """All fields by name, such as a JSON file has them."""
        return dataclasses.asdict(self)
