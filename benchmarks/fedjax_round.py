# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The same work by FedJAX's federated averaging.

Its batches are drawn without replacement, the only difference. The released version
calls ``jax.tree_map``, which newer releases of JAX no longer have: it is put back.
"""

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg

import handwritten
import work

if not hasattr(jax, "tree_map"):
    setattr(jax, "tree_map", jax.tree.map)  # noqa: B010


def prepare(model, block):
    inputs, labels = work.rows()
    data = [
        fedjax.ClientDataset({"inputs": some, "labels": others})
        for some, others in zip(
            np.split(inputs, work.CLIENTS), np.split(labels, work.CLIENTS), strict=True
        )
    ]

    def slope(params, batch, rng):
        del rng
        return jax.grad(handwritten.loss)(params, batch["inputs"], batch["labels"])

    algorithm = fed_avg.federated_averaging(
        slope,
        client_optimizer=fedjax.optimizers.sgd(work.RATE),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(
            batch_size=work.BATCH, num_steps=work.STEPS, num_epochs=None
        ),
    )
    state = algorithm.init(jax.tree.map(jnp.asarray, work.first_params(model)))
    key = jax.random.PRNGKey(0)

    def advance():
        nonlocal state, key
        for _ in range(block):
            key, *keys = jax.random.split(key, work.CLIENTS + 1)
            clients = list(zip(range(work.CLIENTS), data, keys, strict=True))
            state, _ = algorithm.apply(state, clients)
        return jax.block_until_ready(state.params)

    return advance


if __name__ == "__main__":
    work.main(prepare)
