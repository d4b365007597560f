# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What each user of a Stack Exchange site writes: the next character in it.

The same posts as in ``stackexchange``: title and body of questions and answers, in the
order of the dump, without the marks of HTML and what stands in code blocks. A formula
between dollar signs becomes one character, ``characters.OTHER``.
"""

import re
from collections import defaultdict
from pathlib import Path

from fedblend.data.dataset import Dataset
from fedblend.data.datasets.characters import OTHER, by_writer, spelled
from fedblend.data.datasets.stackexchange import FILE, plain, rows_of
from fedblend.data.download import find

_FORMULA = re.compile(r"\$\$[^$]*\$\$|\$[^$]*\$")


def stackexchange_text(
    length: int = 80, minimum: int = 81, file: str | None = None
) -> Dataset:
    """Windows of what users write, [rows, length] character numbers.

    The targets are the inputs one place on, as in ``shakespeare``.

    Args:
        length: characters of a window.
        minimum: users with fewer characters are left out.
        file: a ``Posts.xml``, plain or .xz, by default the one in the data home.
    """
    path = find("stackexchange", FILE) if file is None else Path(file)
    posts = defaultdict(list)
    for row in rows_of(path):
        user = row.get("OwnerUserId", "")
        if row.get("PostTypeId") in ("1", "2") and user.isdigit():
            posts[user].append(f"{row.get('Title', '')} {plain(row.get('Body', ''))}")
    texts = {
        user: spelled(_FORMULA.sub(OTHER, " ".join(own))).strip()
        for user, own in posts.items()
    }
    return by_writer("stackexchange_text", "user", texts, length, minimum)
