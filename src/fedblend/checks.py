# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Rules for the arguments of builders, in their annotations.

A rule is ``rule(key, value) -> value``. It refuses what is not allowed with a
``UserError``, and otherwise returns what the builder is to use. ``gate`` applies the
rules of a builder to the arguments that it is called with; ``algorithm`` and
``transform`` of the registry do so, too::

    Count = Annotated[int, COUNT]

    @gate()
    def method(loss: Loss, *, steps: Count, alpha: Alpha): ...

The options of a configuration come from the same rules. Numbers of Python, NumPy and
JAX are checked by value. A traced number, as inside a sweep, has no value yet and
passes.

The number of clients is known only where the data is. Until then the length of an
argument that is an array over clients is part of what was built (``Needs``, or
``lengths`` of other things), and ``fits`` compares.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, NamedTuple, TypeVar, cast, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fedblend.core import Algorithm, Needs
from fedblend.errors import UserError

Rule = Callable[[str, Any], Any]
"""``rule(key, value)``: the value to use, or a ``UserError``."""
Lengths = tuple[tuple[str, int], ...]
"""Arguments that are arrays over clients, and how long they are."""

ByClient = float | np.ndarray | jax.Array | Sequence[float]
"""A number, or an array over clients of them."""

EACH = "one for each client"

Builder = TypeVar("Builder", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Number:
    """A rule: finite numbers within bounds.

    ``whole`` numbers are neither floats nor booleans. ``clients`` allows an array or a
    list over clients as well, ``optional`` None, and ``also`` all values for which
    ``also(key, value)`` is true, which ``besides`` names.
    """

    above: float | None = None
    least: float | None = None
    below: float | None = None
    most: float | None = None
    whole: bool = False
    clients: bool = False
    each: str = EACH
    optional: bool = False
    besides: str = ""
    also: Callable[[str, Any], bool] = lambda key, value: False

    def __call__(self, key: str, value: Any) -> Any:
        """The value; a list as an array, a whole number as one of Python's."""
        if is_traced(value) or (self.optional and value is None):
            return value
        if self.also(key, value):
            return value
        listed = isinstance(value, list | tuple)
        if listed and self.clients and any(map(is_traced, value)):
            return jnp.asarray(value)
        numbers = _numbers(value)
        if (
            numbers is None
            or numbers.ndim > int(self.clients)
            or not numbers.size
            or (self.whole and not jnp.issubdtype(numbers.dtype, jnp.integer))
        ):
            raise UserError(key, value, str(self))
        wide = numbers.astype(np.float64)
        fits = np.isfinite(wide)
        for bound, inside in (
            (self.above, np.greater),
            (self.least, np.greater_equal),
            (self.below, np.less),
            (self.most, np.less_equal),
        ):
            if bound is not None:
                fits &= inside(wide, bound)
        wrong = np.flatnonzero(~fits)
        if wrong.size:
            entry = numbers.reshape(-1)[wrong[0]].item()
            named = numbers.ndim and self.each == EACH
            said = f"{entry!r} of client {wrong[0]}" if named else None
            raise UserError(key, value, str(self), said)
        if numbers.ndim:
            return numbers if self.whole or listed else value
        return int(numbers) if self.whole else value

    @property
    def bounds(self) -> str:
        """The range in words, such as "above 0" or "in [0, 1)"; may be empty."""
        low = self.least if self.above is None else self.above
        high = self.most if self.below is None else self.below
        if low is not None and high is not None:
            ends = "(" if self.least is None else "[", ")" if self.most is None else "]"
            return f"in {ends[0]}{low:.10g}, {high:.10g}{ends[1]}"
        if low is not None:
            return f"above {low:g}" if self.least is None else f"at least {low:g}"
        if high is not None:
            return f"below {high:g}" if self.most is None else f"at most {high:g}"
        return ""

    def __str__(self) -> str:
        """What is allowed, in words."""
        what = "a whole number" if self.whole else "a number"
        if self.bounds.startswith("in "):
            what = f"{what} {self.bounds}" if self.whole else self.bounds
        elif self.bounds:
            of = " of" if self.bounds.startswith("at ") else ""
            what = f"{what}{of} {self.bounds}"
        elif not self.whole:
            what = "a finite number"
        others = [self.each] if self.clients else []
        others += [self.besides] if self.besides else []
        others += ["None"] if self.optional else []
        return ", or ".join([what, *others])


COUNT = Number(least=1, whole=True)
WHOLE = Number(least=0, whole=True)
POSITIVE = Number(above=0)
NOT_NEGATIVE = Number(least=0)
FRACTION = Number(least=0, most=1)
PART = Number(least=0, below=1)
CHANCE = Number(above=0, below=1)
ALPHA = Number(least=0, most=1, clients=True)
"""The weight of the shared model."""

Count = Annotated[int, COUNT]
Whole = Annotated[int, WHOLE]
Positive = Annotated[float, POSITIVE]
NotNegative = Annotated[float, NOT_NEGATIVE]
Fraction = Annotated[float, FRACTION]
Part = Annotated[float, PART]
Chance = Annotated[float, CHANCE]
Alpha = Annotated[ByClient, ALPHA]


def each_client(rule: Number) -> Number:
    """The rule for a value that is one for all clients, or an array over them."""
    return dataclasses.replace(rule, clients=True)


def optional(rule: Number) -> Number:
    """The rule for a value that may be None."""
    return dataclasses.replace(rule, optional=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Words:
    """A rule: one of these words; with ``functions``, the function a word stands for.

    Where words stand for functions, a function is allowed as well.
    """

    allowed: tuple[str, ...]
    functions: Mapping[str, Callable[..., Any]] | None = None

    def __call__(self, key: str, value: Any) -> Any:
        """The word, or the function that it stands for."""
        if isinstance(value, str) and value in self.allowed:
            return value if self.functions is None else self.functions[value]
        if self.functions is not None and callable(value):
            return value
        more = [] if self.functions is None else ["a function"]
        *others, last = [*map(repr, self.allowed), *more]
        known = f"{', '.join(others)} or {last}" if others else last
        raise UserError(key, value, known)


def words(*allowed: str, **functions: Callable[..., Any]) -> Words:
    """A rule: one of these words, or of the words that stand for functions."""
    return Words((*allowed, *functions), functions or None)


class Paths:
    """A rule: parameters by their paths, such as ``["last", "first/bias"]``.

    A name stands for the parameter of that path and for all parameters below it; it may
    be a pattern such as "*/b". A function of a path is allowed as well.
    """

    def __call__(self, key: str, value: Any) -> Callable[[str], bool]:
        """Whether the parameter of a path is one of them, as a function of the path."""
        if callable(value):
            return cast(Callable[[str], bool], value)
        several = isinstance(value, list | tuple) and len(value) > 0
        if not several or not all(isinstance(name, str) for name in value):
            allowed = "a list of names of parameters, or a function of a path"
            raise UserError(key, value, allowed)
        return PathSelector(key, tuple(value))


PATHS = Paths()
PartNames = Annotated[Callable[[str], bool] | Sequence[str], PATHS]
"""Parameters by the names of parts of the model, or by a function of their paths."""


@dataclasses.dataclass(frozen=True)
class PathSelector:
    """Whether the parameter of a path has one of these names, or is below one."""

    key: str
    names: tuple[str, ...]

    def __call__(self, path: str) -> bool:
        """Whether it is one of them."""
        return any(matches(name, path) for name in self.names)


def require_parts(parts: Callable[[str], bool], params: Any) -> None:
    """Refuse a name given to ``PATHS`` that no parameter of a model has."""
    if not isinstance(parts, PathSelector):
        return
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    paths = [path for path, _ in leaves]
    known = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
    for name in parts.names:
        if not any(matches(name, path) for path in known):
            allowed = f"a part of a model with {', '.join(known)}"
            raise UserError(parts.key, name, allowed)


def matches(name: str, path: str) -> bool:
    """Whether a parameter has this name, or is below it; the name may be a pattern."""
    return path == name or path.startswith(f"{name}/") or fnmatchcase(path, name)


@dataclasses.dataclass(frozen=True)
class Instance:
    """A rule: an object of a type, which ``called`` describes."""

    kind: type | tuple[type, ...]
    called: str

    def __call__(self, key: str, value: Any) -> Any:
        """The value, if it is of the type."""
        if not isinstance(value, self.kind):
            raise UserError(key, value, self.called)
        return value


ALGORITHM = Instance(Algorithm, "an Algorithm")
FUNCTION = Instance(Callable, "a function")  # pyright: ignore
FLAG = Instance((bool, np.bool_), "True or False")


OF_TYPE: dict[Any, Rule] = {Algorithm: ALGORITHM, bool: FLAG}
"""The rules of arguments that are annotated with a type alone; others add theirs."""


def rules_of(builder: Callable[..., Any]) -> dict[str, Rule]:
    """The rules of a builder's arguments, which are in their annotations."""

    def rule_of(annotation: Any) -> Rule | None:
        if get_origin(annotation) is Annotated:
            return get_args(annotation)[1]
        usual = FUNCTION if get_origin(annotation) is Callable else None
        return OF_TYPE.get(annotation, usual)

    parameters = inspect.signature(builder).parameters.items()
    found = {name: rule_of(one.annotation) for name, one in parameters}
    return {name: rule for name, rule in found.items() if rule is not None}


def gate(**given: Rule) -> Callable[[Builder], Builder]:
    """Apply rules to the arguments of a builder, which has them as ``rules``.

    Without rules they are those of its annotations. What the builder makes carries the
    lengths of the arguments that are arrays over clients.
    """

    def guard(builder: Builder) -> Builder:
        signature, rules = inspect.signature(builder), given or rules_of(builder)
        assert set(rules) <= set(signature.parameters), builder

        @functools.wraps(builder)
        def check(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return builder(*args, **kwargs)  # Python's own error says more
            found: Lengths = ()
            for name, value in bound.arguments.items():
                key = f"{builder.__name__}: {name}"
                if name in rules:
                    value = bound.arguments[name] = rules[name](key, value)
                    many = isinstance(value, np.ndarray | jax.Array) and value.ndim
                    if many and getattr(rules[name], "clients", False):
                        found += ((key, len(value)),)
                inner = getattr(value, "client_lengths", ())
                found += tuple((f"{key}: {field}", size) for field, size in inner)
                if not isinstance(value, Algorithm):  # these pass on their own needs
                    found += getattr(value, "lengths", ())
            return add_lengths(builder(*bound.args, **bound.kwargs), found)

        found = cast(Any, check)
        found.rules = rules
        return found

    return guard


class Declared(NamedTuple):
    """A function that was built with arrays over clients; see ``gate``."""

    function: Callable[..., Any]
    lengths: Lengths

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function makes of it."""
        return self.function(*args, **kwargs)


def add_lengths(made: Any, lengths: Lengths) -> Any:
    """What was built, with these lengths before those that it has."""
    if not lengths:
        return made
    if isinstance(made, Algorithm):
        needs = made.needs._replace(lengths=lengths + made.needs.lengths)
        return made._replace(needs=needs)
    if hasattr(made, "lengths"):
        return made._replace(lengths=lengths + made.lengths)
    return Declared(made, lengths) if callable(made) else made


def fits(needs: Needs, clients: int, *, new_clients: bool = False) -> None:
    """Refuse what was built for another number of clients.

    Args:
        needs: of an algorithm.
        clients: how many there are.
        new_clients: they join after the training, whatever the number of clients was.
    """
    if not new_clients and needs.clients not in (None, clients):
        raise UserError(
            "clients", needs.clients, f"{clients}, the number of clients there are"
        )
    for key, length in needs.lengths:
        if length != clients:
            allowed = f"one value, or one for each of the {clients} clients"
            raise UserError(key, length, allowed, f"an array of {length}")


def is_traced(value: Any) -> bool:
    """Whether this is a value that is known only when a compiled function runs."""
    return isinstance(value, Tracer)


def _numbers(value: Any) -> np.ndarray | None:
    """The value as an array of real numbers, None where it is no such thing."""
    try:
        found = np.asarray(value)
    except (TypeError, ValueError):
        return None
    kinds = (jnp.integer, jnp.floating)
    return found if any(jnp.issubdtype(found.dtype, kind) for kind in kinds) else None
