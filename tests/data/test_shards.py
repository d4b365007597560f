# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Folders of shards: written client by client, opened without reading the rows."""

import hashlib
import json

import jax
import numpy as np
import pytest

import fedblend as fb
from fedblend.data import DataError, open_shards, write_shards

COUNTS = (5, 2, 9, 3)


def clients():
    draw = np.random.default_rng(0)
    for number, count in enumerate(COUNTS):
        inputs = draw.normal(size=(count, 2)).astype(np.float32)
        yield f"ward {number}", (inputs, draw.integers(3, size=count).astype(np.int32))


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path / "wards", clients())
    return tmp_path / "wards"


def test_a_folder_has_the_clients_and_splits_of_federate(folder):
    made = open_shards(folder, validation=0.2, test=0.25)
    rows = [
        np.concatenate(parts) for parts in zip(*(r for _, r in clients()), strict=True)
    ]
    parts = np.split(np.arange(sum(COUNTS)), np.cumsum(COUNTS)[:-1])
    wanted = fb.federate(tuple(rows), parts, validation=0.2, test=0.25)
    assert made.names == tuple(name for name, _ in clients())
    assert isinstance(made.train.examples[0], np.memmap)
    for name, split in wanted.splits.items():
        for client in range(len(COUNTS)):
            mine, theirs = made.splits[name].rows(client), split.rows(client)
            jax.tree.map(np.testing.assert_array_equal, mine, theirs)
    index = json.loads((folder / "shards.json").read_text())
    for number, array in enumerate(index["arrays"]):
        rows = np.load(folder / f"{number}.npy").tobytes()
        assert array["sha256"] == hashlib.sha256(rows).hexdigest()


def broken(folder, how):
    index = json.loads((folder / "shards.json").read_text())
    if how == "rows":
        (folder / "0.npy").write_bytes((folder / "0.npy").read_bytes()[:-4])
    elif how == "pickle":
        np.save(folder / "1.npy", np.array([{}] * sum(COUNTS)), allow_pickle=True)
    elif how == "json":
        (folder / "shards.json").write_text("{")
    elif how == "counts":
        index["counts"][0] += 1
        (folder / "shards.json").write_text(json.dumps(index))
    elif how == "version":
        index["fedblend_shards"] = 2
        (folder / "shards.json").write_text(json.dumps(index))
    else:
        (folder / "shards.json").unlink()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("rows", "0.npy: is damaged"),
        ("pickle", "1.npy: is damaged"),
        ("json", "shards.json: is damaged"),
        ("counts", "0.npy: is damaged"),
        ("version", "is not of version 1"),
        ("foreign", "has no shards.json"),
    ],
)
def test_damaged_and_foreign_folders_are_refused_in_one_line(folder, how, words):
    broken(folder, how)
    with pytest.raises(DataError, match=words) as refused:
        open_shards(folder)
    assert "\n" not in str(refused.value)


def test_what_fails_leaves_nothing_and_what_is_there_stays(folder, tmp_path):
    def bad():
        yield "a", (np.zeros((2, 2)), np.zeros(2))
        yield "b", (np.zeros((2, 3)), np.zeros(2))

    with pytest.raises(DataError, match="client 'b' has arrays of"):
        write_shards(tmp_path / "bad", bad())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["wards"]
    with pytest.raises(DataError, match="exists already"):
        write_shards(folder, clients())


def test_an_empty_folder_is_filled_and_another_stays(tmp_path):
    write_shards(tmp_path, clients())
    assert open_shards(tmp_path).clients == len(COUNTS)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file: exists already"):
        write_shards(tmp_path / "file", clients())
