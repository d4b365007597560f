# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Parallel training: clients and server train from one model, and both moves add up.

A round of Algorithm 1 of the paper without augmenting gradients; x is the shared model
and ``g_c = w_c / w_f grad f_c``::

    clients  x_f <- a round of the wrapped algorithm from x
    server   x_c <- x, then steps times:  x_c <- x_c - central rate * g_c(x_c)
    merge    x   <- x + (x_f - x) + (x_c - x)

Central steps go as far as the clients do, unless ``optimizer`` is given: the central
rate times ``steps`` is the clients' mean of rate times steps, times the gain of the
wrapped server (``server_gain``). Only then, and only with plain steps everywhere, this
minimizes ``w_f f_f + w_c f_c``: a server without a gain, such as Adam, is refused, and
so is clipping around it. With several steps a round x_f and x_c drift apart, and x ends
off the minimizer of the mixture.

Where this differs from the paper: clients descend f_i and not ``w_f f_i``, so that
rates here are w_f times those of the paper. Algorithm 1, in the copy that we have, ends
before the merge, and the text says "merges (e.g., averages)"; here both moves add up,
which is the step of the mixture.

Reference: Augenstein, Hard, Ning, Singhal, Kale, Partridge, Mathews, "Mixed federated
learning: joint decentralized and centralized learning", 2022, arXiv:2205.13655.
"""

import warnings

from fedblend.core import Algorithm
from fedblend.local import resolve
from fedblend.transforms.mixed_fl.central_loss import Central
from fedblend.transforms.mixed_fl.server_gain import gain
from fedblend.transforms.mixed_fl.step import (
    MixedServer,
    Sent,
    Settings,
    central_steps,
    merging,
    received,
    sending,
    step_sum,
)


def parallel(algorithm: Algorithm, g_c: Central, settings: Settings) -> Algorithm:
    """The wrapped algorithm, and central training beside it."""
    merge, steps = merging(settings, "sum"), settings.steps
    optimizer, follows = settings.optimizer, settings.optimizer is None
    if not follows or merge.factors[0] != merge.factors[1]:
        warnings.warn(
            "parallel: central steps or their merging have a rate of their own; unless "
            "rate x steps is that of the clients (times the server's rate), and all "
            "steps are plain and none is clipped, another mixture than "
            f"{tuple(settings.weights)} is minimized",
            stacklevel=4,
        )

    def sent(up):
        wanted = "an optimizer for the central steps"
        return Sent(step_sum(up, wanted)) if follows else Sent()

    def start(params, joins, rows, key):
        down, inner = algorithm.start(params, joins, rows, key)
        return down, MixedServer(inner, merge.rule.init(down.shared))

    def server(aggregate, down, server, rows, key):
        aggregate, sent = received(aggregate)
        after, inner = algorithm.server(aggregate, down, server.inner, rows, key)
        rate = optimizer
        if rate is None:
            found = gain(algorithm.server, aggregate, down, server.inner, rows)
            rate = sent.step_sum / steps * _checked(found, settings)
        rule = resolve(rate, down.round, steps)
        x_c, _ = central_steps(g_c, down.shared, rows, key, rule, steps)
        x, state = merge(down.shared, after.shared, x_c, server.merge)
        return after._replace(shared=x), MixedServer(inner, state)

    needs = algorithm.needs._replace(length=algorithm.needs.length or follows)
    return sending(algorithm, sent)._replace(start=start, server=server, needs=needs)


def _checked(found: float | None, settings: Settings) -> float:
    if found is None:
        raise ValueError(
            "mixed_fl: this server does not move by a constant multiple of the "
            "clients' mean step (Adam, a schedule or clipping), so that parallel would "
            f"minimize another mixture than {tuple(settings.weights)}; use one_way, or "
            "such an optimizer as merge_optimizer over a plain server"
        )
    return found
