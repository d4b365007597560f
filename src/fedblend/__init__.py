# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Federated learning by mixing: models that are shared in part.

``import fedblend as fb``: build federated data, pick an algorithm, ``fb.simulate`` it.

The public names stand in one table, ``__init__.pyi``, which type checkers read too. A
name is imported when it is first used, so that the command line can answer
``fedblend --help`` without loading JAX. All algorithms are in ``fb.algorithms``, all
transforms in ``fb.transforms``, and all adapters in ``fb.adapt``, which is the package
``fedblend_adapters`` where that distribution is installed.

Importing sets how many devices JAX makes of a CPU (``fedblend.cpu_devices``).
"""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedblend import cpu_devices

__version__ = "0.2.0"


def _homes() -> dict[str, str]:
    """The module that each public name is imported from."""
    table = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
    return {
        alias.name: node.module
        for node in table.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


cpu_devices.set_up()
_HOMES = _homes()
_EXTRAS = {
    "fedblend_adapters": "adapters",
    "fedblend_interop": "trackers",
    "fedblend_interop.estimators": "sklearn",
}
"""Modules elsewhere with names of ``fedblend``, and the extra that brings each."""
# What needs pydantic or another distribution is public, but no star
# imports it.
__all__ = sorted(  # pyright: ignore[reportUnsupportedDunderAll]
    name
    for name, home in _HOMES.items()
    if not home.startswith(("fedblend.runs", *_EXTRAS))
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES and name != "adapt":
        raise _refusal(name)
    home = _HOMES.get(name, "fedblend_adapters")
    if home in _EXTRAS:
        from fedblend.extras import require

        package = require(home, f"fb.{name}", extra=_EXTRAS[home])
        if name == "adapt":
            return package
    found = None if home == "fedblend" else getattr(import_module(home), name, None)
    value = import_module(f"{home}.{name}") if found is None else found
    globals()[name] = value
    return value


def _refusal(name: str) -> AttributeError:
    """The error for a name that is not public; it may be that of a public module."""
    line = f"module 'fedblend' has no attribute {name!r}"
    homes = ["algorithms", "transforms"] if name[0] != "_" else []
    for home in homes + ["adapt"] * (find_spec("fedblend_adapters") is not None):
        if callable(getattr(__getattr__(home), name, None)):
            line += f"; use fedblend.{home}.{name}"
    return AttributeError(line)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
