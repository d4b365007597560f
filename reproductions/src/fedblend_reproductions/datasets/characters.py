# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Texts as numbers of characters or tokens: Shakespeare, WikiText-2.

The characters are those of LEAF's Shakespeare. There is none for unknown ones, so
``spelled`` transcribes other texts. With a ``tokenizer`` the same texts come in its
tokens: measures by character of both can be compared.

**shakespeare**: the next character in the lines of one role of one play. McMahan et
al., "Communication-efficient learning of deep networks from decentralized data"
(AISTATS 2017); split by role as in Caldas et al., "LEAF: a benchmark for federated
settings" (2018), from Project Gutenberg's Complete Works (etext 100). The file
``roles.json.xz`` holds ``{role: {"play": name, "lines": [line, ...]}}``. As in LEAF the
lines of a role are put one after the other with a blank behind each, and runs of blanks
become one. LEAF cuts a sample of 80 characters and the next one at every place,
4 226 158 in all; here the text is cut in windows that do not overlap, and every
character of a window has its next one as target.

**wikitext-2**: the next character in articles of the English Wikipedia. Merity, Xiong,
Bradbury, Socher, "Pointer sentinel mixture models" (ICLR 2017). The text is published
as tokens: blanks around all punctuation, ``@-@`` within words, and ``<unk>`` for rare
words. The loader restores ordinary text: punctuation without blanks, headings as plain
lines, and one character, ``OTHER``, for an unknown word. By default the rows are those
of the validation file, 1.1 MB.
"""

import json
import lzma
import re
import unicodedata
from collections.abc import Mapping

import numpy as np

from fedblend.checks import COUNT, Number, gate
from fedblend.data.dataset import (
    DataError,
    Dataset,
    Rows,
    Size,
    dataset,
    intact,
    open_unpacked,
)
from fedblend_adapters.tokenizer import PADDING as PADDING
from fedblend_adapters.tokenizer import cut, load_tokenizer, read_texts
from fedblend_reproductions.datasets.download import find_either, public_sets

CHARACTERS = (
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)
"""The vocabulary, LEAF's 80 characters in order; a character's number is its place."""

OTHER = "}"
"""It stands for a character, word or formula outside of the vocabulary, which has it
because of a typo: Shakespeare's roles have it twice."""

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


def windows(text: str, length: int, where: str) -> Rows:
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
    known = np.frombuffer(CHARACTERS.encode("ascii"), np.uint8)
    return cut(np.searchsorted(known, codes), length)


def by_writer(
    name: str,
    who: str,
    texts: Mapping[str, str],
    length: int,
    minimum: int,
    tokenizer: str | None = None,
) -> Dataset:
    """The windows of several writers' texts; keys are writers.

    Args:
        name: of the dataset.
        who: the word for a writer, such as "role".
        texts: by writer, in the vocabulary.
        length: number of characters or tokens of a window.
        minimum: writers with fewer characters are left out.
        tokenizer: a ``tokenizer.json``; None for characters.
    """
    texts = {writer: text for writer, text in texts.items() if len(text) >= minimum}
    if not texts:
        raise DataError(f"{name}: no {who} has {minimum} characters")
    if tokenizer is not None:
        return read_texts(texts, load_tokenizer(tokenizer), length=length, name=name)
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


@dataset(
    "The next character in Shakespeare's roles, windows of 80",
    Size(rows=54500, classes=80, clients=1129),
    "World Library's text, personal non-commercial use, not to be passed on; "
    "McMahan et al. 2017; Caldas et al. 2018",
    needs=public_sets("shakespeare"),
    model="char_rnn",
    by_row=True,
)
@gate(**WINDOWS)
def shakespeare(
    length: int = 80,
    minimum: int = 81,
    file: str | None = None,
    tokenizer: str | None = None,
) -> Dataset:
    """Windows of the lines of 1129 roles, [rows, length] numbers of characters.

    The targets are the inputs shifted by one place. Character 0 fills the last window
    of a role, with ``PADDING`` as its targets.

    Args:
        length: number of characters or tokens of a window.
        minimum: roles with fewer characters are left out; LEAF asks for 81, which 1129
            of 1144 roles have.
        file: a file like ``roles.json.xz``, by default the one in the data home.
        tokenizer: a ``tokenizer.json``, whose tokens rows then have; None for
            characters.
    """
    texts = role_texts(file)
    return by_writer("shakespeare", "role", texts, length, minimum, tokenizer)


def role_texts(file: str | None = None) -> dict[str, str]:
    """The lines of each of Shakespeare's roles, as one text; see ``shakespeare``."""
    path = find_either("shakespeare", file, "roles.json.xz")
    problem = "is not an .xz of roles and their lines"
    with intact(path, problem), lzma.open(path, "rt", encoding="utf-8") as opened:
        roles = json.load(opened)
        texts = {role: "".join(f"{x} " for x in roles[role]["lines"]) for role in roles}
    return {role: re.sub("   *", " ", text) for role, text in texts.items()}


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
    needs=public_sets("wikitext-2"),
    model="char_rnn",
    by_row=True,
)
@gate(length=COUNT)
def wikitext2(
    length: int = 80,
    file: str | None = None,
    test_file: str | None = None,
    tokenizer: str | None = None,
) -> Dataset:
    """Windows of articles, [rows, length] numbers of characters, with a test set.

    The targets are the inputs shifted by one place, as in ``shakespeare``.

    Args:
        length: number of characters or tokens of a window.
        file: of the rows, plain or .xz; by default ``wiki.valid.tokens.xz`` in the data
            home.
        test_file: of the test rows; by default ``wiki.test.tokens.xz`` in the data
            home.
        tokenizer: a ``tokenizer.json``, whose tokens rows then have; None for
            characters.
    """
    own = None if tokenizer is None else load_tokenizer(tokenizer)

    def rows(given, part):
        text = article_text(part, given)
        if own is not None:
            return cut(own.encode(text), length)
        return windows(text, length, f"wikitext-2: {part}")

    return Dataset(
        rows(file, "valid"),
        "sequence",
        len(CHARACTERS) if own is None else own.size,
        test_rows=rows(test_file, "test"),
        name="wikitext-2",
        label_names=() if own is not None else tuple(CHARACTERS),
    )


def article_text(part: str = "valid", file: str | None = None) -> str:
    """The articles of a part of WikiText-2, "valid" or "test"; see ``wikitext2``."""
    path = find_either("wikitext-2", file, f"wiki.{part}.tokens.xz")
    with intact(path, "is not a text, plain or .xz"), open_unpacked(path) as opened:
        text = spelled(written(opened.read().decode())).strip()
    if len(text) < 2:
        raise DataError(f"{path}: has fewer than two characters")
    return text


def written(tokens: str) -> str:
    r"""A tokenized text as ordinary text.

    >>> written('It weighs 0 @.@ 7 kg ( 2 lb ) , or " a bit more " .')
    'It weighs 0.7 kg (2 lb), or "a bit more".'
    """
    for pattern, plain in _WRITTEN:
        tokens = pattern.sub(plain, tokens)
    return tokens
