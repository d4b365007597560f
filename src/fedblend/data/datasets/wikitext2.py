# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""WikiText-2: the next character in articles of the English Wikipedia.

Merity, Xiong, Bradbury, Socher, "Pointer sentinel mixture models" (ICLR 2017).

The text is published in words: blanks around all marks, ``@-@`` within words, and
``<unk>`` for rare words. That is undone, so that its characters follow each other as in
other texts: marks stand where they are written, headings are plain lines, and an
unknown word is one character, ``characters.OTHER``. The rows are those of the file for
validation, 1.1 MB, unless another one is named.
"""

import lzma
import re
from pathlib import Path

from fedblend.data.dataset import DataError, Dataset, MissingDataError
from fedblend.data.datasets.characters import CHARACTERS, OTHER, spelled, windows
from fedblend.data.download import find

_WRITTEN = (
    (re.compile(r"^ (?:= )+(.*?)(?: =)+ $", re.M), r"\1"),
    (re.compile(r" @(.)@ "), r"\1"),
    (re.compile("<unk>"), OTHER),
    (re.compile(r'" ([^"\n]*) "'), r'"\1"'),
    (re.compile(r" ([,.;:?!)\]'])"), r"\1"),
    (re.compile(r"([(\[]) "), r"\1"),
)
"""What is replaced, one after the other."""


def wikitext2(
    length: int = 80, file: str | None = None, test_file: str | None = None
) -> Dataset:
    """Windows of articles, [rows, length] character numbers, with a test set.

    The targets are the inputs one place on, as in ``shakespeare``.

    Args:
        length: characters of a window.
        file: of the rows, plain or .xz; ``wiki.valid.tokens.xz`` in the data home.
        test_file: of the test rows; ``wiki.test.tokens.xz`` there.
    """
    if length < 1:
        raise DataError(f"wikitext-2: length: {length} is less than 1")

    def rows(given, name):
        path = Path(given) if given else find("wikitext-2", name)
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
    r"""A tokenised text as it was written.

    >>> written('It weighs 0 @.@ 7 kg ( 2 lb ) , or " a bit more " .')
    'It weighs 0.7 kg (2 lb), or "a bit more".'
    """
    for pattern, plain in _WRITTEN:
        tokens = pattern.sub(plain, tokens)
    return tokens


def _text(path: Path) -> str:
    if not path.is_file():
        raise MissingDataError(f"wikitext-2: {path}: no such file")
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            text = spelled(written(file.read().decode())).strip()
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError):
        raise DataError(f"{path}: is not a text, plain or .xz") from None
    if len(text) < 2:
        raise DataError(f"{path}: has no two characters")
    return text
