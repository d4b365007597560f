# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""WikiText-2: the next character in articles of the English Wikipedia.

Merity, Xiong, Bradbury, Socher, "Pointer sentinel mixture models" (ICLR 2017).

The text is published as tokens: blanks around all punctuation, ``@-@`` within words,
and ``<unk>`` for rare words. The loader restores ordinary text: punctuation without
blanks, headings as plain lines, and one character, ``characters.OTHER``, for an unknown
word. By default the rows are those of the validation file, 1.1 MB.
"""

import lzma
import re
from pathlib import Path

from fedblend.checks import COUNT, gate
from fedblend.data.catalog import Size, dataset
from fedblend.data.dataset import DataError, Dataset
from fedblend.data.datasets.characters import CHARACTERS, OTHER, spelled, windows
from fedblend.data.download import find_either, open_unpacked

_WRITTEN = (
    (re.compile(r"^ (?:= )+(.*?)(?: =)+ $", re.M), r"\1"),
    (re.compile(r" @(.)@ "), r"\1"),
    (re.compile("<unk>"), OTHER),
    (re.compile(r'" ([^"\n]*) "'), r'"\1"'),
    (re.compile(r" ([,.;:?!)\]'])"), r"\1"),
    (re.compile(r"([(\[]) "), r"\1"),
)
"""Replacements, in this order."""


@dataset(
    "The next character in articles of Wikipedia, windows of 80",
    Size(rows=12807, test_rows=14222, classes=80),
    "CC BY-SA 3.0; Merity et al. 2017",
    name="wikitext-2",
)
@gate(length=COUNT)
def wikitext2(
    length: int = 80, file: str | None = None, test_file: str | None = None
) -> Dataset:
    """Windows of articles, [rows, length] character numbers, with a test set.

    The targets are the inputs shifted by one place, as in ``shakespeare``.

    Args:
        length: number of characters of a window.
        file: of the rows, plain or .xz; by default ``wiki.valid.tokens.xz`` in the data
            home.
        test_file: of the test rows; by default ``wiki.test.tokens.xz`` in the data
        home.
    """

    def rows(given, name):
        path = find_either("wikitext-2", given, name)
        return windows(_text(path), length, str(path))

    return Dataset(
        rows(file, "wiki.valid.tokens.xz"),
        "sequence",
        len(CHARACTERS),
        test_rows=rows(test_file, "wiki.test.tokens.xz"),
        name="wikitext-2",
        label_names=tuple(CHARACTERS),
    )


def written(tokens: str) -> str:
    r"""A tokenized text as ordinary text.

    >>> written('It weighs 0 @.@ 7 kg ( 2 lb ) , or " a bit more " .')
    'It weighs 0.7 kg (2 lb), or "a bit more".'
    """
    for pattern, plain in _WRITTEN:
        tokens = pattern.sub(plain, tokens)
    return tokens


def _text(path: Path) -> str:
    try:
        with open_unpacked(path) as file:
            text = spelled(written(file.read().decode())).strip()
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError):
        raise DataError(f"{path}: is not a text, plain or .xz") from None
    if len(text) < 2:
        raise DataError(f"{path}: has fewer than two characters")
    return text
