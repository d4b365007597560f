# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""SVRG: minibatch gradients corrected by the full gradient at an anchor.

Each client has an anchor w_i, an earlier shared model, and the gradient of all its
rows there. A round, with B_i a batch of client i::

    y_i    <- shared, then steps times:
              y_i <- y_i - rate * (grad f_B(y_i) - grad f_B(w_i) + grad f_i(w_i))
    w_i    <- shared, with the probability ``refresh``
    shared <- shared + mean (y_i - shared)

With one step and everyone taking part it converges to the exact optimum at a constant
rate, where minibatch SGD stays in a neighborhood; with more steps it has FedAvg's
drift, with small cohorts the noise of who takes part. Under ``diana`` it is VR-DIANA.

Where this differs from the papers: every client tosses its own coin, so that not all
compute a full gradient in the same round. The first anchor is the initial model also
where the wrapping method starts elsewhere, as FLIX does; any anchor is unbiased. A
mapped cohort computes the full gradient in every round and uses it when a coin says so.

Reference: Kovalev, Horváth, Richtárik, "Don't jump through hoops and remove those
loops: SVRG and Katyusha are better without the outer loop", ALT 2020, arXiv:1901.08689;
at many clients: Horváth, Kovalev, Mishchenko, Richtárik, Stich, "Stochastic distributed
learning with gradient quantization and variance reduction", 2019, arXiv:1904.05115.
"""

from typing import Annotated, NamedTuple

import jax

from fedblend import keys, trees
from fedblend.algorithms.fedavg import fedavg
from fedblend.batches import everything
from fedblend.checks import Number
from fedblend.core import Algorithm, Loss, PyTree
from fedblend.local import Work, local_update
from fedblend.losses import gradient
from fedblend.registry import algorithm


class SvrgClient(NamedTuple):
    """The state of a client: its anchor, and the gradient of all its rows there."""

    anchor: PyTree
    mean_gradient: PyTree


@algorithm()
def svrg(
    loss: Loss, work: Work, *, refresh: Annotated[float, Number(above=0, most=1)]
) -> Algorithm:
    """FedAvg with variance-reduced minibatch gradients.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work of a round: optimizer, steps, batch size.
        refresh: probability that a round moves a client's anchor. With ``batch_size``
            over the rows of a client, full gradients double the work.
    """
    gradient_at = gradient(loss)

    def make_anchor(params, shard, key):
        whole = everything(shard)._replace(key=keys.named(key, "anchor loss"))
        return SvrgClient(params, gradient_at(params, whole))

    def enroll(params, shard, key):
        return (), make_anchor(params, shard, key)

    def client(down, client, shard, key):
        def direction(here, batch):
            old = gradient_at(client.anchor, batch)
            change = trees.subtract(gradient_at(here, batch), old)
            return trees.add(change, client.mean_gradient)

        up = local_update(direction, down, shard, key, work=work)
        coin = jax.random.bernoulli(keys.named(key, "anchor"), refresh)
        after = jax.lax.cond(
            coin, lambda: make_anchor(down.shared, shard, key), lambda: client
        )
        return up, after

    return fedavg(loss, work)._replace(enroll=enroll, client=client)
