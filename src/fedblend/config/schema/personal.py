# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Per-FedAvg, pFedMe and Ditto as a configuration states them.

``lam`` is the strength of the pull between personal and shared model. The local work of
``[algorithm]`` is that on the shared model; Ditto's own models have a table of theirs,
``personal``.
"""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fedblend import algorithms
from fedblend.config.schema.algorithm import Options, amount_of_work
from fedblend.config.schema.local_work import LocalWork
from fedblend.config.schema.table import Count, Index, NotNegative, Positive
from fedblend.core import Algorithm, Loss
from fedblend.local import Work


class PerFedAvg(Options):
    """Options of Per-FedAvg."""

    name: Literal["perfedavg"]
    inner_rate: NotNegative
    hessian: Literal["exact", "differences", "none"] = "exact"
    delta: Positive = 1e-3
    adapt_steps: Index = 1


class PFedMe(Options):
    """Options of pFedMe."""

    name: Literal["pfedme"]
    lam: Positive
    inner_rate: Positive
    inner_steps: Count
    server_rate: Positive = 1.0


class Ditto(Options):
    """Options of Ditto over FedAvg."""

    name: Literal["ditto"]
    lam: NotNegative | Annotated[list[NotNegative], Field(min_length=1)]
    personal: LocalWork


def perfedavg(loss: Loss, options: PerFedAvg) -> Algorithm:
    """Per-FedAvg."""
    return algorithms.perfedavg(
        loss,
        Work(options.chosen(), **amount_of_work(options)),
        inner_rate=options.inner_rate,
        hessian=options.hessian,
        delta=options.delta,
        adapt_steps=options.adapt_steps,
    )


def pfedme(loss: Loss, options: PFedMe) -> Algorithm:
    """PFedMe."""
    return algorithms.pfedme(
        loss,
        Work(options.chosen(), **amount_of_work(options)),
        lam=options.lam,
        inner_rate=options.inner_rate,
        inner_steps=options.inner_steps,
        server_rate=options.server_rate,
    )


def ditto(loss: Loss, options: Ditto) -> Algorithm:
    """Ditto over FedAvg."""
    lam, own = options.lam, options.personal
    return algorithms.ditto(
        algorithms.fedavg(loss, Work(options.chosen(), **amount_of_work(options))),
        loss,
        Work(own.chosen(), **amount_of_work(own)),
        lam=np.array(lam) if isinstance(lam, list) else lam,
    )
