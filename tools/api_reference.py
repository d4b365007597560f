# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The API reference, docs/api.md and docs/api/*.md, from the docstrings."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import fedblend as fb
from fedblend.registry import ALGORITHMS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
HOMES: dict[str, str] = vars(fb)["_HOMES"]
"""The module that each public name is imported from."""
WIDTH = 88
SECTIONS = ("Args", "Returns", "Yields", "Raises", "Attributes", "Example", "Examples")
INDEX = """\
# API reference

Every public name of `fedblend`, imported as `fb`. The pages behind the headings have
signatures and docstrings. [glossary.md](glossary.md) explains the words,
[config.md](config.md) the keys of a configuration file.
"""


class Entry(NamedTuple):
    """A public name: how users write it, its value, and the page that describes it."""

    name: str
    value: Any
    page: str


def public() -> list[Entry]:
    """All names of ``fedblend``, and the names of its public modules."""
    entries: list[Entry] = []
    for name, home in sorted(HOMES.items()):
        value = getattr(fb, name)
        if not inspect.ismodule(value):
            entries.append(Entry(f"fb.{name}", value, home.split(".")[1]))
    for name in sorted(HOMES):
        value = getattr(fb, name)
        if inspect.ismodule(value):
            entries += members(f"fb.{name}", value)
    return entries


def members(name: str, module: ModuleType) -> list[Entry]:
    """The names that a public module exports, and those that it defines."""
    page = name.split(".")[1]
    entries = [Entry(name, module, page)]
    listed = ALGORITHMS if module is fb.algorithms else ()
    for own in sorted({*exported(module), *defined(module), *listed}):
        value = getattr(module, own)
        if inspect.ismodule(value):
            entries += members(f"{name}.{own}", value)
        elif callable(value):
            entries.append(Entry(f"{name}.{own}", value, page))
    return entries


def exported(module: ModuleType) -> Iterator[str]:
    """The names that a module imports to export them: ``import name as name``."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom):
            yield from (one.name for one in node.names if one.name == one.asname)


def defined(module: ModuleType) -> Iterator[str]:
    """The functions and classes that a module defines."""
    for name, value in vars(module).items():
        here = getattr(value, "__module__", None) == module.__name__
        if here and not name.startswith("_") and callable(value):
            yield name


def undocumented(entry: Entry) -> Iterator[str]:
    """The name, and those of its public methods, that have no docstring."""
    if not own_doc(entry.value):
        yield entry.name
    for method, value in methods(entry.value):
        if not own_doc(value):
            yield f"{entry.name}.{method}"


def own_doc(value: Any) -> str:
    """The docstring; "" where there is none, or one that Python made of the fields."""
    text = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    generated = inspect.isclass(value) and (text or "").startswith(value.__name__ + "(")
    return "" if generated else inspect.cleandoc(text or "").strip()


def methods(value: Any) -> list[tuple[str, Any]]:
    """The public methods and properties that a class of fedblend defines itself."""
    if not inspect.isclass(value):
        return []
    tree = parsed(value)
    names = [
        node.name
        for node in (tree.body if isinstance(tree, ast.ClassDef) else [])
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]
    found = [(name, value.__dict__[name]) for name in dict.fromkeys(names)]
    return [(name, getattr(one, "__func__", one)) for name, one in found]


def parsed(value: Any) -> ast.stmt | None:
    """The syntax tree of a function's or class's definition."""
    function = getattr(value, "fget", value)
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    except (OSError, TypeError):
        return None
    node = ast.parse(source).body[0]
    return node if isinstance(node, ast.FunctionDef | ast.ClassDef) else None


def signature(name: str, value: Any) -> str:
    """The call as it is written in the source, one argument a line where it is long."""
    node = parsed(value)
    if isinstance(value, property):
        returns = node.returns if isinstance(node, ast.FunctionDef) else None
        return f"{name}: {ast.unparse(returns)}" if returns else name
    if isinstance(node, ast.ClassDef):
        return class_signature(name, node)
    if not isinstance(node, ast.FunctionDef):
        return name
    arguments = [one for one in listed(node.args) if one not in ("self", "cls")]
    after = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return call(name, arguments, after)


def class_signature(name: str, node: ast.ClassDef) -> str:
    """The fields of a named tuple or dataclass, or the arguments of ``__init__``."""
    for own in node.body:
        if isinstance(own, ast.FunctionDef) and own.name == "__init__":
            return call(name, [one for one in listed(own.args) if one != "self"], "")
    record = "NamedTuple" in ast.dump(node) or "dataclass" in ast.dump(node)
    fields = [
        field(own)
        for own in node.body
        if isinstance(own, ast.AnnAssign) and "ClassVar" not in ast.unparse(own)
    ]
    return call(name, fields, "") if record and fields else f"class {name}"


def field(node: ast.AnnAssign) -> str:
    """A field of a record with its default; ``dataclasses.field`` may hold one."""
    default = node.value
    if isinstance(default, ast.Call) and "field" in ast.unparse(default.func):
        given = {one.arg: one.value for one in default.keywords}
        made = default if "default_factory" in given else None
        default = given.get("default", made)
    after = "" if default is None else f" = {ast.unparse(default)}"
    return f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}{after}"


def listed(args: ast.arguments) -> list[str]:
    """The arguments as text, with the marks ``/`` and ``*``."""
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    shown = [one(*pair) for pair in zip(plain, defaults, strict=True)]
    if args.posonlyargs:
        shown.insert(len(args.posonlyargs), "/")
    if args.vararg:
        shown.append(f"*{ast.unparse(args.vararg)}")
    elif args.kwonlyargs:
        shown.append("*")
    shown += [
        one(*pair) for pair in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    return [*shown, *([f"**{ast.unparse(args.kwarg)}"] if args.kwarg else [])]


def one(argument: ast.arg, default: ast.expr | None) -> str:
    """One argument with its type and default."""
    text = ast.unparse(argument)
    if default is None:
        return text
    return f"{text}{' = ' if argument.annotation else '='}{ast.unparse(default)}"


def call(name: str, arguments: list[str], after: str) -> str:
    """A call on one line if it fits, else one argument a line."""
    line = f"{name}({', '.join(arguments)}){after}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {one}," for one in arguments), f"){after}"])


def markdown(text: str) -> str:
    """A docstring as Markdown: arguments as lists, examples and equations fenced."""
    lines: list[str] = []
    source = text.replace("``", "`").splitlines()
    at = 0
    while at < len(source):
        line = source[at]
        label = line.removesuffix(":")
        block = indented(source, at + 1)
        if label in SECTIONS and line.endswith(":") and block:
            lines += ["", *section(label, block), ""]
            at += 1 + len(block)
        elif line.endswith("::"):
            block = indented(source, at + 1)
            lines += [line[:-1], "", *fenced("text", block), ""]
            at += 1 + len(block)
        elif re.match(r"\w+ {2,}\S", line):
            end = at
            while end < len(source) and source[end].strip():
                end += 1
            lines += ["", *fenced("text", source[at:end]), ""]
            at = end
        elif line.lstrip().startswith(">>> "):
            end = at
            while end < len(source) and source[end].strip():
                end += 1
            lines += ["", *fenced("pycon", source[at:end]), ""]
            at = end
        else:
            lines.append(line)
            at += 1
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def indented(source: list[str], start: int) -> list[str]:
    """The indented or blank lines from ``start`` on."""
    end = start
    while end < len(source) and (not source[end].strip() or source[end][0] == " "):
        end += 1
    return source[start:end]


def fenced(language: str, block: list[str]) -> list[str]:
    """A fenced block, without the indentation that its lines have in common."""
    text = textwrap.dedent("\n".join(block)).strip("\n")
    return [f"```{language}", *text.splitlines(), "```"]


def section(label: str, block: list[str]) -> list[str]:
    """A section of a docstring: a list of names, a sentence, or an example."""
    text = textwrap.dedent("\n".join(block)).strip("\n")
    if label.startswith("Example"):
        return [markdown(text)]
    if label == "Returns":
        return [f"**Returns**: {markdown(text)}"]
    title = {"Args": "Arguments"}.get(label, label)
    items = re.split(r"\n(?=\S)", text)
    return [f"**{title}**", "", *(item(one) for one in items)]


def item(text: str) -> str:
    """``name: what it is`` as an item of a list."""
    name, colon, rest = text.partition(":")
    shown = f"- `{name}`:{rest}" if colon else f"- {text}"
    first, *others = shown.splitlines()
    return "\n".join([first, *(f"  {line.strip()}" for line in others)])


def link(value: Any) -> str:
    """A link to the file that defines the value; "" where there is none."""
    try:
        path = Path(inspect.getsourcefile(inspect.unwrap(value)) or "").resolve()
    except TypeError:
        return ""
    inside = ROOT in path.parents
    return f"[source](../../{path.relative_to(ROOT).as_posix()})" if inside else ""


def fields(value: Any) -> Iterator[str]:
    """The fields of a class that have a docstring of their own, as items of a list."""
    node = parsed(value) if inspect.isclass(value) else None
    body = node.body if isinstance(node, ast.ClassDef) else []
    for field, text in pairwise(body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)):
            continue
        if isinstance(text.value, ast.Constant):
            says = " ".join(str(text.value.value).split()).replace("``", "`")
            yield f"- `{ast.unparse(field.target)}`: {says}"


def described(entry: Entry, shown: dict[int, str]) -> Iterator[str]:
    """The text of one name; a name that has a text already is referred to."""
    first = shown.setdefault(id(entry.value), entry.name)
    level = "##" if inspect.ismodule(entry.value) else "###"
    yield f"{level} `{entry.name}`\n"
    if first != entry.name:
        yield f"The same as `{first}`.\n"
        return
    if not inspect.ismodule(entry.value):
        yield f"```text\n{signature(entry.name, entry.value)}\n```\n"
    yield f"{markdown(own_doc(entry.value))}\n"
    if listing := "\n".join(fields(entry.value)):
        yield f"{listing}\n"
    if where := link(entry.value):
        yield f"{where}\n"
    short = entry.name.rsplit(".", 1)[-1]
    for name, value in methods(entry.value):
        yield f"```text\n{signature(f'{short}.{name}', value)}\n```\n"
        yield f"{markdown(own_doc(value))}\n"


def summary(entry: Entry) -> str:
    """A line of the index: the name and the first line of its docstring."""
    first = own_doc(entry.value).split("\n\n")[0].replace("``", "`")
    return f"- `{entry.name}`: {' '.join(first.split())}"


@cache
def pages() -> dict[str, str]:
    """The text of every page, by its path inside of docs."""
    entries = public()
    shown: dict[int, str] = {}
    found: dict[str, str] = {}
    index = [INDEX]
    for page in sorted({entry.page for entry in entries}):
        inside = [entry for entry in entries if entry.page == page]
        parts = [text for entry in inside for text in described(entry, shown)]
        found[f"api/{page}.md"] = "\n".join([f"# API: {page}\n", *parts])
        index += [f"## [{page}](api/{page}.md)\n", *map(summary, inside), ""]
    return {"api.md": "\n".join(index), **found}
