# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The kinds of change of a frozen base: what their parameters are, and what they do.

For a weight W [out, in] that multiplies rows x::

    lora        x W^T  -->  x W^T + scale (x A^T) B^T       A [rank, in], B [out, rank]
    gated_lora  the same for two pairs of factors, with weights softmax(x G^T) for each
                row                                         G [2, in]
    ia3         x W^T  -->  (1 + v) * (x W^T)               v [out]
    full, bias  W  -->  W + D                               D as W
    prefix      learned keys and values before those of each row, in every layer

*Every change starts as none*: A as PyTorch starts a layer of its own, all others at
zero. "in" are the axes of W over which it is multiplied with the data, whatever W's
layout; a weight of more axes has factors of more axes. For layers that are stacked on
further axes, and scanned, so are their factors: the rank is the first axis of A and the
last of B in any case.

The weights of ``gated_lora`` differ from row to row, and from place to place of a
sequence: there is no matrix that W plus the change would be.

References:
    E. J. Hu et al. LoRA: Low-rank adaptation of large language models. ICLR 2022.
    Y. Sun et al. Improving LoRA in privacy-preserving federated learning (FFA-LoRA).
    ICLR 2024: ``train="b"``, where A stays what it is.
    Bian, Wang, Zhang, Xu. FedALT: Federated fine-tuning through adaptive local training
    with rest-of-world LoRA. AAAI 2026, arXiv:2503.11880: ``gated_lora``.
    H. Liu et al. Few-shot parameter-efficient fine-tuning is better and cheaper than
    in-context learning. NeurIPS 2022: ``ia3``. The paper's vector is 1 + v, and scales
    keys, values and the inner activations of a transformer: ``where`` names their
    weights.
    E. Ben Zaken, Y. Goldberg, S. Ravfogel. BitFit: Simple parameter-efficient
    fine-tuning for transformer-based masked language-models. ACL 2022: ``bias``.
    X. L. Li, P. Liang. Prefix-tuning: Optimizing continuous prompts for generation. ACL
    2021: ``prefix``, without its network that makes the prefix in training.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, Protocol

import jax
import jax.numpy as jnp

from fedblend import keys
from fedblend.checks import COUNT, POSITIVE, WHOLE, gate, optional, words
from fedblend.core import Key, PyTree
from fedblend.errors import SettingError
from fedblend.models.model import Model
from fedblend_adapters.uses import LINEAR, WeightUse, uses_of
from fedblend_adapters.weight import RANK, Kind, Labeled, Meeting, Weight, contract

Trained = Literal["both", "b"]
"""Which factors are trained."""
PAIR = ("personal", "shared")


class Change(Kind, Protocol):
    """A kind of change of weights."""

    def takes(self, use: WeightUse) -> bool:
        """Whether a weight with this use can have such a change."""
        ...

    def usual(self, use: WeightUse) -> bool:
        """Whether it has one where the user does not say which weights have."""
        return self.takes(use) and use.operation != "gather" and not use.is_head

    def init(self, key: Key, path: str, use: WeightUse) -> dict[str, PyTree]:
        """The parameters of the change of one weight."""
        ...

    def constants(self, path: str, use: WeightUse) -> dict[str, jax.Array]:
        """What belongs to the change and is no parameter."""
        return {}

    def parts(self, params: dict[str, PyTree], use: WeightUse) -> dict[str, Labeled]:
        """The parameters with the axes of the weight that theirs are."""
        ...


@dataclasses.dataclass(frozen=True)
class Lora(Change):
    """What ``lora`` returns."""

    rank: int
    scale: float
    train: Trained
    seed: int

    def takes(self, use: WeightUse) -> bool:
        """Whether a weight with this use can have such a change."""
        return use.operation in LINEAR and bool(use.inward) and bool(use.outward)

    def init(self, key: Key, path: str, use: WeightUse) -> dict[str, jax.Array]:
        """The parameters of the change of one weight."""
        outward = use.sizes(use.stack, use.outward)
        found = {"b": jnp.zeros((*outward, self.rank), use.adapter_dtype)}
        if self.train == "both":
            found["a"] = self._first(keys.named(key, path), use)
        return found

    def _first(self, key: Key, use: WeightUse) -> jax.Array:
        # PyTorch's start of a layer, kaiming_uniform_ with a = sqrt(5). A row of a
        # table is looked up alone, as if it were multiplied with a single one.
        entries = 1 if use.operation == "gather" else math.prod(use.sizes(use.inward))
        bound = 1 / math.sqrt(entries)
        shape = (self.rank, *use.sizes(use.stack, use.inward))
        return jax.random.uniform(key, shape, use.adapter_dtype, -bound, bound)

    def constants(self, path: str, use: WeightUse) -> dict[str, jax.Array]:
        """What belongs to the change and is no parameter."""
        if self.train == "both":
            return {}
        key = keys.named(jax.random.key(self.seed), "lora")
        return {"a": self._first(keys.named(key, path), use)}

    def parts(self, params: dict[str, jax.Array], use: WeightUse) -> dict[str, Labeled]:
        """The parameters with the axes of the weight that theirs are."""
        return {
            "a": Labeled(params["a"], (RANK, *use.stack, *use.inward)),
            "b": Labeled(params["b"], (*use.stack, *use.outward, RANK)),
        }

    def change(self, weight: Weight, at: Meeting) -> jax.Array | None:
        """The output of an operation with the change; None if that needs the sum."""
        a, b = weight.parts["a"], weight.parts["b"]
        if at.over == {*a.labels} - {*b.labels}:
            first, second = a, b
        elif at.over == {*b.labels} - {*a.labels}:
            first, second = b, a
        else:
            return None
        middle = at.linear(first)
        middle = Labeled(self.scale * middle.array, middle.labels)
        second = Labeled(second.array.astype(middle.array.dtype), second.labels)
        change = contract(middle, second, at.out.labels).array
        return at.out.array + change.astype(at.out.array.dtype)

    def merge(
        self, base: Labeled, parts: dict[str, Labeled], operation: str
    ) -> jax.Array:
        """The sum of base and change."""
        change = self.scale * contract(parts["a"], parts["b"], base.labels).array
        return (base.array + change).astype(base.array.dtype)


@gate(rank=COUNT, alpha=optional(POSITIVE), train=words("both", "b"), seed=WHOLE)
def lora(
    rank: int = 8,
    *,
    alpha: float | None = None,
    train: Trained = "both",
    seed: int = 0,
) -> Lora:
    """A change of low rank of weights that multiply the data, for ``adapt``.

    Args:
        rank: of the change of each weight.
        alpha: the change is scaled by ``alpha / rank``; by 1 if None.
        train: "b" keeps A as it starts: clients' changes then sum up exactly, since
            the mean of products with the same A is the product with the mean.
        seed: of that A, which all clients have.

    Example:
        >>> lora(4, alpha=8).scale
        2.0
    """
    return Lora(rank, 1.0 if alpha is None else float(alpha) / rank, train, seed)


def add_frozen(model: Model, adapter: PyTree, *, how: Lora, inputs: PyTree) -> PyTree:
    """An adapter of ``lora(train="b")`` with the A that all have, and is no parameter.

    Args:
        model: what was adapted.
        adapter: parameters of the adapted model.
        how: that ``lora``.
        inputs: some rows, or their shapes.
    """
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    uses = uses_of(model, shapes, inputs)
    return {
        path: change | how.constants(path, uses[path])
        for path, change in adapter.items()
    }


@dataclasses.dataclass(frozen=True)
class GatedLora(Change):
    """What ``gated_lora`` returns."""

    each: Lora

    def takes(self, use: WeightUse) -> bool:
        """Whether a weight with this use can have such a change."""
        return self.each.takes(use)

    def init(self, key: Key, path: str, use: WeightUse) -> dict[str, PyTree]:
        """The parameters of the change of one weight."""
        shape = (len(PAIR), *use.sizes(use.stack, use.inward))
        both = {name: self.each.init(keys.named(key, name), path, use) for name in PAIR}
        return {**both, "gate": jnp.zeros(shape, use.adapter_dtype)}

    def parts(self, params: dict[str, PyTree], use: WeightUse) -> dict[str, Labeled]:
        """The parameters with the axes of the weight that theirs are."""
        found = {
            f"{name} {factor}": part
            for name in PAIR
            for factor, part in self.each.parts(params[name], use).items()
        }
        gate = Labeled(params["gate"], (RANK, *use.stack, *use.inward))
        return {**found, "gate": gate}

    def change(self, weight: Weight, at: Meeting) -> jax.Array | None:
        """The output of an operation with the change; None if that needs the sum."""
        parts = weight.parts
        a, b = parts["personal a"], parts["personal b"]
        if at.over != {*a.labels} - {*b.labels}:
            return None
        scores = at.linear(parts["gate"])
        axis = scores.labels.index(RANK)
        wide = jnp.promote_types(scores.array.dtype, jnp.float32)
        weights = jax.nn.softmax(scores.array.astype(wide), axis=axis)
        out = at.out.array
        for place, name in enumerate(PAIR):
            middle = at.linear(parts[f"{name} a"])
            own = jax.lax.slice_in_dim(weights, place, place + 1, axis=axis)
            scaled = self.each.scale * own.astype(middle.array.dtype) * middle.array
            last = parts[f"{name} b"]
            last = Labeled(last.array.astype(scaled.dtype), last.labels)
            change = contract(Labeled(scaled, middle.labels), last, at.out.labels)
            out = out + change.array.astype(out.dtype)
        return out

    def merge(
        self, base: Labeled, parts: dict[str, Labeled], operation: str
    ) -> jax.Array:
        """There is no sum: one line on what to leave out."""
        shape = list(base.array.shape)
        raise SettingError(
            "adapt: where",
            f"a weight {shape} is used in {operation!r}, which a change that depends "
            "on the input does not go through: leave it out",
        )


@gate(rank=COUNT, alpha=optional(POSITIVE))
def gated_lora(rank: int = 8, *, alpha: float | None = None) -> GatedLora:
    """Two changes of low rank, weighed by the input, for ``adapt``.

    Parameters of each weight are ``{"personal": {"a", "b"}, "shared": {"a", "b"},
    "gate"}``: ``fedalt_lora`` trains the first and the gate, and keeps the mean of
    other clients' in the second.

    Args:
        rank: of each change of each weight.
        alpha: changes are scaled by ``alpha / rank``; by 1 if None.

    Example:
        >>> gated_lora(4, alpha=8).each.scale
        2.0
    """
    return GatedLora(lora(rank, alpha=alpha))


@dataclasses.dataclass(frozen=True)
class Ia3(Change):
    """What ``ia3`` returns."""

    def takes(self, use: WeightUse) -> bool:
        """Whether a weight with this use can have such a change."""
        return use.operation in LINEAR and bool(use.outward)

    def init(self, key: Key, path: str, use: WeightUse) -> dict[str, jax.Array]:
        """The parameters of the change of one weight."""
        shape = use.sizes(use.stack, use.outward)
        return {"scale": jnp.zeros(shape, use.adapter_dtype)}

    def parts(self, params: dict[str, jax.Array], use: WeightUse) -> dict[str, Labeled]:
        """The parameters with the axes of the weight that theirs are."""
        return {"scale": Labeled(params["scale"], (*use.stack, *use.outward))}

    def change(self, weight: Weight, at: Meeting) -> jax.Array | None:
        """The output of an operation with the change; None if that needs the sum."""
        scale = weight.parts["scale"]
        if not {*scale.labels} <= {*at.out.labels}:
            return None
        factor = 1 + scale.align(at.out.labels)
        return at.out.array * factor.astype(at.out.array.dtype)

    def merge(
        self, base: Labeled, parts: dict[str, Labeled], operation: str
    ) -> jax.Array:
        """The base with its channels scaled."""
        whole = base.array * (1 + parts["scale"].align(base.labels))
        return whole.astype(base.array.dtype)


@dataclasses.dataclass(frozen=True)
class Full(Change):
    """What ``full`` and ``bias`` return."""

    biases: bool = False
    """Only what is added to activations is changed, see ``models.parts``."""

    def takes(self, use: WeightUse) -> bool:
        """Whether a weight with this use can have such a change."""
        return use.is_bias or not self.biases

    def usual(self, use: WeightUse) -> bool:
        """Whether it has one where the user does not say which weights have."""
        return self.takes(use)

    def init(self, key: Key, path: str, use: WeightUse) -> dict[str, jax.Array]:
        """The parameters of the change of one weight."""
        return {"change": jnp.zeros(use.shape, use.adapter_dtype)}

    def parts(self, params: dict[str, jax.Array], use: WeightUse) -> dict[str, Labeled]:
        """The parameters with the axes of the weight that theirs are."""
        return {"change": Labeled(params["change"], tuple(range(len(use.shape))))}

    def change(self, weight: Weight, at: Meeting) -> jax.Array | None:
        """None: every operation needs the sum."""
        return None

    def merge(
        self, base: Labeled, parts: dict[str, Labeled], operation: str
    ) -> jax.Array:
        """The sum of base and change."""
        whole = base.array + parts["change"].align(base.labels)
        return whole.astype(base.array.dtype)


def ia3() -> Ia3:
    """A scale for each channel that a weight gives, for ``adapt``."""
    return Ia3()


def full() -> Full:
    """Any change of weights, all of them unless ``where`` says which, for ``adapt``.

    The parameters are the difference from the base: an algorithm that pulls models
    towards zero, or sends what changed, then does so from the base.
    """
    return Full()


def bias() -> Full:
    """A change of biases, all of them unless ``where`` says which, for ``adapt``."""
    return Full(biases=True)


@dataclasses.dataclass(frozen=True)
class PrefixKind:
    """What ``prefix`` returns."""

    length: int


@gate(length=COUNT)
def prefix(length: int = 16) -> PrefixKind:
    """Learned keys and values for attention, for ``adapt``.

    Args:
        length: the number of places that stand before those of a row.
    """
    return PrefixKind(length)


How = Lora | GatedLora | Ia3 | Full | PrefixKind
"""All kinds."""
KINDS: dict[str, Callable[..., How]] = {
    "lora": lora,
    "gated_lora": gated_lora,
    "ia3": ia3,
    "bias": bias,
    "full": full,
    "prefix": prefix,
}
"""What makes them, by name."""
