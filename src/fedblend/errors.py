# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Errors of the user's input: one line each."""

import difflib
from collections.abc import Iterable
from typing import Any

import numpy as np

LONGEST = 60
"""Characters of a value that are shown."""
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
