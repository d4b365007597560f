# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Nothing that arrives is ever run: no module makes code or objects out of data."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    ROOT / "src" / "fedblend",
    ROOT / "adapters" / "src" / "fedblend_adapters",
    ROOT / "federation" / "src" / "fedblend_federation",
    ROOT / "interop" / "src" / "fedblend_interop",
)
MODULES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))

FORBIDDEN_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "jsonpickle",
    "marshal",
    "shelve",
    "yaml",
    "ruamel",
    "code",
    "codeop",
    "runpy",
    "imp",
}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "builtins.eval",
    "builtins.exec",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "importlib.__import__",
    "pydoc.locate",
    "locate",
    "torch.load",
}
IMPORTS = {"importlib.import_module", "import_module"}
"""Allowed with a name that is written out, and in the files below."""
NAMED_BY_US = {
    "__init__.py",  # a table of our own public names
    "registry.py",  # the modules of our own packages
    "extras.py",  # ``require``, whose callers write the name out
    "config/imports.py",  # the author of a configuration; on nodes the policy
}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]


def breaches(tree: ast.AST, name: str = "") -> list[str]:
    """What a module does that could make code out of data."""
    found = [f"import {one}" for one in imported(tree) if one in FORBIDDEN_MODULES]
    for call in calls(tree):
        called = ast.unparse(call.func)
        if called in FORBIDDEN_CALLS:
            found.append(called)
        if called in IMPORTS and name not in NAMED_BY_US:
            first = call.args[0] if call.args else None
            if not isinstance(first, ast.Constant):
                found.append(f"{called} of a name that is computed")
        for keyword in call.keywords:
            true = isinstance(keyword.value, ast.Constant) and keyword.value.value
            if keyword.arg in ("allow_pickle", "shell") and true:
                found.append(f"{called}({keyword.arg}=True)")
    return found


def inside(path: Path) -> str:
    """The path of a module in its package."""
    (package,) = (one for one in PACKAGES if one in path.parents)
    return str(path.relative_to(package))


def test_no_module_makes_code_of_data():
    found = {path: breaches(parsed(path), inside(path)) for path in MODULES}
    assert not {name: one for name, one in found.items() if one}


def test_packages_that_are_required_are_named_in_the_code():
    others = [path for path in MODULES if inside(path) not in NAMED_BY_US]
    asked = [call for path in others for call in calls(parsed(path))
             if ast.unparse(call.func).split(".")[-1] == "require"]  # fmt: skip
    assert len(asked) > 2
    assert all(isinstance(call.args[0], ast.Constant) for call in asked)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "def f():\n    from marshal import loads",
        "import yaml.loader",
        "eval(text)",
        "exec(text)",
        "__import__(name)",
        "importlib.import_module(message['module'])",
        "from importlib import import_module\nimport_module(name)",
        "np.load(file, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
    ],
)
def test_a_breach_is_noticed(text):
    assert breaches(ast.parse(text))


def test_what_is_harmless_is_not():
    harmless = "np.load(f, allow_pickle=False); importlib.import_module('fedblend')"
    assert breaches(ast.parse(harmless)) == []
