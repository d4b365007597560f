# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""MovieLens 1M by user: which movie is rated next.

Harper, Konstan, "The MovieLens datasets: history and context" (ACM TiiS 2015). There
are 1 000 209 ratings of 3706 movies, numbered up to 3952, by 6040 users. For research,
with acknowledgment; not to be passed on, no commercial use. The task is Mixed FL's:
Augenstein et al., arXiv:2205.13655.

Every rating but a user's first is a row: the movies that the user rated just before it
are the inputs, its own movie the target. The stars are not used. Ratings of one second
are in the order of the file: users often rated a whole page at once.

``ratings_ordered.dat.xz``, read where the official archive is missing, has lines
``user::movie::stars`` in this order, without the time.
"""

import lzma
import zipfile
import zlib
from pathlib import Path

import numpy as np

from fedblend.checks import COUNT, Number, gate
from fedblend.data.dataset import DataError, Dataset, Size, dataset, open_unpacked
from fedblend_reproductions.datasets.download import find_either, public_sets

MOVIES = 3952
"""The largest number of a movie; 0 is no movie."""

ARCHIVE, ORDERED = "ml-1m.zip", "ratings_ordered.dat.xz"
"""The official file, and the one without times."""


@dataset(
    "The next movie a user rates, from up to ten before it",
    Size(rows=994169, classes=3953, clients=6040),
    "Research, not commercial, not to be passed on; Harper & Konstan 2015",
    needs=public_sets("movielens"),
    by_row=True,
)
@gate(length=COUNT, minimum=Number(least=2, whole=True))
def movielens(length: int = 10, minimum: int = 3, file: str | None = None) -> Dataset:
    """Contexts [rows, length] of movie numbers, with the number of the next movie.

    The movies of a context are in time order; 0 fills up a short one.

    Args:
        length: largest number of movies of a context.
        minimum: users with fewer ratings are left out.
        file: an ``ml-1m.zip``, ``ratings.dat`` or file like ``ratings_ordered.dat.xz``,
            by default the one in the data home.
    """
    path = find_either("movielens", file, ARCHIVE, ORDERED)
    users, movies = _ratings(path)
    _, places, counts = np.unique(users, return_index=True, return_counts=True)
    active = counts >= minimum
    if not active.any():
        raise DataError(f"{path}: no user has {minimum} ratings")
    histories = [
        movies[place : place + count]
        for place, count in zip(places[active], counts[active], strict=True)
    ]
    return Dataset(
        (
            np.concatenate([contexts(history, length) for history in histories]),
            np.concatenate([history[1:] for history in histories]),
        ),
        "classes",
        MOVIES + 1,
        keys=np.repeat(users[places[active]], counts[active] - 1),
        name="movielens",
    )


def contexts(history: np.ndarray, length: int) -> np.ndarray:
    """The movies before every movie but the first, [movies - 1, length].

    >>> contexts(np.array([5, 7, 6, 9], np.int32), 2).tolist()
    [[5, 0], [5, 7], [7, 6]]
    """
    rows = len(history) - 1
    first = np.maximum(np.arange(1, rows + 1) - length, 0)
    place = first[:, None] + np.arange(length)
    known = place <= np.arange(rows)[:, None]
    return np.where(known, history[np.minimum(place, rows)], 0).astype(np.int32)


def _ratings(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Users and movies of all ratings, by user and then by time."""
    try:
        numbers = _numbers(_content(path))
    except (OSError, EOFError, lzma.LZMAError, zipfile.BadZipFile, zlib.error):
        raise DataError(f"{path}: is not a complete file; get it again") from None
    except (KeyError, ValueError):
        raise DataError(
            f"{path}: has no lines of user::movie::stars, with or without ::time"
        ) from None
    users, movies = numbers[:, 0], numbers[:, 1]
    wrong = np.flatnonzero((movies < 1) | (movies > MOVIES))
    if wrong.size:
        raise DataError(
            f"{path}: movie {movies[wrong[0]]} in line {wrong[0] + 1} is not in "
            f"1..{MOVIES}"
        )
    times = numbers[:, 3] if numbers.shape[1] == 4 else np.zeros(len(users), int)
    order = np.lexsort((times, users))  # a stable sort
    return users[order].astype(np.int32), movies[order].astype(np.int32)


def _content(path: Path) -> bytes:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            return archive.read("ml-1m/ratings.dat")
    with open_unpacked(path) as file:
        return file.read()


def _numbers(content: bytes) -> np.ndarray:
    """The numbers of all lines, [lines, 3 or 4]."""
    lines = content.splitlines()
    columns = lines[0].count(b"::") + 1 if lines else 0
    words = np.array(content.replace(b"::", b" ").split())
    if columns not in (3, 4) or words.size != len(lines) * columns:
        raise ValueError("not a table")
    return words.astype(np.int64).reshape(-1, columns)
