# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What extras bring: packages of others, and distributions of this repository."""

from importlib import import_module
from typing import Any

from fedblend.errors import ELSEWHERE, InputError


def require(module: str, purpose: str, package: str = "", extra: str = "data") -> Any:
    """Import a module of an extra, or raise one line on how to get it.

    Args:
        module: its full name.
        purpose: what needs it.
        package: its distribution, where that is not named as the module's package.
        extra: the extra of fedblend that brings it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError:
        package = package or module.partition(".")[0].replace("_", "-")
        raise InputError(
            f"{purpose}: needs {package}: pip install 'fedblend[{extra}]'"
        ) from None


def find_elsewhere(package: str, name: str) -> Any:
    """A public name of ``package`` that a distribution of this repository has.

    Raises:
        AttributeError: none has it.
        InputError: the one that has it is not installed.
    """
    if name not in ELSEWHERE:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    extra, asked = ELSEWHERE[name], f"{package.replace('fedblend', 'fb')}.{name}"
    return getattr(require(f"fedblend_{extra}", asked, extra=extra), name)
