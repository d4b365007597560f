# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The precision of a model's matrix products, apart from that of its parameters."""

from typing import Literal

import jax
import jax.numpy as jnp

from fedblend.checks import Instance, gate, words
from fedblend.core import PyTree
from fedblend.mixing import Apply
from fedblend.models.model import Model

Products = Literal["float32", "tf32", "bfloat16"]


@gate(model=Instance(Model, "a Model"), products=words("float32", "tf32", "bfloat16"))
def with_products(model: Model, products: Products) -> Model:
    """The model with matrix products of another precision.

    Parameters, gradients, optimizer and sums over clients keep theirs. "float32" has
    exact products, "tf32" rounds factors to 10 bits on GPUs that can (JAX's default
    there; a CPU has exact ones), and "bfloat16" rounds weights and activations to 8
    bits, on every device.

    Example:
        >>> from fedblend.models import mlp
        >>> model = with_products(mlp(4, 3, hidden=(8,)), "bfloat16")
        >>> params = model.init(jax.random.key(0))
        >>> params.last.weight.dtype, model.apply(params, jnp.ones((2, 4))).dtype
        (dtype('float32'), dtype('float32'))
    """

    def rounded(apply: Apply) -> Apply:
        def low(params, inputs):
            leaves = jax.tree.leaves(params)
            own = jnp.result_type(*leaves) if leaves else jnp.float32
            outputs = apply(_cast(params, jnp.bfloat16), _cast(inputs, jnp.bfloat16))
            return _cast(outputs, own)

        def named(params, inputs):
            exact = {"float32": "highest", "tf32": "tensorfloat32"}[products]
            with jax.default_matmul_precision(exact):
                return apply(params, inputs)

        return low if products == "bfloat16" else named

    features, head = (
        None if half is None else rounded(half) for half in (model.features, model.head)
    )
    return model._replace(apply=rounded(model.apply), features=features, head=head)


def _cast(tree: PyTree, dtype) -> PyTree:
    """Floating leaves in this dtype."""
    return jax.tree.map(
        lambda leaf: (
            leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        ),
        tree,
    )
