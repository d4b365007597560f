# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a round costs a client in arithmetic, as the compiler counts it."""

import jax

from fedblend.core import Algorithm, PyTree, Shard
from fedblend.data.federation import Federation
from fedblend.runtime import reduce


def client_flops(
    algorithm: Algorithm,
    params: PyTree,
    federation: Federation,
    client: int = 0,
    central: Shard | None = None,
) -> float:
    """Operations of one client's part in a round, of the program compiled for it.

    The compiler counts the body of a loop once: local work has to be one step. It
    counts arithmetic on whole numbers, such as on those of rows, as well.

    Args:
        algorithm: what is run, with one local step.
        params: the initial parameters, or their shapes.
        federation: the clients; shapes are those of the one with most rows.
        client: which.
        central: the server's own rows, where it has some.
    """
    shard, key = federation.train.shard(client), jax.random.key(0)
    hello, state = jax.eval_shape(algorithm.enroll, params, shard, key)
    heard = jax.eval_shape(
        lambda hello: reduce.hear(reduce.nothing_heard(hello), 1.0), hello
    )
    down, _ = jax.eval_shape(algorithm.start, params, heard, central, key)
    told = jax.eval_shape(
        lambda down, state, shard: algorithm.tell(down, algorithm.ask(state, shard)),
        *(down, state, shard),
    )

    def part(down, state, shard, key):
        up, state = algorithm.client(down, state, shard, key)
        return up._replace(slope=None, stretch=None), state

    compiled = jax.jit(part).lower(told, state, shard, key).compile()
    return float((compiled.cost_analysis() or {}).get("flops", float("nan")))
