# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The page docs/algorithms.md: algorithms and transforms, from the registry."""

import inspect
import re
from collections.abc import Iterator

from fedblend.checks import FLAG, Number, Paths, Rule, Words
from fedblend.config.tables.algorithm import OPTIONS, Options
from fedblend.config.toml import literal
from fedblend.local import OPTIMIZER
from fedblend.mixing import MIXING
from fedblend.models.parts import PARTS
from fedblend.registry import TRANSFORMS, AlgorithmEntry

HEAD = """\
# Algorithms and transforms

[add_an_algorithm.md](add_an_algorithm.md) explains
how to register a new algorithm, [conformance.md](conformance.md) has the tests of each.
"""
OPTIONS_OF_ALL = """\
## Options of the algorithms

Every algorithm takes the clients' local work: `rate` or `optimizer`, `schedule`,
`steps` or `epochs`, `batch_size`; [config.md](config.md#algorithm) explains these keys.
Below are the further keys of `[algorithm]`, by `name`.
"""


def page() -> str:
    """The whole page."""
    return "\n".join(
        [
            HEAD,
            "## Algorithms\n",
            *_table(("`name`", "what it is", "a client sends", "published"), _rows()),
            "",
            OPTIONS_OF_ALL,
            *(line for name in OPTIONS for line in _options(name)),
            "## Transforms\n",
            "A transform takes an algorithm and returns an algorithm: `fb.NAME`, or",
            "`fb.transforms.NAME`. Only one transform of a chain encodes messages, and",
            "it is the outermost.\n",
            *_table(("name", "what it is", "encodes", "published"), _transforms()),
            "",
        ]
    )


def _rows() -> Iterator[tuple[str, ...]]:
    for name, options in OPTIONS.items():
        entry = options.entry
        sends = ", ".join(entry.sends) or "nothing"
        yield f"`{name}`", entry.summary, sends, entry.venue


def _transforms() -> Iterator[tuple[str, ...]]:
    for name, entry in TRANSFORMS.items():
        encodes = "yes" if entry.encodes else ""
        yield f"`{name}`", entry.summary, encodes, entry.venue


def _options(name: str) -> Iterator[str]:
    table, entry = OPTIONS[name], OPTIONS[name].entry
    own = set(table.model_fields) - set(Options.model_fields)
    own |= {"alpha"} & set(entry.parameters)
    told = explained(entry)
    rows = []
    for key, field in table.model_fields.items():
        if key in own:
            parameter, text = told[key]  # every option is explained at its builder
            default = "required" if field.is_required() else _default(field.default)
            rows.append((f"`{key}`", values(entry, parameter), default, text))
    yield f"### `{name}`\n"
    if rows:
        yield from _table(("key", "values", "default", ""), rows)
    else:
        yield "No further keys."
    yield ""


def _default(value: object) -> str:
    return "" if value is None else f"`{literal(value)}`"


def values(entry: AlgorithmEntry, parameter: str) -> str:
    """What a key may hold, in words."""
    if parameter == "work":
        return "a table with the keys of local work"
    rule: Rule | None = entry.rules.get(parameter)
    if isinstance(rule, Number) and rule.also is OPTIMIZER.also:
        return "a rate, or a table with `name` and `rate`"
    if isinstance(rule, Number):
        what = "a whole number, " if rule.whole else ""
        several = ", or a list with a number for each client" if rule.clients else ""
        return f"{what}{rule.bounds}{several}"
    if isinstance(rule, Words):
        more = "; or a list of names of parameters" if rule is MIXING else ""
        return ", ".join(f'`"{word}"`' for word in rule.allowed) + more
    if isinstance(rule, Paths):
        several = ", ".join(f'`"{word}"`' for word in PARTS)
        return f"a list of names of parameters; or {several}"
    return "true, false" if rule == FLAG else "a table with `solver`"


def explained(entry: AlgorithmEntry) -> dict[str, tuple[str, str]]:
    """By key: the parameter, and what the docstring of the builder says of it."""
    text = inspect.getdoc(entry.build) or ""
    arguments = text.partition("Args:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", arguments, re.M)
    told = {name: " ".join(text.split()).replace("``", "`") for name, text in found}
    if "algorithm" not in entry.parameters:
        told.pop("work", None)
    return {
        entry.keys.get(name, name): (name, text.replace("|", "\\|"))
        for name, text in told.items()
    }


def _table(heads: tuple[str, ...], rows) -> Iterator[str]:
    for row in (heads, ("---",) * len(heads), *rows):
        yield f"| {' | '.join(row)} |"
