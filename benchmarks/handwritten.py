# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Federated averaging as one would write it by hand in JAX, for this work alone.

One compiled function for a block of rounds: a scan over chunks of clients, each chunk
mapped, the weighted sum in the carry. What was tried and kept, and what the choice of
chunk costs, is told in docs/benchmarks.md. With ``--devices`` the clients are spread
over so many devices; a CPU is split into them, one thread of clients each.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import work

BEST = {"mlp": (2, 2), "softmax": (20, 2)}
"""The fastest (chunk, unroll) on a CPU; a GPU takes all clients at once."""
BEST_SPREAD = {"mlp": (1, 2), "softmax": (5, 1)}
"""The same where the CPU is split into devices."""


def apply(params, inputs):
    """The scores of a perceptron, or of softmax regression if there is one layer."""
    for weight, bias in params[:-1]:
        inputs = jax.nn.relu(inputs @ weight.T + bias)
    weight, bias = params[-1]
    return inputs @ weight.T + bias


def loss(params, inputs, labels):
    scores = jax.nn.log_softmax(apply(params, inputs))
    return -jnp.take_along_axis(scores, labels[:, None], axis=1).mean()


def train(params, start, key, inputs, labels, *, unroll):
    """The local steps of the client whose rows begin at ``start``."""
    index = jax.random.randint(key, (work.STEPS, work.BATCH), 0, work.EXAMPLES)

    def step(here, rows):
        slope = jax.grad(loss)(here, inputs[start + rows], labels[start + rows])
        return jax.tree.map(lambda p, s: p - work.RATE * s, here, slope), None

    return jax.lax.scan(step, params, index, unroll=unroll)[0]


def average(params, starts, keys, weights, inputs, labels, *, chunk, unroll):
    """The weighted sum of what these clients reach, over all devices."""
    one = partial(train, unroll=unroll)
    many = jax.vmap(one, in_axes=(None, 0, 0, None, None))

    def add(total, members):
        start, key, weight = members
        if chunk == 1:
            reached = one(params, start[0], key[0], inputs, labels)
            return jax.tree.map(lambda t, r: t + weight[0] * r, total, reached), None
        reached = many(params, start, key, inputs, labels)
        return jax.tree.map(
            lambda t, r: t + jnp.tensordot(weight, r, 1), total, reached
        ), None

    members = jax.tree.map(
        lambda leaf: leaf.reshape(-1, chunk), (starts, keys, weights)
    )
    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), members)
    return jax.lax.psum(total, "devices")


def rounds(params, key, inputs, labels, *, mesh, block, chunk, unroll):
    """A block of rounds."""
    each = work.CLIENTS // mesh.size
    spread = jax.shard_map(
        partial(average, chunk=chunk, unroll=unroll),
        mesh=mesh,
        in_specs=(P(), *[P("devices")] * 5),
        out_specs=P(),
        check_vma=False,
    )
    clients = jnp.arange(work.CLIENTS)
    starts = clients % each * work.EXAMPLES
    weights = jnp.full(work.CLIENTS, 1 / work.CLIENTS)

    def round(params, key):
        keys = jax.vmap(partial(jax.random.fold_in, key))(clients)
        return spread(params, starts, keys, weights, inputs, labels), None

    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(block))
    return jax.lax.scan(round, params, keys)[0]


def prepare(model, block, *, devices=1, chunk=None, unroll=None):
    if devices > 1:
        jax.config.update("jax_num_cpu_devices", devices)
    if jax.device_count() < devices:
        raise SystemExit(f"{devices} devices are wanted, {jax.device_count()} there")
    mesh = Mesh(np.array(jax.devices()[:devices]), ("devices",))
    if jax.default_backend() == "cpu":
        best = (BEST if devices == 1 else BEST_SPREAD)[model]
    else:
        best = (work.CLIENTS // devices, 1)
    compute = jax.jit(
        partial(
            rounds,
            mesh=mesh,
            block=block,
            chunk=chunk or best[0],
            unroll=unroll or best[1],
        )
    )
    data = jax.device_put(work.rows(), NamedSharding(mesh, P("devices")))
    whole = NamedSharding(mesh, P())
    params = jax.device_put(work.first_params(model), whole)
    count = 0

    def advance():
        nonlocal params, count
        key = jax.random.fold_in(jax.random.key(0), count)
        params = jax.block_until_ready(compute(params, key, *data))
        count += 1
        return params

    return advance


if __name__ == "__main__":
    work.main(
        prepare,
        devices={"type": int, "default": 1},
        chunk={"type": int},
        unroll={"type": int},
    )
