# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Operations of a client's local step, as XLA's compiler counts them."""

import jax

from fedblend.core import Algorithm, PyTree, Shard
from fedblend.data.federated import FederatedData
from fedblend.simulation.aggregators import empty, finish
from fedblend.simulation.compile import lower


def client_flops(
    algorithm: Algorithm,
    params: PyTree,
    federated_data: FederatedData,
    client: int = 0,
    central: Shard | None = None,
) -> float:
    """Operations of one client's part in a round, of the program compiled for it.

    The compiler counts the body of a loop once: local work has to be one step. It
    counts arithmetic on whole numbers, such as on those of rows, as well.

    Args:
        algorithm: what is run, with one local step.
        params: the initial parameters, or their shapes.
        federated_data: the clients; shapes are those of the one with most rows.
        client: which.
        central: the server's own rows, where it has some.
    """
    shard, key = federated_data.train.shard(client), jax.random.key(0)
    join, state = jax.eval_shape(algorithm.enroll, params, shard, key)
    aggregate = jax.eval_shape(lambda join: finish(empty(join), 1.0), join)
    down, _ = jax.eval_shape(algorithm.start, params, aggregate, central, key)
    message = jax.eval_shape(
        lambda down, state, shard: algorithm.wire.tell(
            down, algorithm.wire.ask(state, shard)
        ),
        down,
        state,
        shard,
    )

    def part(message, state, shard, key):
        up, state = algorithm.client(message, state, shard, key)
        return up._replace(mean_gradient=None, step_sum=None), state

    arguments = (message, state, shard, key)
    compiled = lower(jax.jit(part).trace(*arguments), arguments).compile().func
    return float((compiled.cost_analysis() or {}).get("flops", float("nan")))
