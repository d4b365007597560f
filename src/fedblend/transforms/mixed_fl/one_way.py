# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""One-way gradient transfer: clients add the central gradient to each of their steps.

A round of Algorithm 2 of the paper; x is the shared model and
``g_c = w_c / w_f grad f_c``::

    server   b <- g_c(x), on one batch
    clients  x_i <- x, then steps times:  x_i <- x_i - rate * (grad f_i(x_i) + b)
    server   x <- the wrapped server's step on the mean of x_i - x

Where this differs from the paper: clients descend f_i and not ``w_f f_i``, so that
rates here are w_f times those of the paper.

Reference: Augenstein, Hard, Ning, Singhal, Kale, Partridge, Mathews, "Mixed federated
learning: joint decentralized and centralized learning", 2022, arXiv:2205.13655.
"""

from fedblend import keys
from fedblend.core import Algorithm
from fedblend.transforms.mixed_fl.central_loss import Central
from fedblend.transforms.mixed_fl.step import (
    MixedServer,
    Sent,
    Settings,
    encoded_correction,
    received,
    sending,
    without_correction,
)


def one_way(algorithm: Algorithm, g_c: Central, settings: Settings) -> Algorithm:
    """The wrapped algorithm, whose clients add the central gradient to their own."""
    rate = settings.merge_optimizer
    merges = settings.merge is not None or not (isinstance(rate, float) and rate == 1)
    if settings.optimizer is not None or merges:
        raise ValueError(
            "one_way: takes no central steps and merges nothing; optimizer, merge and "
            "merge_optimizer go with parallel and two_way"
        )

    def augmented(down, rows, key):
        b = g_c(down.shared, rows, keys.named(key, "central"))
        return down._replace(correction=b)

    def start(params, joins, rows, key):
        down, inner = algorithm.start(params, joins, rows, key)
        return augmented(without_correction(down), rows, key), MixedServer(inner)

    def server(aggregate, down, server, rows, key):
        aggregate, _ = received(aggregate)
        after, inner = algorithm.server(aggregate, down, server.inner, rows, key)
        return augmented(after, rows, key), MixedServer(inner)

    around = sending(algorithm, lambda up: Sent())._replace(start=start, server=server)
    return encoded_correction(around, settings.compressor)
