# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Errors of the user's input: one line each."""

import difflib
import inspect
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import numpy as np

LONGEST = 60
"""Characters of a value that are shown."""
MOST_SAID = 120
"""Characters of the error of a user's function that are shown."""
NO_TORCH = "functions of PyTorch do not take arrays of JAX; see fb.losses and optax"
LIBRARIES = (
    "<frozen ",
    sysconfig.get_path("stdlib"),
    str(Path(np.__file__).parents[1]),
)
"""How the files begin of Python's own modules, and of those that are installed."""
ELSEWHERE: dict[str, str] = dict.fromkeys(
    (
        *("char_rnn", "transformer", "text_classifier", "Prefixed"),
        *("train_tokenizer", "load_tokenizer", "read_texts", "Tokenizer"),
        *("fedsa_lora", "ffa_lora", "fedalt_lora", "rolora"),
    ),
    "adapters",
)
"""Names that a distribution of this repository has, and the extra that brings it."""


class InputError(ValueError):
    """What a user gave cannot be used: one line that says what, where and why.

    The command line shows that line and ends with exit code 2.
    """


class ConfigError(InputError):
    """A configuration that cannot be used."""


class RunError(InputError):
    """The folder of a run that cannot be used."""


class CheckpointError(InputError):
    """A checkpoint that cannot be used, and why."""


class SettingError(InputError):
    """An argument, or a key, that cannot be used: ``key: why``.

    Args:
        key: the argument, or who takes it and its name, such as ``"fedavg: steps"``.
        why: what is wrong.
    """

    def __init__(self, key: str, why: str):
        self.key, self.why = key, why
        super().__init__(f"{key}: {why}")


class UserError(SettingError):
    """An argument, or a key, whose value is not allowed: ``key: value is not allowed``.

    Args:
        key: who takes it and its name, such as ``"fedavg: steps"``.
        value: what was given.
        allowed: what it has to be, such as ``"a number above 0"``.
        said: the value in words, where it would say too little or too much itself.
    """

    def __init__(self, key: str, value: Any, allowed: str, said: str | None = None):
        self.value, self.allowed = value, allowed
        super().__init__(key, f"{said or show_value(value)} is not {allowed}")


class CodeError(SettingError):
    """An error that a function of the user raised.

    Args:
        key: the argument that the function is.
        given: what it was called with, in words.
        origin: the error. Its traceback keeps the lines of the user's files only, if
            there are any, and Python prints it first.
    """

    def __init__(self, key: str, given: str, origin: Exception):
        self.origin = origin
        super().__init__(key, f"fails on {given}: {describe(origin, MOST_SAID)}")
        kept = None
        for one in reversed(_own_lines(origin)):
            kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
        if kept is not None:
            origin.__suppress_context__ = True  # errors inside of JAX
            origin.with_traceback(kept)


def describe(error: Exception, most: int | None = None) -> str:
    """An error of the user's own code on one line, and where it happened.

    Args:
        error: with its traceback.
        most: the number of characters of its text that are shown; all if None.
    """
    own, text = _own_lines(error), " ".join(str(error).split())[:most]
    place = _place(own[-1].tb_frame.f_code, own[-1].tb_lineno) if own else ""
    modules = [_module(one.tb_frame) for one in _lines(error)]
    more = f"; {NO_TORCH}" if any(one.startswith("torch") for one in modules) else ""
    return f"{type(error).__name__}: {text}{more}{place}"


def _lines(error: Exception) -> list[TracebackType]:
    found, trace = list[TracebackType](), error.__traceback__
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def _own_lines(error: Exception) -> list[TracebackType]:
    return [
        one
        for one in _lines(error)
        if _is_own(one.tb_frame.f_code, _module(one.tb_frame))
    ]


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _is_own(code: CodeType, module: str) -> bool:
    """Whether this is the user's code, not that of a library or of fedblend."""
    elsewhere = code.co_filename.startswith(LIBRARIES)
    return not (elsewhere or module.startswith("fedblend"))


def _place(code: CodeType, line: int) -> str:
    return f" ({code.co_filename}:{line})"


def find_place(function: Callable[..., Any]) -> str:
    """The end of a line: where a function of the user is; nothing of another's.

    Of a function that wraps another, those of the innermost.
    """
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None)
    if code is None or not _is_own(code, str(inner.__module__)):
        return ""
    return _place(code, code.co_firstlineno)


def shorten(error: InputError) -> InputError:
    """The error without the lines of fedblend and JAX, to be raised anew.

    What Python prints then begins with the lines of the user's function, if it failed.
    """
    error.__cause__ = getattr(error, "origin", None)
    vars(error).pop("__notes__", None)  # those of JAX, about lines that it left out
    return error.with_traceback(None)


def show_value(value: Any) -> str:
    """A value on one line, and not a long one.

    >>> show_value(np.float32(2.0)), show_value("x"), show_value(np.array([1, 2]))
    ('2.0', "'x'", '[1, 2]')
    """
    if hasattr(value, "tolist") and not isinstance(value, type):  # NumPy's and JAX's
        value = np.asarray(value).tolist()
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def hint(word: str, known: Iterable[str]) -> str:
    """The end of a line about an unknown word: the nearest known one, or all of them.

    >>> hint("mnits", ["digits", "mnist"]), hint("x", ["digits"]), hint("x", [])
    ("did you mean 'mnist'?", 'known are digits', 'there are none')
    """
    known, extra = list(known), ELSEWHERE.get(word)
    if extra is not None:
        return f"it needs fedblend-{extra}: pip install 'fedblend[{extra}]'"
    near = difflib.get_close_matches(word, known, 1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known are {', '.join(known)}" if known else "there are none"
