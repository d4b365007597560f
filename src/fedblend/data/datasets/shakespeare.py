# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Shakespeare by role: the next character in the lines of one role of one play.

McMahan et al., "Communication-efficient learning of deep networks from decentralized
data" (AISTATS 2017); split by role as in Caldas et al., "LEAF: a benchmark for
federated settings" (2018), from Project Gutenberg's Complete Works (etext 100).

The file ``roles.json.xz`` holds ``{role: {"play": name, "lines": [line, ...]}}``. As
in LEAF the lines of a role are put one after the other with a blank behind each, and
runs of blanks become one. LEAF cuts a sample of 80 characters and the next one at
every place, 4 226 158 in all; here the text is cut in windows that do not overlap, and
every character of a window has its next one as target.
"""

import json
import lzma
import re
from pathlib import Path

from fedblend.checks import gate
from fedblend.data.catalog import Size, dataset
from fedblend.data.dataset import DataError, Dataset
from fedblend.data.datasets.characters import WINDOWS, by_writer
from fedblend.data.download import find_either


@dataset(
    "The next character in Shakespeare's roles, windows of 80",
    Size(rows=54500, classes=80, clients=1129),
    "World Library's text, personal non-commercial use, not to be passed on; "
    "McMahan et al. 2017; Caldas et al. 2018",
)
@gate(**WINDOWS)
def shakespeare(
    length: int = 80, minimum: int = 81, file: str | None = None
) -> Dataset:
    """Windows of the lines of 1129 roles, [rows, length] character numbers.

    The targets are the inputs shifted by one place. Character 0 fills the last window
    of a role, with ``PADDING`` as its targets.

    Args:
        length: number of characters of a window.
        minimum: roles with fewer characters are left out; LEAF asks for 81, which 1129
            of 1144 roles have.
        file: a file like ``roles.json.xz``, by default the one in the data home.
    """
    path = find_either("shakespeare", file, "roles.json.xz")
    return by_writer("shakespeare", "role", _texts(path), length, minimum)


_UNREADABLE = (OSError, EOFError, lzma.LZMAError, ValueError, LookupError, TypeError)


def _texts(path: Path) -> dict[str, str]:
    """The lines of each role, as one text."""
    try:
        with lzma.open(path, "rt", encoding="utf-8") as file:
            roles = json.load(file)
        texts = {role: "".join(f"{x} " for x in roles[role]["lines"]) for role in roles}
    except _UNREADABLE:
        raise DataError(f"{path}: is not an .xz of roles and their lines") from None
    return {role: re.sub("   *", " ", text) for role, text in texts.items()}
