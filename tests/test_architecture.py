# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The plan of the house: who imports whom, how long files are, what is documented."""

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import fedblend as fb

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "fedblend"
OTHERS = {
    f"fedblend_{name}": ROOT / name / "src" / f"fedblend_{name}"
    for name in ("adapters", "federation", "interop")
}
"""The packages of other distributions that the plan knows, and their folders."""
FOLDERS = {"fedblend": PACKAGE, **OTHERS}
MODULES = sorted(path for folder in FOLDERS.values() for path in folder.rglob("*.py"))
TESTS = sorted(
    path
    for folder in ("tests", "adapters/tests", "federation/tests", "interop/tests")
    for path in (ROOT / folder).rglob("*.py")
)

LEVELS = (
    {
        *(
            "core",
            "trees",
            "keys",
            "batches",
            "batch_statistics",
            "uneven_loop",
            "step_log",
            "errors",
            "extras",
            "checks",
            "registry",
        ),
        "cpu_devices",
    },
    {"losses", "mixing", "local", "solvers", "models", "compress", "data", "augment"},
    {"algorithms", "transforms", "theory"},
    {"contrib"},
    {"metrics", "stats", "simulation", "selection"},
    {"config", "runs", "report"},
    {"cli", "__main__"},
    {"adapters", "interop"},
    {"federation"},
)
"""A module imports from its own level and from those before it."""

PRINTING = 5
"""The first level that may print, and that may need the extras to be imported."""
LIBRARIES = {"adapters", "interop"}
"""The distributions that may not either: they are for users of the library."""

EXTRAS = {
    "pydantic",
    "typer",
    "rich",
    "sklearn",
    "matplotlib",
    "plotly",
    "flax",
    "dp_accounting",
    "equinox",
    "PIL",
    "pyarrow",
    "pandas",
    "flwr",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "hypothesis",
    "pytest",
}
"""Never imported by importing fedblend."""

LICENSE = "# Copyright The fedblend authors\n# SPDX-License-Identifier: Apache-2.0\n"
ESTIMATORS = "interop/estimators.py"
"""The module of subclasses of scikit-learn's, which is imported when one is used."""
FLOWER = "federation/flower/"
"""The folder of the modules that touch Flower."""
PRIVATE_FLOWER = "federation/flower/private.py"
"""The one module that imports Flower's private packages; these are the public ones."""
PUBLIC_FLOWER = ("flwr.app", "flwr.clientapp", "flwr.serverapp")

LAZY_EXCEPTIONS = {
    ("simulation/run.py", "report"),
    ("models/__init__.py", "adapters"),
    ("models/__init__.py", "interop"),
}
"""``Run.frame`` is a report's; types of ``transformer`` and ``from_torch``."""


def named(path: Path) -> str:
    package, folder = home(path)
    inside = path.relative_to(folder).as_posix()
    part = package.removeprefix("fedblend").removeprefix("_")
    return f"{part}/{inside}" if part else inside


def home(path: Path) -> tuple[str, Path]:
    """The package that a file is in, and the package's folder."""
    return next(pair for pair in FOLDERS.items() if pair[1] in path.parents)


def part_of(path: Path) -> str:
    """The part of the house that a file belongs to."""
    return named(path).split("/")[0].removesuffix(".py")


def level_of_file(path: Path) -> int:
    """The level of a file; the list of public names is below all others."""
    return -1 if path == PACKAGE / "__init__.py" else level_of(part_of(path))


def is_library(path: Path) -> bool:
    """Whether a file prints nothing, and is documented for users of the library."""
    return level_of_file(path) < PRINTING or part_of(path) in LIBRARIES


def level_of(part: str) -> int:
    for level, parts in enumerate(LEVELS):
        if part in parts:
            return level
    raise AssertionError(f"{part} has no place in the plan of the house")


def imports(tree: ast.AST) -> Iterator[str]:
    """All modules imported anywhere, in full; a name may itself be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide who imports whom"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_at_once(tree: ast.Module) -> Iterator[str]:
    """What importing the module imports: not inside functions, not for types only."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(node)
        waiting.extend(ast.iter_child_nodes(node))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> tuple[str, ...]:
    """All that a file imports, wherever it does."""
    return tuple(imports(parsed(path)))


def nodes(path: Path, wanted: bool) -> Iterator[ast.AST]:
    """All nodes of a module that is looked at."""
    return ast.walk(parsed(path)) if wanted else iter(())


def breaches(rule) -> list[str]:
    """What a rule finds in every module, with the module's name."""
    return [f"{named(path)}: {found}" for path in MODULES for found in rule(path)]


def test_nobody_imports_from_a_level_above():
    assert breaches(imports_from_above) == []


def imports_from_above(path: Path) -> Iterator[str]:
    if path == PACKAGE / "__init__.py":
        return
    mine = level_of(part_of(path))
    for name in imported(path):
        first, *rest = name.split(".")
        if first in OTHERS:
            first, rest = "fedblend", [first.removeprefix("fedblend_")]
        if first != "fedblend" or (rest and rest[0].startswith("__")):
            continue
        if not rest:  # the package itself, that is the public names of what is below
            allowed = mine > level_of("simulation")
        elif (named(path), rest[0]) in LAZY_EXCEPTIONS:
            allowed = name not in imports_at_once(parsed(path))
        else:
            allowed = level_of(rest[0]) <= mine
        if not allowed:
            yield name


MOST_NEIGHBORS = 15
ONE_MORE = {"federation/server/run.py", "runs/run.py"}
"""The module that still has one neighbor too many; none may join it."""
LISTS = ("cli/__init__.py", "config/config.py", "config/build.py")
"""The modules with all commands, or all tables of a configuration, as neighbors."""


def neighbors(path: Path) -> set[str]:
    """The modules of fedblend that a module imports, at once or inside a function."""
    found = set()
    for name in imports(without_types(parsed(path))):
        package = name.split(".")[0]
        if package not in FOLDERS:
            continue
        inner = FOLDERS[package].joinpath(*name.split(".")[1:])
        is_module = inner.with_suffix(".py").exists() or inner.is_dir()
        found.add(name if is_module else name.rpartition(".")[0])
    return found - {module_of(path), *FOLDERS}


def module_of(path: Path) -> str:
    parts = path.relative_to(home(path)[1].parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def without_types(tree: ast.Module) -> ast.Module:
    """The module without what it imports for type checkers only."""

    class Drop(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if "TYPE_CHECKING" in ast.unparse(node.test) else node

    return Drop().visit(ast.parse(ast.unparse(tree)))


def test_no_module_has_too_many_neighbors():
    counts = {named(path): len(neighbors(path)) for path in MODULES}
    counts = {name: count for name, count in counts.items() if name not in LISTS}
    limits = {name: MOST_NEIGHBORS + (name in ONE_MORE) for name in counts}
    assert not {name: n for name, n in counts.items() if n > limits[name]}


def test_no_modules_import_each_other():
    """Not even through others, nor inside functions."""
    graph = {module_of(path): neighbors(path) for path in MODULES}
    while True:
        leaves = {name for name, found in graph.items() if not found & set(graph)}
        if not leaves:
            break
        graph = {name: of for name, of in graph.items() if name not in leaves}
    assert not graph, "what is left imports itself, or what does"


def test_the_runtime_knows_no_algorithm_by_name():
    named_ones = ("fedblend.algorithms", "fedblend.contrib", "fedblend.transforms")
    assert not breaches(
        lambda path: [
            name
            for name in imported(path)
            if part_of(path) in ("simulation", "selection", "metrics")
            and name.startswith(named_ones)
        ]
    )


def test_flower_is_imported_in_one_folder_only():
    assert not breaches(
        lambda path: [
            name
            for name in imported(path)
            if not named(path).startswith(FLOWER) and name.split(".")[0] == "flwr"
        ]
    )


def test_private_flower_is_imported_in_one_module_only():
    assert not breaches(
        lambda path: [
            name
            for name in imported(path)
            if named(path) != PRIVATE_FLOWER and name.split(".")[0] == "flwr"
            if name.rpartition(".")[0] not in PUBLIC_FLOWER
        ]
    )


INSIDE_A_RUN = {"_engine", "_clients", "_evaluation", "_logs", "_local"}
"""What ``Run`` keeps to its own package."""
OUTSIDE = sorted(
    path
    for folder in (
        *("src", "adapters/src", "federation/src", "interop/src", "reproductions/src"),
        *("benchmarks", "examples"),
    )
    for path in (ROOT / folder).rglob("*.py")
    if PACKAGE / "simulation" not in path.parents
)


def test_nobody_reaches_into_a_run():
    """Whoever needs more of a run gets a method of ``Run``, or of ``Results``."""
    found = [
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for path in OUTSIDE
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and node.attr in INSIDE_A_RUN
    ]
    assert OUTSIDE and not found


def test_only_the_runtime_compiles():
    compiling = ("simulation", "selection", "federation")
    assert not breaches(
        lambda path: [
            ast.unparse(node)
            for node in nodes(path, part_of(path) not in compiling)
            if (isinstance(node, ast.Name) and node.id == "jit")
            or (isinstance(node, ast.Attribute) and node.attr in ("jit", "pmap"))
        ]
    )


def test_nothing_prints_below_the_runs():
    assert not breaches(
        lambda path: [
            "print"
            for node in nodes(path, is_library(path))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if node.func.id == "print"
        ]
    )


def test_the_core_imports_no_extra():
    assert not breaches(
        lambda path: [
            name
            for name in imports_at_once(parsed(path))
            if is_library(path) and name.split(".")[0] in EXTRAS
            if not (named(path).startswith(FLOWER) and name.startswith("flwr"))
            if not (named(path) == ESTIMATORS and name.startswith("sklearn"))
        ]
    )


def test_importing_all_public_names_loads_no_extra():
    program = (
        "import sys, fedblend as fb; [getattr(fb, name) for name in fb.__all__]; "
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "jax" in loaded
    assert not loaded & EXTRAS


def test_every_public_name_is_documented():
    for name in fb.__all__:
        value = getattr(fb, name)
        own = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
        assert own and len(own.strip()) > 20, name
        # A named tuple without a docstring has one made of its fields.
        assert not own.startswith(f"{name}("), name


def test_every_public_function_is_documented():
    assert breaches(undocumented) == []


def undocumented(path: Path) -> Iterator[str]:
    if not is_library(path) or path == PACKAGE / "__init__.py":
        return
    module = importlib.import_module(module_of(path))
    for name, value in vars(module).items():
        public = not name.startswith("_") and callable(value)
        here = getattr(value, "__module__", "") == module.__name__
        if public and here and not value.__doc__:
            yield name


def test_every_file_names_its_license():
    assert not breaches(
        lambda path: [] if path.read_text().startswith(LICENSE) else ["no license"]
    )


def test_no_file_leaves_anything_open():
    words = [
        f"{path.name}: {word}"
        for path in (*MODULES, *TESTS)
        for word in ("TODO", "FIXME", "XXX")
        if path != Path(__file__) and word in path.read_text()
    ]
    assert words == []


def test_the_plan_notices_a_breach():
    """A breach in each rule's own terms, so that the rules above can fail."""
    breach = ast.parse(
        "import rich\ndef f():\n    from fedblend.simulation import simulate\n"
        "    print(1)"
    )
    assert list(imports_at_once(breach)) == ["rich"]
    assert "fedblend.simulation.simulate" in list(imports(breach))
    assert level_of("simulation") > level_of("algorithms") > level_of("local")
    with pytest.raises(AssertionError, match="no place in the plan"):
        level_of("utils")
