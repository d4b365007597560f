# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Outputs and gradients of PyTorch modules are PyTorch's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch_zoo import ZOO

import fedblend as fb

TOLERANCE = 1e-5
"""Of the largest entry: float32 in another order of operations."""

SLOW = (
    *("mlp", "RNN, two ways", "embedding bag, largest", "text CNN", "LSTM"),
    *("ResNet with group norm", "depthwise separable CNN", "GRU", "activations"),
    *("LSTM, two ways, projected", "transformer encoder", "CNN with group norm"),
)
"""Modules whose operators others of the zoo have, too."""
CASES = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in ZOO]


def relative(ours, theirs):
    theirs = theirs.detach().numpy()
    return np.abs(np.asarray(ours) - theirs).max() / max(np.abs(theirs).max(), 1e-3)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_the_module(name):
    """Compiled, mapped over two sets of parameters, for more rows than the example."""
    torch.manual_seed(0)
    make, draw = ZOO[name]
    module = make()
    example, rows = draw(2), draw(5)
    module(example)  # layers that find their shapes at first
    model = fb.models.from_torch(module, example)
    start = model.init(jax.random.key(0))
    assert set(start) == {path for path, _ in module.named_parameters()}
    params = [start, jax.tree.map(lambda leaf: 0.9 * leaf + 0.01, start)]
    weights = torch.randn(module(rows).shape)

    def total(own):
        outputs = model.apply(own, jnp.asarray(rows.numpy()))
        return (outputs * jnp.asarray(weights.numpy())).sum(), outputs

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    gradients, outputs = jax.jit(jax.vmap(jax.grad(total, has_aux=True)))(stacked)
    for place, own in enumerate(params):
        copy = fb.models.to_torch(own, module)
        expected = copy(rows)
        assert relative(outputs[place], expected) < TOLERANCE
        (expected * weights).sum().backward()
        for path, value in copy.named_parameters():
            assert relative(gradients[path][place], value.grad) < TOLERANCE, path
