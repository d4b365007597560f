# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""MovieLens 1M, against its published counts and small files by hand."""

import lzma
import zipfile

import numpy as np
import pytest

from fedblend.data.dataset import DataError, MissingDataError
from fedblend.data.datasets import DATASETS, load
from fedblend.errors import UserError
from fedblend_reproductions.datasets.download import PUBLIC_SETS, is_intact


def test_movielens_has_the_published_counts(needs, data_home):
    """1 000 209 ratings of 3706 movies by 6040 users, 20 to 2314 each, median 96."""
    needs("movielens")
    public = PUBLIC_SETS["movielens"]
    for file in public.copies:
        path = public.path(file)
        assert path is not None and is_intact(file, path)
    dataset = load("movielens")
    (contexts, labels), users = dataset.rows, dataset.keys
    assert users is not None
    _, rows = np.unique(users, return_counts=True)
    assert len(labels) == 1_000_209 - 6040 == DATASETS["movielens"].size.rows
    assert contexts.shape == (len(labels), 10)
    assert (len(rows), rows.min() + 1, rows.max() + 1) == (6040, 20, 2314)
    assert np.median(rows + 1) == 96
    first = np.flatnonzero(contexts[:, 1] == 0)  # rows with one movie before them
    assert len(first) == 6040
    movies = np.concatenate([labels, contexts[first, 0]])
    assert len(movies) == 1_000_209
    assert len(np.unique(movies)) == 3706
    assert movies.max() == 3952
    # No user rates a movie twice, and what was next comes last in the next context.
    assert not (contexts == labels[:, None]).any()
    late = np.flatnonzero((contexts[1:, 9] > 0) & (users[1:] == users[:-1]))
    np.testing.assert_array_equal(contexts[late + 1, 9], labels[late])


LINES = ["2::7::5::90", "2::5::4::20", "1::3::1::10", "2::9::3::90", "1::4::2::5"]
"""User 1 rates 4, 3; user 2 rates 5 and then 7 and 9 in the same second."""


@pytest.mark.parametrize("kind", ["zip", "dat", "xz"])
def test_a_small_file_gives_every_prefix_in_time_order(kind, tmp_path):
    text, path = "\n".join(LINES), tmp_path / f"ratings.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("ml-1m/ratings.dat", text)
    elif kind == "dat":
        path.write_text(text)
    else:  # in time order already, without the time
        ordered = ["1::4::2", "1::3::1", "2::5::4", "2::7::5", "2::9::3"]
        path.write_bytes(lzma.compress("\n".join(ordered).encode()))
    dataset = load("movielens", file=str(path), length=2, minimum=2)
    assert dataset.rows[0].tolist() == [[4, 0], [5, 0], [5, 7]]
    assert dataset.rows[1].tolist() == [3, 7, 9]
    assert dataset.keys is not None
    assert dataset.keys.tolist() == [1, 2, 2]
    dropped = load("movielens", file=str(path), length=1)  # user 1 has only 2
    assert dropped.rows[0].tolist() == [[5], [7]]


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("1::3::1\n1::4", "has no lines of user::movie::stars"),
        ("1::3::1\n1::x::1", "has no lines of user::movie::stars"),
        ("", "has no lines of user::movie::stars"),
        ("1::3::1\n1::3953::1", r"movie 3953 in line 2 is not in 1\.\.3952"),
        ("1::3::1\n1::4::1", "no user has 3 ratings"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(text, complaint, tmp_path):
    path = tmp_path / "ratings.dat"
    path.write_text(text)
    with pytest.raises(DataError, match=complaint) as caught:
        load("movielens", file=str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_or_broken_archive_is_named(tmp_path, monkeypatch):
    broken = tmp_path / "ml-1m.zip"
    broken.write_bytes(b"PK and then nothing")
    with pytest.raises(DataError, match=r"ml-1m\.zip: is not a complete file"):
        load("movielens", file=str(broken))
    with pytest.raises(MissingDataError, match="no such file"):
        load("movielens", file=str(tmp_path / "other.zip"))
    monkeypatch.setenv("FEDBLEND_DATA", str(tmp_path / "empty"))
    with pytest.raises(MissingDataError, match="fedblend data get movielens"):
        load("movielens")
    with pytest.raises(UserError, match="length: 0 is not a whole number of at"):
        load("movielens", length=0)
