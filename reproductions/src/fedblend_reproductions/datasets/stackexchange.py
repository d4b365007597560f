# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Posts of a Stack Exchange site by user: their tags, or the next character.

The small relative of the Stack Overflow task of Reddi et al., "Adaptive federated
optimization" (ICLR 2021), on the dump of quantumcomputing.stackexchange.com of
September 2018 (any site's ``Posts.xml`` will do). Posts are CC BY-SA, by their users.

``stackexchange`` has tags. A row is a question, or an answer with the tags of its
question. Its words are those of its own title and body in lower case, without HTML tags
and code blocks. Both vocabularies are the most frequent entries over all rows, ties in
alphabetical order; real clients would have to agree on them.

``stackexchange_text`` has the next character in the same posts: title and body of
questions and answers, in the order of the dump, without HTML tags and code blocks. A
formula between dollar signs becomes one character, ``characters.OTHER``.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np

from fedblend.checks import COUNT, gate
from fedblend.data.dataset import (
    DataError,
    Dataset,
    Size,
    dataset,
    intact,
    open_unpacked,
)
from fedblend_reproductions.datasets.characters import (
    OTHER,
    WINDOWS,
    by_writer,
    spelled,
)
from fedblend_reproductions.datasets.download import find_either, public_sets

_WORD = re.compile(r"[a-z][a-z0-9'+#-]*")
_FORMULA = re.compile(r"\$\$[^$]*\$\$|\$[^$]*\$")
LICENSE = "CC BY-SA 3.0 and 4.0, the posts' users on quantumcomputing.stackexchange.com"


class Post(NamedTuple):
    """A question or an answer: its user, its words, its question's tags."""

    user: str
    words: list[str]
    tags: list[str]


FILE = "quantumcomputing.Posts.xml.xz"
"""The file in the data home."""


@dataset(
    "Tags of posts on quantum computing by user, bags of words",
    Size(rows=1664, classes=100, clients=331),
    LICENSE,
    needs=public_sets("stackexchange"),
)
@gate(words=COUNT, tags=COUNT, minimum=COUNT)
def stackexchange(
    words: int = 2000,
    tags: int = 100,
    minimum: int = 1,
    answers: bool = True,
    file: str | None = None,
) -> Dataset:
    """Bags of words [rows, words] with ones and zeros over tags [rows, tags].

    An entry of a bag is the fraction of the post's words that are this word, as in the
    Stack Overflow task. Posts with none of the tags are left out, as are those of the
    site itself and of deleted users.

    Args:
        words: number of words, the most frequent.
        tags: number of tags, the most frequent.
        minimum: users with fewer posts are left out.
        answers: take answers too, with the tags of their questions.
        file: a ``Posts.xml``, plain or .xz, by default the one in the data home.
    """
    path = find_either("stackexchange", file, FILE)
    posts = _posts(path, answers)
    tag_names = _frequent((post.tags for post in posts), tags, "tags", path)
    word_names = _frequent((post.words for post in posts), words, "words", path)
    posts = [post for post in posts if set(post.tags) & set(tag_names)]
    by_user = Counter(post.user for post in posts)
    posts = [post for post in posts if by_user[post.user] >= minimum]
    if not posts:
        raise DataError(f"{path}: no user has {minimum} posts with one of these tags")
    sizes = np.array([[max(len(post.words), 1)] for post in posts], np.float32)
    bags = _counts((post.words for post in posts), word_names, len(posts)) / sizes
    labels = _counts((post.tags for post in posts), tag_names, len(posts))
    return Dataset(
        (bags, (labels > 0).astype(np.int32)),
        "tags",
        tags,
        keys=np.array([int(post.user) for post in posts]),
        name="stackexchange",
        label_names=tag_names,
        columns=word_names,
    )


@dataset(
    "The next character in those posts by user, windows of 80",
    Size(rows=26878, classes=80, clients=331),
    LICENSE,
    needs=public_sets("stackexchange"),
    model="char_rnn",
    by_row=True,
)
@gate(**WINDOWS)
def stackexchange_text(
    length: int = 80,
    minimum: int = 81,
    file: str | None = None,
    tokenizer: str | None = None,
) -> Dataset:
    """Windows of users' posts, [rows, length] numbers of characters.

    The targets are the inputs shifted by one place, as in ``shakespeare``.

    Args:
        length: number of characters or tokens of a window.
        minimum: users with fewer characters are left out.
        file: a ``Posts.xml``, plain or .xz, by default the one in the data home.
        tokenizer: a ``tokenizer.json``, whose tokens rows then have; None for
            characters.
    """
    texts = user_texts(file)
    return by_writer("stackexchange_text", "user", texts, length, minimum, tokenizer)


def user_texts(file: str | None = None) -> dict[str, str]:
    """The posts of each user, as one text; see ``stackexchange_text``."""
    posts = defaultdict(list)
    for row in _rows_of(find_either("stackexchange", file, FILE)):
        user = row.get("OwnerUserId", "")
        if row.get("PostTypeId") in ("1", "2") and user.isdigit():
            posts[user].append(f"{row.get('Title', '')} {plain(row.get('Body', ''))}")
    return {
        user: spelled(_FORMULA.sub(OTHER, " ".join(own))).strip()
        for user, own in posts.items()
    }


def plain(html: str) -> str:
    """The text of a piece of HTML; code blocks are left out.

    >>> plain("<p>A <b>qubit</b> &amp; a gate</p><pre><code>x = 1</code></pre>").split()
    ['A', 'qubit', '&', 'a', 'gate']
    """
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return "".join(reader.pieces)


class _Reader(HTMLParser):
    """Collects the text outside of <pre>; the tag of a block ends a word."""

    def __init__(self):
        super().__init__()
        self.pieces: list[str] = []
        self.depth = 0

    def handle_starttag(self, tag, attrs):
        del attrs
        self.depth += tag == "pre"
        if tag in ("br", "hr", "img"):
            self.pieces.append(" ")

    def handle_endtag(self, tag):
        self.depth -= tag == "pre" and self.depth > 0
        if tag in ("p", "pre", "li", "blockquote", "h1", "h2", "h3", "td", "div"):
            self.pieces.append(" ")

    def handle_data(self, data):
        if not self.depth:
            self.pieces.append(data)


def _posts(path: Path, answers: bool) -> list[Post]:
    """The questions with tags, and the answers to them, in the order of the file."""
    rows = list(_rows_of(path))
    tags = {
        row["Id"]: re.findall(r"[^<>|]+", row.get("Tags", ""))
        for row in rows
        if row.get("PostTypeId") == "1" and "Id" in row
    }
    posts = []
    for row in rows:
        answer = row.get("PostTypeId") == "2"
        question = row.get("ParentId") if answer else row.get("Id")
        user = row.get("OwnerUserId", "")
        if question in tags and user.isdigit() and (answers or not answer):
            text = f"{row.get('Title', '')} {plain(row.get('Body', ''))}".lower()
            posts.append(Post(user, _WORD.findall(text), tags[question]))
    return posts


def _rows_of(path: Path) -> Iterator[dict[str, str]]:
    """The attributes of every row; external entities are never read."""
    with intact(path, "is not a complete Posts.xml"), open_unpacked(path) as file:
        for _, element in ElementTree.iterparse(file):
            if element.tag == "row":
                yield dict(element.attrib)
            element.clear()


def _frequent(
    lists: Iterable[list[str]], number: int, what: str, path: Path
) -> tuple[str, ...]:
    """The most frequent entries, ties in alphabetical order."""
    counts = Counter(entry for entries in lists for entry in entries)
    if len(counts) < number:
        raise DataError(
            f"stackexchange: {what}: {number} is more than the {len(counts)} that "
            f"{path} has"
        )
    return tuple(sorted(counts, key=lambda entry: (-counts[entry], entry))[:number])


def _counts(
    lists: Iterable[list[str]], names: tuple[str, ...], rows: int
) -> np.ndarray:
    """How often each name is in each list, [rows, names]."""
    place = {name: number for number, name in enumerate(names)}
    counts = np.zeros((rows, len(names)), np.float32)
    for row, entries in enumerate(lists):
        for entry in entries:
            if entry in place:
                counts[row, place[entry]] += 1
    return counts
