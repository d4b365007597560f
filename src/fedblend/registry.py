# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Registries by name; algorithms and transforms are declared beside their builders.

::

    @algorithm(sends=("update", "gradients"))
    def scaffold(loss: Loss, work: Work, *, server_rate: Positive = 1.0): ...

The name is the function's, the summary is the first line of its module, the reference
is the module's paragraph "Reference:"; where several builders share a module, both are
in the builder's docstring. The options of a configuration are the parameters whose
annotations have a rule of ``checks``, which is applied to what is given. ``ALGORITHMS``
and ``TRANSFORMS`` import every module of their packages when they are first read: a
file is found because it exists.
The configuration, ``fedblend list``, the policy of a node, the tables of the documents
and the contract suite read these two mappings and nothing else. Models and datasets
have registries of the same kind, in ``models.model`` and ``data.dataset``.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import walk_packages
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from fedblend.checks import Rule, gate
from fedblend.core import Algorithm

Builder = Callable[..., Algorithm]
Decorated = TypeVar("Decorated", bound=Builder)

FACTS = ("clients", "smooth", "convex")
"""Parameters that a run knows: the number of clients, L_i and mu_i of their losses."""


class NewClient(NamedTuple):
    """How a client that joins after the training gets its model.

    The message of the server stays the same. The client enrolls, takes part in
    ``visits`` rounds, and deploys ``personal``.
    """

    visits: int | None = 1
    """Rounds at the client; None for one round of a single step for every step."""
    steps: str | None = "steps"
    """The parameter that counts the steps on the client's own model; None where a
    solver finds that model."""
    rate: str = "rate"
    """The parameter with the rate of these steps."""
    whole_run: bool = False
    """The client trains for as many rounds as the run had, instead of a few."""
    build: Builder | None = None
    """What the client runs instead of the algorithm, from those options it takes."""
    options: Mapping[str, Any] = MappingProxyType({})
    """Options that have another value for a new client."""


TRAINS = NewClient()
"""A round or, where all clients deploy the shared model, fine-tuning from it."""
ADAPTS = NewClient(visits=0)
"""``personal`` takes the client's own steps, as many as the options state."""
SOLVES = NewClient(visits=0, steps=None)
"""A solver finds the client's own model when the client enrolls."""
STEP_BY_STEP = NewClient(visits=None)
"""Rounds of one step, so that the shared model stands still between steps."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """What is known of an algorithm or a transform beside its builder."""

    name: str
    build: Builder
    """Whose parameters are the options of a configuration."""
    builder: Builder
    """The function of the library, ``fb.algorithms.NAME``; mostly ``build``."""

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of ``build``, by name."""
        return inspect.signature(self.build).parameters

    @property
    def rules(self) -> Mapping[str, Rule]:
        """The rules of ``gate`` for the parameters of ``build``."""
        return getattr(self.build, "rules", {})

    @property
    def summary(self) -> str:
        """The first line of the text."""
        return self._text().split("\n")[0].rstrip(".").replace("``", "")

    @property
    def reference(self) -> str:
        """Where it was venue; empty where the text names no reference."""
        paragraph = self._text().partition("Reference:")[2].partition("\n\n")[0]
        return " ".join(paragraph.split())

    @property
    def venue(self) -> str:
        """Venue, year and number of the reference, without its authors and title."""
        return self.reference.rpartition('",')[2].strip(" .")

    def _text(self) -> str:
        """The module's text; the builder's, if that names a reference of its own."""
        module, own = inspect.getmodule(self.builder), inspect.getdoc(self.builder)
        if own and "Reference:" in own:
            return own
        return inspect.cleandoc((module and module.__doc__) or "")


OWN_MODEL = "own model"


@dataclasses.dataclass(frozen=True)
class AlgorithmEntry(Entry):
    """An algorithm by name."""

    sends: tuple[str, ...] = ("update",)
    """What a client sends in a round: "update", "gradients", "losses"; or nothing. And
    ``OWN_MODEL``, where it sends one that it trained alone, at enrollment."""
    new_client: NewClient = TRAINS
    """How a client that joins after the training gets its model."""
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The keys of a configuration for parameters that have another name there."""
    keeps: str | None = None
    """The parameter that names the parts of the model which stay with a client."""
    theory: Callable[..., Any] | None = None
    """Theory's step for it, or all that theory chooses (``LocalTraining``) where a coin
    ends rounds: a configuration may have ``rate = "theory"``."""
    own_rates: bool = False
    """That step is one for every client, which the builder finds itself from L_i."""
    coin: bool = False
    """A coin ends its rounds: ``steps`` is a mean, which theory may choose."""
    form: str | None = None
    """What a configuration makes of the model: "ensemble" for several of it. Or what it
    asks of adapters: "factors" of a product, "pairs" of adapters. None for nothing."""
    encodes: bool = False
    """It encodes what clients send: no transform that encodes goes around it."""
    preset_of: str | None = None
    """The algorithm of which it is a setting, with the same messages and states; None
    if it is one of its own."""
    reads: str = "gradients"
    """What a client takes from its rows besides gradients of the loss; that word where
    there is nothing else, so that ``row_noise`` covers it."""
    trains_kept: bool = True
    """Clients train the part of the model that stays with them."""
    everyone: bool = False
    """All clients take part in each of its rounds."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What a configuration has for keys that it leaves out, if not the usual."""


@dataclasses.dataclass(frozen=True)
class TransformEntry(Entry):
    """A transform by name."""

    encodes: bool
    """It encodes what clients send: only one such transform, and outside of others."""


class Named(Protocol):
    """An entry of a registry."""

    @property
    def name(self) -> str:
        """By which a user finds it."""
        ...


Kind = TypeVar("Kind", bound=Named)


class Registry(Mapping[str, Kind], Generic[Kind]):
    """The entries of some packages by name, in alphabetical order.

    Args:
        packages: their modules are imported when the registry is first read.
        plugins: the group of entry points of modules of other distributions that are
            imported then, too.
    """

    def __init__(self, *packages: str, plugins: str = ""):
        self._packages, self._plugins = packages, plugins
        self._found: dict[str, Kind] = {}
        self._complete = False

    def add(self, entry: Kind) -> None:
        """Take an entry in; a name stands for one builder."""
        if entry.name in self._found:
            raise ValueError(f"{self._packages[0]}: {entry.name!r} is registered twice")
        self._found[entry.name] = entry

    def __getitem__(self, name: str) -> Kind:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._all()))

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, Kind]:
        if not self._complete:
            for package in map(import_module, self._packages):
                for module in walk_packages(package.__path__, f"{package.__name__}."):
                    import_module(module.name)
            for point in entry_points(group=self._plugins):
                point.load()
            self._complete = True
        return self._found


ALGORITHMS: Registry[AlgorithmEntry] = Registry(
    "fedblend.algorithms", "fedblend.contrib", plugins="fedblend.algorithms"
)
TRANSFORMS: Registry[TransformEntry] = Registry("fedblend.transforms")


def instead_of(name: str) -> str:
    """What to use where clients carry a compressor's errors from round to round.

    That is ``ef21``, or the methods that encode their messages themselves.
    """
    mixes = "alpha" in ALGORITHMS[name].parameters
    others = [
        other
        for other, entry in ALGORITHMS.items()
        if entry.encodes and ("alpha" in entry.parameters) == mixes
    ]
    return f"ef21, or {' or '.join(others)} in place of {name}"


def algorithm(
    *, name: str | None = None, builder: Builder | None = None, **facts: Any
) -> Callable[[Decorated], Decorated]:
    """Register the algorithm that the decorated function builds.

    Args:
        name: by which a configuration names it; the function's own if None.
        builder: the function of the library, where a configuration has other options
            than that function has parameters; the decorated function if None.
        **facts: fields of ``AlgorithmEntry`` that are not the usual.
    """

    def register(build: Decorated) -> Decorated:
        build = gate()(build)
        own = name or build.__name__
        ALGORITHMS.add(AlgorithmEntry(own, build, builder or build, **facts))
        return build

    return register


def transform(*, encodes: bool = False) -> Callable[[Decorated], Decorated]:
    """Register the transform that the decorated function builds.

    Args:
        encodes: whether it encodes what clients send.
    """

    def register(build: Decorated) -> Decorated:
        build = gate()(build)
        TRANSFORMS.add(TransformEntry(build.__name__, build, build, encodes))
        return build

    return register
