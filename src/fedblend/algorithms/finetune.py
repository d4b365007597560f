# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning: train together, then take local steps on every client.

Wraps an algorithm and changes nothing in its training; only the model that a client
deploys is another one::

    personal_i <- steps of SGD on f_i from the wrapped algorithm's personal model

Over FedAvg or SCAFFOLD this is what the personalization papers call the "localized"
model, and it is the baseline that each of them has to beat.

Where this differs from the papers: it does not. The steps are taken on the client's
training rows whenever its model is needed, and the result is not stored.

Reference: Wang, Mathews, Kiddon, Eichner, Beaufays, Ramage, "Federated evaluation of
on-device personalization", 2019, arXiv:1910.10252.
"""

from functools import partial

from fedblend import keys
from fedblend.core import Algorithm, Loss
from fedblend.local import WorkOrNone, descend
from fedblend.losses import gradient
from fedblend.registry import ADAPTS, algorithm


@algorithm(keys={"work": "finetune"}, new_client=ADAPTS)
def finetune(algorithm: Algorithm, loss: Loss, work: WorkOrNone) -> Algorithm:
    """The wrapped algorithm, deployed after some local steps.

    Args:
        algorithm: trains the shared model.
        loss: ``loss(params, rows) -> losses[rows]``.
        work: the fine-tuning: optimizer, steps, batch size.
    """
    train = partial(descend, gradient(loss), work=work)

    def personal(down, client, shard, key):
        before = algorithm.personal(down, client, shard, key)
        own = keys.named(key, "finetune")
        return train(before, shard, own, round=down.round)[0]

    return algorithm._replace(personal=personal)
