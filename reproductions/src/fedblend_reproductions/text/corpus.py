# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a base is trained on, and whose text it never sees.

The base sees the articles of WikiText-2's validation file, and the text of all users of
quantumcomputing.stackexchange.com and roles of Shakespeare that are not held out. Those
held out are the clients of later runs; the articles of the test file tell how good the
base is.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedblend_adapters.tokenizer import PADDING, Tokenizer, cut
from fedblend_reproductions.datasets import article_text, role_texts, user_texts

Texts = dict[str, str]
"""By user or role."""


class Corpus(NamedTuple):
    """Texts to train on, and texts of others by source."""

    base: list[str]
    """Articles first, then one text of each user and role."""
    users: Texts
    """Held out: clients."""
    roles: Texts
    """Held out: clients."""
    articles: str
    """Held out: the test file of WikiText-2."""

    @property
    def held_out(self) -> dict[str, list[str]]:
        """The texts that the base never sees, by source."""
        return {
            "articles": [self.articles],
            "users": list(self.users.values()),
            "roles": list(self.roles.values()),
        }


def read_corpus(number: int = 25, least: int = 4000) -> Corpus:
    """The public texts.

    Args:
        number: how many users, and how many roles, are held out.
        least: characters that each of them has.
    """
    users, roles = user_texts(), role_texts()
    own = clients_of(users, number, least), clients_of(roles, number, least)
    rest = [
        text
        for texts, held in zip((users, roles), own, strict=True)
        for writer, text in texts.items()
        if writer not in held
    ]
    return Corpus([article_text("valid"), *rest], *own, article_text("test"))


def clients_of(texts: Mapping[str, str], number: int, least: int) -> Texts:
    """``number`` writers of at least ``least`` characters, evenly over their names.

    >>> list(clients_of({"a": "xx", "b": "x", "c": "xx", "d": "xx"}, 2, 2))
    ['a', 'd']
    """
    able = sorted(writer for writer, text in texts.items() if len(text) >= least)
    places = np.linspace(0, len(able) - 1, min(number, len(able)))
    return {able[place]: texts[able[place]] for place in places.astype(int)}


class Rows(NamedTuple):
    """Windows of texts, [rows, length], and how many characters their tokens have."""

    inputs: np.ndarray
    targets: np.ndarray
    characters: int

    @property
    def tokens(self) -> int:
        """The number of targets that count."""
        return int((self.targets != PADDING).sum())


def windows_of(texts: list[str], tokenizer: Tokenizer, length: int) -> Rows:
    """The windows of several texts."""
    pieces = [cut(tokenizer.encode(text), length) for text in texts]
    inputs, targets = (np.concatenate(part) for part in zip(*pieces, strict=True))
    return Rows(inputs, targets, sum(map(len, texts)))
