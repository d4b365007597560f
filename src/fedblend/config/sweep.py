# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Many configurations from one: a grid over keys, and what runs as one program.

``algorithm.alpha=0:1:0.1`` is a range with both ends, ``algorithm.name=apfl,ditto`` a
list; several keys make a product. Values of the same key that are real numbers of the
algorithm (a rate, alpha, a penalty) do not change the shapes of a program, so that all
of them are replicas of one simulation: ``join_points`` builds the algorithm from a
traced number. Everything else is a program of its own.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from math import floor, isfinite
from typing import Any, NamedTuple

import numpy as np

from fedblend.config import toml
from fedblend.config.build import (
    Built,
    BySplit,
    method,
    stack_constants,
    vary_by_replica,
)
from fedblend.config.config import Config, check
from fedblend.config.theory_rates import rates
from fedblend.errors import ConfigError, show_value
from fedblend.simulation.sampling import complete_strata, make_cohort

MOST_POINTS = 1000
"""Points of a grid."""
FIXED = {
    "data": "every value runs on the same clients and splits",
    "run.seed": "--seeds N runs several seeds",
    "name": "every run is named after its values",
    "version": "there is one",
}
"""Keys that cannot be swept, and why."""
ALLOWED = "KEY=FIRST:LAST:STEP or KEY=VALUE,VALUE,..., such as algorithm.alpha=0:1:0.1"

Values = dict[str, Any]
"""The value of each swept key."""


class Point(NamedTuple):
    """One configuration of a sweep."""

    name: str
    values: Values
    config: Config


def parse(text: str) -> tuple[str, list[Any]]:
    """The key and the values of ``--over``.

    >>> parse("algorithm.alpha=0:1:0.25")
    ('algorithm.alpha', [0.0, 0.25, 0.5, 0.75, 1.0])
    >>> parse("algorithm.name=apfl,ditto")
    ('algorithm.name', ['apfl', 'ditto'])
    """
    key, equals, rest = text.partition("=")
    key = ".".join(part.strip() for part in key.split("."))
    if not equals or not all(key.split(".")) or not rest.strip():
        raise ConfigError(f"--over {toml.visible(text)}: is not {ALLOWED}")
    ends = [_number(word) for word in rest.split(":")]
    if len(ends) > 1 and not rest.strip().startswith(("[", "{", '"')):
        if len(ends) != 3 or None in ends:
            raise ConfigError(f"--over {toml.visible(text)}: is not {ALLOWED}")
        return key, _range(text, *ends)
    words = [word.strip() for word in rest.split(",")]
    if not all(words):
        raise ConfigError(f"--over {toml.visible(text)}: has an empty value")
    return key, [toml.value_of(word) for word in words]


def _number(word: str) -> float | None:
    try:
        found = float(word)
    except ValueError:
        return None
    return found if isfinite(found) else None


def _range(text: str, first: Any, last: Any, step: Any) -> list[Any]:
    if step == 0 or (last - first) / step < 0:
        raise ConfigError(f"--over {text}: the range is empty")
    steps = floor((last - first) / step + 1e-9)
    if steps >= MOST_POINTS:
        raise ConfigError(
            f"--over {text}: has {steps + 1} values, {MOST_POINTS} at most"
        )
    values = [round(first + place * step, 12) for place in range(steps + 1)]
    if "." in text.partition("=")[2] or "e" in text.partition("=")[2].lower():
        return values
    whole = all(value == int(value) for value in values)
    return [int(value) for value in values] if whole else values


def grid(
    content: Mapping[str, Any],
    over: Mapping[str, Sequence[Any]],
    where: str,
    folder: Any,
) -> list[Point]:
    """All configurations of a sweep, checked.

    Args:
        content: the tables of a configuration.
        over: the values of each key.
        where: the name of the file, for errors.
        folder: to which paths in the content are relative.

    Raises:
        ConfigError: one line with the key and the value.
    """
    total = int(np.prod([len(values) for values in over.values()]))
    if not over or not total:
        raise ConfigError("--over: there is nothing to sweep over")
    if total > MOST_POINTS:
        raise ConfigError(f"--over: {total} runs, {MOST_POINTS} at most")
    points: dict[str, Point] = {}
    for key in over:
        for fixed, why in FIXED.items():
            if key == fixed or key.startswith(f"{fixed}."):
                raise ConfigError(f"--over {key}: cannot be swept; {why}")
    for chosen in product(*over.values()):
        values = dict(zip(over, chosen, strict=True))
        name = ",".join(
            f"{key.rpartition('.')[2]}={_short(of)}" for key, of in values.items()
        )
        if name in points:
            raise ConfigError(f"--over: {name} occurs twice")
        points[name] = Point(
            name, values, _change(content, values, name, where, folder)
        )
    return list(points.values())


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _change(
    content: Mapping[str, Any], values: Values, name: str, where: str, folder: Any
) -> Config:
    """The configuration at these values."""
    changed = copy.deepcopy(dict(content))
    for key, value in values.items():
        *path, last = key.split(".")
        table = changed
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(
                    f"--over {key}: {part} is {show_value(table)}; it is not a table"
                )
        table[last] = value
    changed["name"] = f"{changed.get('name', 'sweep')} {name}"
    return check(changed, where, folder)


def programs(points: Sequence[Point]) -> list[list[Point]]:
    """The points that may run as one program each, in order."""
    swept = [key for key in points[0].values if _is_traceable(key, points)]
    found: dict[Any, list[Point]] = {}
    for number, point in enumerate(points):
        rest = [(key, of) for key, of in point.values.items() if key not in swept]
        alone = not swept or point.config.privacy
        found.setdefault(number if alone else repr(rest), []).append(point)
    return list(found.values())


def _is_traceable(key: str, points: Sequence[Point]) -> bool:
    """Whether all values of a key are real numbers of the algorithm."""
    first, *path = key.split(".")
    return first == "algorithm" and all(
        isinstance(_read(point.config.algorithm, path), float) for point in points
    )


def _read(table: Any, path: Sequence[str]) -> Any:
    for part in path:
        table = getattr(table, part, None)
    return table


def join_points(points: Sequence[Point], built: Built) -> BySplit:
    """The algorithm as a function of the swept values, and these.

    Replicas are the seeds of the first point, then those of the second, and so on.

    Args:
        points: those of one program.
        built: what the configuration of the first builds.
    """
    config, seeds = points[0].config, max(int(built.key.size), 1)
    swept = [key for key in points[0].values if _is_traceable(key, points)]
    over: dict[str, Any] = {
        "values": {
            key: np.repeat([_read(one.config, key.split(".")) for one in points], seeds)
            for key in swept
        }
    }
    known = built.constants
    for name, each in stack_constants(known).items():
        over[name] = np.tile(each, (len(points), 1))
    if config.algorithm.rate == "theory" and "algorithm.rate" not in swept:
        dim = built.parameters
        own = known if len(known) > 1 else [known[0]] * seeds
        over["rates"] = np.array(
            [rates(one.config, of, dim) for one in points for of in own]
        )
    clients = built.federated_data.clients
    asked: Any = make_cohort(built.spec.cohort).size
    cohort = complete_strata(asked, clients)[1]
    method_with = partial(method, config, built.task, clients, cohort)
    return vary_by_replica(method_with, known[0], over)
