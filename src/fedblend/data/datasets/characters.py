# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Texts as character numbers, with one vocabulary for all datasets.

The vocabulary is that of LEAF's Shakespeare. It has no character for unknown ones, so
``spelled`` transcribes other texts.
"""

import re
import unicodedata
from collections.abc import Mapping

import numpy as np

from fedblend.checks import COUNT, Number
from fedblend.data.dataset import DataError, Dataset

CHARACTERS = (
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)
"""The vocabulary, LEAF's 80 characters in order; a character's number is its place."""

OTHER = "}"
"""It stands for a character, word or formula outside of the vocabulary, which has it
because of a typo: Shakespeare's roles have it twice."""

PADDING = -1
"""The target at places behind the end of a text, which the loss leaves out."""

WINDOWS = {"length": COUNT, "minimum": Number(least=2, whole=True)}
"""The rules of the options that cut texts into windows."""

_PLAIN = str.maketrans(
    "\u2019\u2018\u201c\u201d\u2010\u2011\u2013\u2014\u2212", "''\"\"-----"
)
"""Typographic quotes and dashes, and their ASCII forms."""
_ACCENT = re.compile("[\u0300-\u036f]")
_UNKNOWN = re.compile(f"[^{re.escape(CHARACTERS)}]")


def spelled(text: str) -> str:
    r"""A text in the vocabulary, without accents, whitespace as single blanks.

    >>> spelled("caf\u00e9 \u2013 50 %,\nla \u201ccarte\u201d")
    'cafe - 50 }, la "carte"'
    """
    decomposed = unicodedata.normalize("NFKD", text.translate(_PLAIN))
    return _UNKNOWN.sub(OTHER, re.sub(r"\s+", " ", _ACCENT.sub("", decomposed)))


def windows(text: str, length: int, where: str) -> tuple[np.ndarray, np.ndarray]:
    r"""A text cut into inputs and targets, both [windows, length].

    >>> inputs, targets = windows("To be", 3, "Hamlet")
    >>> ["".join(CHARACTERS[number] for number in row) for row in inputs]
    ['To ', 'b\n\n']
    >>> targets[1].tolist() == [CHARACTERS.index("e"), PADDING, PADDING]
    True
    """
    unknown = _UNKNOWN.search(text)
    if unknown:
        raise DataError(f"{where}: {unknown.group()!r} is not in the vocabulary")
    codes = np.frombuffer(text.encode("ascii"), np.uint8)
    numbers = np.searchsorted(
        np.frombuffer(CHARACTERS.encode("ascii"), np.uint8), codes
    )
    rows = -(-(len(text) - 1) // length)
    inputs = np.zeros(rows * length, np.int32)
    targets = np.full(rows * length, PADDING, np.int32)
    inputs[: len(text) - 1] = numbers[:-1]
    targets[: len(text) - 1] = numbers[1:]
    return inputs.reshape(rows, length), targets.reshape(rows, length)


def by_writer(
    name: str, who: str, texts: Mapping[str, str], length: int, minimum: int
) -> Dataset:
    """The windows of several writers' texts; keys are writers.

    Args:
        name: of the dataset.
        who: the word for a writer, such as "role".
        texts: by writer, in the vocabulary.
        length: number of characters of a window.
        minimum: writers with fewer characters are left out.
    """
    texts = {writer: text for writer, text in texts.items() if len(text) >= minimum}
    if not texts:
        raise DataError(f"{name}: no {who} has {minimum} characters")
    pieces = [
        windows(text, length, f"{name}: {writer}") for writer, text in texts.items()
    ]
    inputs, targets = (np.concatenate(part) for part in zip(*pieces, strict=True))
    return Dataset(
        (inputs, targets),
        "sequence",
        len(CHARACTERS),
        keys=np.repeat(list(texts), [len(piece[0]) for piece in pieces]),
        name=name,
        label_names=tuple(CHARACTERS),
    )
