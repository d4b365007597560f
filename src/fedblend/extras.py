# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What extras bring: packages of others, and distributions of this repository."""

from importlib import import_module
from typing import Any

from fedblend.errors import ELSEWHERE, InputError


def require(module: str, purpose: str, package: str = "", extra: str = "data") -> Any:
    """Import a module of an extra, or raise one line on how to get it."""
    try:
        return import_module(module)
    except ModuleNotFoundError:
        package = package or module.partition(".")[0]
        raise InputError(
            f"{purpose}: needs {package}: pip install 'fedblend[{extra}]'"
        ) from None


def require_distribution(extra: str, purpose: str, module: str = "") -> Any:
    """A module of a distribution of this repository, the package itself if empty.

    Args:
        extra: which brings ``fedblend-{extra}``.
        purpose: the begin of the line where it is not installed.
        module: inside of the package.
    """
    name = f"fedblend_{extra}{module and '.'}{module}"
    return require(name, purpose, f"fedblend-{extra}", extra)


def find_elsewhere(package: str, name: str) -> Any:
    """A public name of ``package`` that a distribution of this repository has.

    Raises:
        AttributeError: none has it.
        InputError: the one that has it is not installed.
    """
    if name not in ELSEWHERE:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(require_distribution(ELSEWHERE[name], f"{package}.{name}"), name)
