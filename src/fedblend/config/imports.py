# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models and algorithms by import path: ``name = "package.module:function"``.

The module is looked for among the installed ones, then in the folder of the
configuration, then in the working directory. On a node of a federation such a name is
refused unless the node's own policy lists it (``accept.imports``): a server must not
choose which code a node imports. Nor must a run folder or a model file that somebody
sends: its import paths are refused unless the user allows them (``refuse_unknown``).
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedblend.errors import RunError, SettingError, describe

TABLES = ("model", "algorithm")
"""The tables whose ``name`` may be an import path."""
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class CodeError(RunError):
    """A run folder or a model file that names code which the user did not name."""


def is_import_path(name: Any) -> bool:
    """Whether a name means a function of a module.

    >>> is_import_path("my_models:net"), is_import_path("mlp"), is_import_path(3)
    (True, False, False)
    """
    return isinstance(name, str) and ":" in name


def import_paths(content: Mapping[str, Any]) -> dict[str, str]:
    """The import paths in the content of a configuration, by their keys."""
    found = {}
    for table in TABLES:
        own = content.get(table)
        name = own.get("name") if isinstance(own, Mapping) else None
        if isinstance(name, str) and is_import_path(name):
            found[f"{table}.name"] = name
    return found


_chosen: set[str] = set()
"""The import paths of the configurations that the user gave in this process."""


def choose(content: Mapping[str, Any]) -> None:
    """Remember the import paths of a configuration that the user gave."""
    _chosen.update(import_paths(content).values())


def refuse_unknown(content: Mapping[str, Any], where: str) -> None:
    """Refuse code that a run folder or a model file names, and the user did not.

    Args:
        content: of the configuration in the folder or file.
        where: that is, for the error.

    Raises:
        CodeError: one line with the key and the name.
    """
    for key, name in import_paths(content).items():
        if name not in _chosen:
            raise CodeError(
                f"{where}: {key}: {name!r} is code, and is not imported because a "
                "folder or file says so; if you trust it, --imports allows that, or "
                "fb.load(..., imports=True)"
            )


def import_function(name: str, folder: str | None = None) -> Callable[..., Any]:
    """The function that an import path names.

    Args:
        name: "package.module:function".
        folder: where to look besides the working directory.

    Raises:
        SettingError: one line about the key "name": no such module or function, or an
            error inside of the module.
    """
    if not _PATH.fullmatch(name):
        raise SettingError("name", f'"{name}" is not "package.module:function"')
    where, _, function = name.partition(":")
    for path in (folder, str(Path.cwd())):
        if path is not None and path not in sys.path:
            sys.path.append(path)
    with one_line_errors(name, where):
        module = importlib.import_module(where)
    own = None if folder is None else Path(folder, *where.split(".")).with_suffix(".py")
    file = getattr(module, "__file__", None)
    if own is not None and own.exists() and file and not own.samefile(file):
        raise SettingError(
            "name",
            f'"{name}": {where} is also the name of a module in {file}; rename {own}',
        )
    found = getattr(module, function, None)
    if not callable(found):
        what = "has no" if found is None else "has no function, but a value,"
        raise SettingError("name", f'"{name}": {where} {what} {function}')
    return found


@contextmanager
def one_line_errors(name: str, module: str | None = None) -> Iterator[None]:
    """Errors of the user's own code as one line, with its file and line.

    Args:
        name: the import path.
        module: which is being imported; None while the function runs.
    """
    try:
        yield
    except SettingError:
        raise
    except ModuleNotFoundError as error:
        if module is None or not module.startswith(error.name or " "):
            raise SettingError("name", f'"{name}": {describe(error)}') from None
        raise SettingError(
            "name",
            f'"{name}": there is no module {error.name}; it is looked for among the '
            "installed ones, beside the configuration and in the working directory",
        ) from None
    except Exception as error:
        raise SettingError("name", f'"{name}": {describe(error)}') from None
