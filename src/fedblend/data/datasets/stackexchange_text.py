# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Posts of a Stack Exchange site by user: the next character.

The same posts as in ``stackexchange``: title and body of questions and answers, in the
order of the dump, without HTML tags and code blocks. A formula between dollar signs
becomes one character, ``characters.OTHER``.
"""

import re
from collections import defaultdict

from fedblend.data.catalog import Size, dataset
from fedblend.data.dataset import Dataset
from fedblend.data.datasets.characters import OTHER, by_writer, spelled
from fedblend.data.datasets.stackexchange import FILE, plain, rows_of
from fedblend.data.download import find_either

_FORMULA = re.compile(r"\$\$[^$]*\$\$|\$[^$]*\$")


@dataset(
    "The next character in those posts by user, windows of 80",
    Size(rows=26878, classes=80, clients=331),
    "CC BY-SA 3.0 and 4.0, the posts' users on quantumcomputing.stackexchange.com",
    needs=("stackexchange",),
)
def stackexchange_text(
    length: int = 80, minimum: int = 81, file: str | None = None
) -> Dataset:
    """Windows of users' posts, [rows, length] character numbers.

    The targets are the inputs shifted by one place, as in ``shakespeare``.

    Args:
        length: number of characters of a window.
        minimum: users with fewer characters are left out.
        file: a ``Posts.xml``, plain or .xz, by default the one in the data home.
    """
    posts = defaultdict(list)
    for row in rows_of(find_either("stackexchange", file, FILE)):
        user = row.get("OwnerUserId", "")
        if row.get("PostTypeId") in ("1", "2") and user.isdigit():
            posts[user].append(f"{row.get('Title', '')} {plain(row.get('Body', ''))}")
    texts = {
        user: spelled(_FORMULA.sub(OTHER, " ".join(own))).strip()
        for user, own in posts.items()
    }
    return by_writer("stackexchange_text", "user", texts, length, minimum)
