# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A partition on disk: the same again, or one clear line."""

import numpy as np
import pytest

from fedblend.data.dataset import DataError, MissingDataError
from fedblend.data.federated import federate
from fedblend.data.partition import Partition, by_key, iid


def test_save_and_load(tmp_path):
    partition = by_key(np.array(["ü", "b", "ü", "b", "c"]), minimum=2)
    partition.save(tmp_path / "p.npz")
    again = Partition.load(tmp_path / "p.npz")
    assert again.hash == partition.hash
    assert again.names == partition.names == ("b", "ü")
    assert again.description == partition.description
    for mine, theirs in zip(again, partition, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert [file.name for file in tmp_path.iterdir()] == ["p.npz"]


def test_single_and_empty_clients_survive(tmp_path):
    partition = Partition((np.arange(3), np.empty(0, np.int64)))
    partition.save(tmp_path / "p.npz")
    again = Partition.load(tmp_path / "p.npz")
    assert again.counts.tolist() == [3, 0]
    assert again.names == ()


def test_hash_is_stable_and_sees_borders():
    left = Partition((np.array([0, 1]), np.array([2])))
    right = Partition((np.array([0]), np.array([1, 2])))
    assert left.hash != right.hash
    # Written down once: files of one release must load in the next.
    assert iid(10, 3, seed=0).hash[:16] == "1b8262873c554564"


def test_a_changed_file_is_noticed(tmp_path):
    path = tmp_path / "p.npz"
    iid(100, 4).save(path)
    with np.load(path) as stored:
        content = dict(stored)
    content["rows"] = content["rows"][::-1]
    np.savez(path, **content)
    with pytest.raises(DataError, match=r"damaged: its rows have sha256 \w+, but \w+"):
        Partition.load(path)


@pytest.mark.parametrize("cut", [0, 10, 300])
def test_a_cut_file_is_noticed(tmp_path, cut):
    path = tmp_path / "p.npz"
    iid(1000, 4).save(path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match="damaged, or not a partition") as error:
        Partition.load(path)
    assert "\n" not in str(error.value)


def test_flipped_bytes_are_noticed(tmp_path):
    path = tmp_path / "p.npz"
    iid(1000, 4).save(path)
    content = path.read_bytes()
    for place in range(40, len(content), 97):
        changed = bytearray(content)
        changed[place] ^= 0xFF
        path.write_bytes(bytes(changed))
        try:
            again = Partition.load(path)
        except DataError:
            continue
        assert again.hash == iid(1000, 4).hash  # a byte that means nothing


def test_other_files_are_refused(tmp_path):
    np.savez(tmp_path / "other.npz", rows=np.arange(3))
    with pytest.raises(DataError, match="not a partition file"):
        Partition.load(tmp_path / "other.npz")
    np.savez(tmp_path / "objects.npz", format=np.array([None]))
    with pytest.raises(DataError, match="not a partition file"):
        Partition.load(tmp_path / "objects.npz")
    np.save(tmp_path / "array.npy", np.arange(3))
    with pytest.raises(DataError, match="not a partition file"):
        Partition.load(tmp_path / "array.npy")
    with pytest.raises(MissingDataError, match="no such partition file"):
        Partition.load(tmp_path / "nothing.npz")
    with pytest.raises(DataError, match="cannot be written"):
        iid(10, 2).save(tmp_path / "no folder" / "p.npz")


def test_a_federation_takes_names_from_its_partition():
    partition = Partition((np.array([0, 2]), np.array([1])), ("b", "ü"), {})
    federated_data = federate((np.arange(3.0),), partition)
    assert [federated_data.name(client) for client in range(2)] == ["b", "ü"]
