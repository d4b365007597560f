# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Ditto: personal models that are held near the shared model of any algorithm.

Wraps an algorithm and changes nothing in its training (over FedAvg it is the paper's).
Each client also has v_i, which approaches the minimizer of ``f_i(v) + lam/2 |v -
shared|^2``. A round, for every client i of the cohort::

    the wrapped algorithm's round, from the shared model that was broadcast; then
    steps times:  v_i <- v_i - rate * (grad f_i(v_i; batch) + lam (v_i - shared))

    personal_i = v_i of the client's last round

In all these steps ``shared`` is the model broadcast in this round, neither the client's
own iterate nor the mean that comes out. v_i begins at the initial parameters. With lam
= 0 it is training alone; as lam grows v_i comes to the shared model.

Where this differs from the paper: it does not, over FedAvg with equal weights
(``weights="uniform"``; otherwise those of the run). The steps on v_i have a
number, a batch size and an optimizer of their own, with batches drawn independently of
the wrapped algorithm's, and lam may differ by client, as the paper allows. They take
no ``down.correction``, which belongs to the shared model.

Reference: Li, Hu, Beirami, Smith, "Ditto: fair and robust federated learning through
personalization", ICML 2021, arXiv:2012.04221.
"""

from functools import partial
from typing import Annotated, NamedTuple

from fedblend import keys, trees
from fedblend.batches import client_entry
from fedblend.checks import NOT_NEGATIVE, ByClient, each_client
from fedblend.core import Algorithm, Loss, PyTree
from fedblend.local import Work, descend
from fedblend.losses import gradient
from fedblend.registry import algorithm


class DittoClient(NamedTuple):
    """The state of a client: its own model v_i, and the wrapped algorithm's state."""

    personal: PyTree
    inner: PyTree


@algorithm(keys={"work": "personal"})
def ditto(
    algorithm: Algorithm,
    loss: Loss,
    work: Work,
    *,
    lam: Annotated[ByClient, each_client(NOT_NEGATIVE)],
) -> Algorithm:
    """The wrapped algorithm, and personal models pulled toward its shared model.

    Args:
        algorithm: trains the shared model, which it must broadcast.
        loss: ``loss(params, rows) -> losses[rows]``.
        work: the steps on v_i; a rate below 2 / (lam + smoothness of f_i).
        lam: strength of the pull toward the shared model, 0 or more; a number, or an
            array over clients.

    Example:
        >>> import jax, jax.numpy as jnp, fedblend as fb
        >>> federation, _ = fb.datasets.quadratics(clients=4, dim=2)
        >>> loss = fb.datasets.quadratic_loss
        >>> work = fb.Work(0.1, steps=1, batch_size=None)
        >>> algorithm = fb.ditto(fb.fedavg(loss, work), loss, work, lam=1.0)
        >>> run = fb.simulate(algorithm, jnp.zeros(2), federation, jax.random.key(0),
        ...                   rounds=100).complete()
        >>> measured = fb.metrics.mean_loss(loss)
        >>> own = fb.Batch(federation.train.rows(0))
        >>> bool(measured(run.personal(0), own) < measured(run.shared, own))
        True
    """
    train = partial(descend, gradient(loss), work=work)

    def enroll(params, shard, key):
        join, inner = algorithm.enroll(params, shard, key)
        return join, DittoClient(params, inner)

    def client(down, client, shard, key):
        if down.shared is None:
            raise ValueError("ditto: the wrapped algorithm broadcasts no shared model")
        up, inner = algorithm.client(down, client.inner, shard, key)

        def pull(params):
            gap = trees.sum_squares(trees.subtract(params, down.shared))
            return 0.5 * client_entry(lam, shard) * gap

        own = keys.named(key, "ditto")
        reached, _ = train(client.personal, shard, own, round=down.round, penalty=pull)
        return up, DittoClient(reached, inner)

    return algorithm._replace(
        enroll=enroll,
        client=client,
        personal=lambda down, client, shard, key: client.personal,
        wire=algorithm.wire._replace(
            ask=lambda client, shard: algorithm.wire.ask(client.inner, shard)
        ),
        info=lambda client: algorithm.info(client.inner),
    )
