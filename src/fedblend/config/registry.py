# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The algorithms by name: what a configuration may say about each, and how it is built.

A new algorithm joins with a class of its options and one entry in ``ALGORITHMS``; its
description and reference are those of its own file.
"""

import inspect
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from fedblend import algorithms
from fedblend.config.schema.algorithm import Options, amount_of_work
from fedblend.config.schema.apfl import Apfl, ApflAgnostic, apfl, apfl_agnostic
from fedblend.config.schema.flix import Flix, FlixLocal, flix
from fedblend.config.schema.local_work import LocalWork, Rule, transform
from fedblend.config.schema.personal import (
    Ditto,
    PerFedAvg,
    PFedMe,
    ditto,
    perfedavg,
    pfedme,
)
from fedblend.config.schema.relatives import (
    Agnostic,
    FedRep,
    L2gd,
    Mapper,
    agnostic,
    fedrep,
    l2gd,
    mapper,
)
from fedblend.config.schema.table import NotNegative, Positive
from fedblend.core import Algorithm, Loss
from fedblend.local import Work
from fedblend.theory.constants import Smoothness


class FedAvg(Options):
    """Options of FedAvg."""

    name: Literal["fedavg"]


class FedOpt(Options):
    """Options of FedOpt."""

    name: Literal["fedopt"]
    server: Rule


class FedProx(Options):
    """Options of FedProx."""

    name: Literal["fedprox"]
    mu: NotNegative


class Scaffold(Options):
    """Options of SCAFFOLD."""

    name: Literal["scaffold"]
    server_rate: Positive = 1.0


class Svrg(Options):
    """Options of SVRG."""

    name: Literal["svrg"]
    refresh: Annotated[float, Field(gt=0, le=1)]


class Reptile(Options):
    """Options of Reptile."""

    name: Literal["reptile"]
    server: Rule


class Fomaml(Options):
    """Options of FOMAML."""

    name: Literal["fomaml"]
    server: Rule


class LocalOnly(Options):
    """Options of training alone."""

    name: Literal["local_only"]


class FineTune(Options):
    """Options of FedAvg with fine-tuning."""

    name: Literal["finetune"]
    tune: LocalWork


def _fedavg(loss: Loss, options: LocalWork) -> Algorithm:
    return algorithms.fedavg(loss, Work(options.chosen(), **amount_of_work(options)))


def _fedopt(loss: Loss, options: FedOpt) -> Algorithm:
    server = transform(options.server)
    return algorithms.fedopt(
        loss, Work(options.chosen(), **amount_of_work(options)), server
    )


def _reptile(loss: Loss, options: Reptile) -> Algorithm:
    server = transform(options.server)
    return algorithms.reptile(
        loss, Work(options.chosen(), **amount_of_work(options)), server
    )


def _fomaml(loss: Loss, options: Fomaml) -> Algorithm:
    server = transform(options.server)
    return algorithms.fomaml(
        loss, Work(options.chosen(), **amount_of_work(options)), server
    )


def _fedprox(loss: Loss, options: FedProx) -> Algorithm:
    return algorithms.fedprox(
        loss, Work(options.chosen(), **amount_of_work(options)), mu=options.mu
    )


def _scaffold(loss: Loss, options: Scaffold) -> Algorithm:
    return algorithms.scaffold(
        loss,
        Work(options.chosen(), **amount_of_work(options)),
        server_rate=options.server_rate,
    )


def _svrg(loss: Loss, options: Svrg) -> Algorithm:
    return algorithms.svrg(
        loss, Work(options.chosen(), **amount_of_work(options)), refresh=options.refresh
    )


def local_only(loss: Loss, options: LocalWork) -> Algorithm:
    """Training alone with the local work of any algorithm."""
    return algorithms.local_only(
        loss, Work(options.chosen(), **amount_of_work(options))
    )


def _finetune(loss: Loss, options: FineTune) -> Algorithm:
    tune = options.tune
    return algorithms.finetune(
        _fedavg(loss, options), loss, Work(tune.chosen(), **amount_of_work(tune))
    )


class Entry(NamedTuple):
    """An algorithm by name."""

    options: type[Options]
    """What ``[algorithm]`` may hold."""
    build: Callable[..., Algorithm]
    """From a loss and the options to the algorithm."""
    source: Callable[..., Algorithm]
    """The library's own builder, whose file describes the algorithm."""
    constants: bool = False
    """Whether ``build`` also takes the constants of f_i, or None, where unknown."""
    clients: bool = False
    """Whether ``build`` also takes the number of clients."""

    def make(
        self, loss: Loss, options: Options, known: Smoothness | None, clients: int
    ) -> Algorithm:
        """The algorithm, told those of these facts that it takes."""
        facts = [known] if self.constants else []
        return self.build(loss, options, *facts, *([clients] if self.clients else []))

    @property
    def description(self) -> str:
        """The first line of the algorithm's file."""
        return self._text().split("\n")[0].rstrip(".").replace("``", "")

    @property
    def reference(self) -> str:
        """Where it was published; empty for what nobody claims."""
        _, found, rest = self._text().partition("Reference:")
        return " ".join(rest.split()) if found else ""

    def _text(self) -> str:
        module = inspect.getmodule(self.source)
        return inspect.cleandoc((module and module.__doc__) or "")


ALGORITHMS: dict[str, Entry] = {
    "fedavg": Entry(FedAvg, _fedavg, algorithms.fedavg),
    "fedopt": Entry(FedOpt, _fedopt, algorithms.fedopt),
    "fedprox": Entry(FedProx, _fedprox, algorithms.fedprox),
    "scaffold": Entry(Scaffold, _scaffold, algorithms.scaffold),
    "svrg": Entry(Svrg, _svrg, algorithms.svrg),
    "local_only": Entry(LocalOnly, local_only, algorithms.local_only),
    "finetune": Entry(FineTune, _finetune, algorithms.finetune),
    "flix": Entry(Flix, flix, algorithms.flix, constants=True),
    "flix_local": Entry(FlixLocal, flix, algorithms.flix, constants=True),
    "apfl": Entry(Apfl, apfl, algorithms.apfl),
    "apfl_agnostic": Entry(
        ApflAgnostic, apfl_agnostic, algorithms.apfl_agnostic, clients=True
    ),
    "reptile": Entry(Reptile, _reptile, algorithms.reptile),
    "fomaml": Entry(Fomaml, _fomaml, algorithms.fomaml),
    "perfedavg": Entry(PerFedAvg, perfedavg, algorithms.perfedavg),
    "pfedme": Entry(PFedMe, pfedme, algorithms.pfedme),
    "ditto": Entry(Ditto, ditto, algorithms.ditto),
    "l2gd": Entry(L2gd, l2gd, algorithms.l2gd),
    "fedrep": Entry(FedRep, fedrep, algorithms.fedrep),
    "agnostic": Entry(Agnostic, agnostic, algorithms.agnostic, clients=True),
    "mapper": Entry(Mapper, mapper, algorithms.mapper),
}
"""The algorithms that a configuration can name."""

if TYPE_CHECKING:
    AnyOptions = Options
else:
    AnyOptions = Annotated[
        reduce(or_, (entry.options for entry in ALGORITHMS.values())),
        Field(discriminator="name"),
    ]
    """The options of any of them, told apart by ``name``."""
