# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Two adapters of the same base at once, one of them to be shared."""

from fedblend import keys
from fedblend.checks import Instance, gate
from fedblend.mixing import Apply, sum_of_changes
from fedblend.models.model import Model


@gate(model=Instance(Model, "a Model"))
def two_adapters(model: Model) -> Model:
    """The model whose change of the base is the sum of two.

    Its parameters are ``{"shared": adapter, "personal": adapter}``: methods with a
    personal part, such as ``fedalt(..., personal=["personal"])``, keep the second one
    at the client.

    Args:
        model: what ``adapt`` returned, with a change of weights: ``gated_lora`` has two
            adapters of its own, and a sum of prefixes is no sum of changes.

    Example:
        >>> import jax, jax.numpy as jnp, fedblend as fb
        >>> rows = jnp.ones((2, 4))
        >>> plain = fb.models.mlp(4, 3, hidden=(8,))
        >>> model = two_adapters(fb.adapt(plain, how=fb.lora(2), inputs=rows))
        >>> sorted(model.init(jax.random.key(0)))
        ['personal', 'shared']
    """

    def init(key):
        own = model.init(keys.named(key, "personal"))
        return {"shared": model.init(key), "personal": own}

    def of_both(function: Apply | None) -> Apply | None:
        def compute(params, inputs):
            whole = sum_of_changes(params["shared"], params["personal"])
            return function(whole, inputs)  # pyright: ignore[reportOptionalCall]

        return None if function is None else compute

    halves = of_both(model.features), of_both(model.head)
    return Model(init, of_both(model.apply), *halves)  # pyright: ignore
