# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Measure how large and how tangled the packages are.

python tools/house.py                    everything that is read from the source
python tools/house.py modules            the longest modules, in code lines
python tools/house.py touched run        the files that `fedblend run` calls into
python tools/house.py touched auto       those of `fedblend auto`
python tools/house.py touched round      those of a federated round on three nodes

A file is touched when one of its functions executes; importing a module does not count.
Two files are a two-way pair when each of them calls into the other.
"""

import argparse
import ast
import inspect
import io
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
OTHERS = ("adapters", "federation", "interop")
FOLDERS = {"fedblend": ROOT / "src" / "fedblend"} | {
    name: ROOT / name / "src" / f"fedblend_{name}" for name in OTHERS
}
"""The packages that are measured."""
PACKAGE = FOLDERS["fedblend"]
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
MAY_NAME = (
    PACKAGE / "algorithms",
    PACKAGE / "errors.py",
    PACKAGE / "contrib",
    PACKAGE / "runs" / "auto",
    FOLDERS["adapters"],
    FOLDERS["federation"] / "ops" / "local_cluster.py",
)
"""Where an algorithm may be named: its own package, the table of what other
distributions have, the candidates, the demo."""
PUBLIC_FLOWER = ("app", "clientapp", "serverapp")
PREPOSITIONS = """
after against around as at before below beside besides between by for from in inside
into of on outside over per to under up upon with within without
"""
PARTICIPLES = """
begun broken built chosen done drawn found given grown held hidden kept known lost made
met said seen sent shown spent taken told worn written
"""
NO_PARTICIPLES = {"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed"}


def modules(*folders: Path) -> list[Path]:
    """The modules in folders."""
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def parse(path: Path) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(path.read_text())


def docstring(node: ast.AST) -> ast.AST | None:
    """The statement that is the docstring of a module, a class or a function."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if not isinstance(node, kinds) or ast.get_docstring(node) is None:
        return None
    return node.body[0]


def code_lines(path: Path) -> int:
    """The code lines of a module: neither blank, nor comment, nor docstring."""
    text = path.read_text()
    strings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            strings.update(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in SILENT
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - strings)


def nodes(path: Path) -> int:
    """The nodes of the syntax tree of a module, without docstrings."""
    every = list(ast.walk(parse(path)))
    return len(every) - 2 * sum(docstring(node) is not None for node in every)


def repeated_classes(paths: Iterable[Path]) -> list[str]:
    """The names of classes that several modules define."""
    found = Counter(
        node.name
        for path in paths
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in found.items() if count > 1)


def named_algorithms(paths: Iterable[Path]) -> list[str]:
    """The strings that are the name of an algorithm, outside of where they may be."""
    from fedblend.registry import ALGORITHMS

    allowed = tuple(map(str, MAY_NAME))
    return [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.value}"
        for path in paths
        if not str(path).startswith(allowed)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value in ALGORITHMS
    ]


def private_flower(paths: Iterable[Path]) -> Counter[str]:
    """Imports of Flower's private packages, by the folder of the module."""
    found: Counter[str] = Counter()
    for path in paths:
        for node in ast.walk(parse(path)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            for name in names:
                first, *rest = name.split(".")
                if first == "flwr" and rest[:1] and rest[0] not in PUBLIC_FLOWER:
                    found[str(path.parent.relative_to(ROOT))] += 1
    return found


def odd_names(paths: Iterable[Path]) -> tuple[list[str], list[str], int]:
    """Functions named by a participle, by a preposition, and the number of all.

    The first word of a name decides.
    """
    functions = [
        node.name
        for path in paths
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    first = [(name, name.strip("_").split("_")[0]) for name in functions]
    participles = [
        name
        for name, word in first
        if word in PARTICIPLES.split()
        or (word.endswith("ed") and word not in NO_PARTICIPLES)
    ]
    prepositions = [name for name, word in first if word in PREPOSITIONS.split()]
    return participles, prepositions, len(functions)


def policy_keys() -> int:
    """The keys of a node's policy, those of its tables included."""
    from fedblend_federation.policy.policy import Policy

    def count(table: Any) -> int:
        inside = [getattr(of.annotation, "model_fields", None) for of in table.values()]
        return sum(1 if keys is None else count(keys) for keys in inside)

    return count(Policy.model_fields)


def measures() -> Iterator[tuple[str, str]]:
    """What is read from the source: the name of a measure, and its value."""
    import fedblend as fb

    every = modules(*FOLDERS.values())
    for name, folder in FOLDERS.items():
        paths = modules(folder)
        total = sum(map(nodes, paths))
        yield f"syntax nodes of {name}", f"{total:,} in {len(paths)} files"
    lines, largest = max((code_lines(path), path) for path in every)
    yield "largest module", f"{lines} code lines, {largest.relative_to(ROOT)}"
    short = sum(code_lines(path) < 60 for path in every)
    yield "files below 60 code lines", f"{short}"
    yield "class names used twice", f"{len(repeated_classes(every))}"
    yield "strings that name an algorithm", f"{len(named_algorithms(every))}"
    private = private_flower(every)
    where = ", ".join(f"{count} in {name}" for name, count in private.items())
    yield "private imports of Flower", where or "none"
    yield "public names of fedblend", f"{len(fb.__all__)}"
    arguments = inspect.signature(fb.simulate).parameters
    yield "arguments of simulate", f"{len(arguments)}"
    yield "keys of a node's policy", f"{policy_keys()}"
    participles, prepositions, functions = odd_names(every)
    yield "functions", f"{functions}"
    yield "named by a participle", f"{len(participles)}"
    yield "named by a preposition", f"{len(prepositions)}"


class Calls(NamedTuple):
    """Calls into files of the packages."""

    files: Counter[str]
    """Calls by file."""
    between: set[tuple[str, str]]
    """The file of a caller, and that of what it called."""

    @property
    def two_way(self) -> list[tuple[str, str]]:
        """The pairs of files that call into each other."""
        return sorted(
            (one, other)
            for one, other in self.between
            if one < other and (other, one) in self.between
        )


def is_importing(frame: FrameType | None) -> bool:
    """Whether a call is a part of the import of a module, such as a registration."""
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") != "__main__"


@contextmanager
def traced_calls() -> Iterator[Calls]:
    """The calls that are made inside the block."""
    calls, sources = Calls(Counter(), set()), f"{ROOT}/"
    inside = tuple(f"{folder}/" for folder in FOLDERS.values())

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        del argument
        code = frame.f_code
        # Bodies of modules and classes are not optimized code: they are imports.
        runs = event == "call" and code.co_flags & inspect.CO_OPTIMIZED
        if not runs or not code.co_filename.startswith(inside):
            return
        if is_importing(frame):
            return
        name = code.co_filename.removeprefix(sources)
        calls.files[name] += 1
        caller = frame.f_back
        while caller and not caller.f_code.co_filename.startswith(inside):
            caller = caller.f_back
        if caller and caller.f_code.co_filename != code.co_filename:
            calls.between.add((caller.f_code.co_filename.removeprefix(sources), name))

    threading.setprofile(on_event)
    sys.setprofile(on_event)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def calls_of_command(*arguments: str) -> Calls:
    """The calls of a command of ``fedblend``."""
    from fedblend.cli import main as fedblend

    with traced_calls() as calls:
        code = fedblend([*arguments])
    if code:
        sys.exit(f"fedblend {arguments[0]}: exit code {code}")
    return calls


def calls_of_run() -> Calls:
    """The calls of ``fedblend run`` on the configuration of ``fedblend init``."""
    with tempfile.TemporaryDirectory() as folder:
        out = ("--out", f"{folder}/out", "--set", "run.rounds=4")
        return calls_of_command("run", str(PACKAGE / "cli" / "first.toml"), *out)


def calls_of_auto() -> Calls:
    """The calls of ``fedblend auto`` on the table of ``fedblend data example``."""
    from fedblend.cli import main as fedblend

    with tempfile.TemporaryDirectory() as folder:
        table, out = f"{folder}/heart.csv", ("--out", f"{folder}/out")
        fedblend(["data", "example", table])
        columns = ("--client", "center", "--target", "disease")
        return calls_of_command("auto", table, *columns, "--minutes", "0.5", *out)


def calls_of_round() -> Calls:
    """The calls of one round of a federation, over a transport of lists.

    The federation is that of the tests, the round its second: nodes are enrolled, and
    the functions of a round compiled. It goes from the server's draw of the cohort to
    its checkpoint.
    """
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "federation" / "tests")]
    from configured import experiment, federated, method, nodes, write_rows

    from fedblend_federation.server.run import run_server
    from loopback import LoopbackTransport

    calls, hook = Calls(Counter(), set()), None

    def on_step(round: int, rounds: int) -> None:
        nonlocal calls, hook
        del rounds
        if hook is not None:
            hook.__exit__(None, None, None)
            hook = None
        elif round == 1:
            hook = traced_calls()
            calls = hook.__enter__()

    with tempfile.TemporaryDirectory() as folder:
        place = write_rows(Path(folder))
        settings = method("apfl", place, rounds=3) + "[measure]\nlocal = false\n"
        run = experiment(place / "run", federated(settings, deadline=60.0))
        transport = LoopbackTransport(nodes(place, place))
        run_server(run, transport, poll=0.0, on_step=on_step)
    return calls


TRACED = {"run": calls_of_run, "auto": calls_of_auto, "round": calls_of_round}


def print_counts(counts: Mapping[str, int]) -> None:
    """Print counts, the largest first."""
    for name, count in sorted(counts.items(), key=lambda pair: -pair[1]):
        print(f"{count:8d} {name}")


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("modules")
    commands.add_parser("touched").add_argument("what", choices=TRACED)
    options = parser.parse_args()
    if options.command == "modules":
        every = {path: code_lines(path) for path in modules(*FOLDERS.values())}
        print_counts({str(path.relative_to(ROOT)): n for path, n in every.items()})
    elif options.command == "touched":
        calls = TRACED[options.what]()
        print_counts(calls.files)
        print(*(f"two-way: {one} {other}" for one, other in calls.two_way), sep="\n")
        print(f"{len(calls.files)} files, {len(calls.two_way)} two-way pairs")
    else:
        for name, value in measures():
            print(f"{name:32} {value}")


if __name__ == "__main__":
    main()
