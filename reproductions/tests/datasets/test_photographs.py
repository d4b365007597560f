# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""CIFAR-10 and CelebA, against known counts and a small archive."""

import io
import tarfile

import numpy as np
import pytest

from fedblend.data.dataset import DataError, MissingDataError
from fedblend.errors import UserError
from fedblend_reproductions.datasets import celeba_smile, cifar10
from fedblend_reproductions.datasets.download import PUBLIC_SETS, data_home


def test_cifar10_part():
    public = PUBLIC_SETS["cifar10"]
    if not all(map(public.path, public.copies)):
        pytest.skip(f"the part of cifar10 is not in {data_home()}; see FEDBLEND_DATA")
    dataset = cifar10(full=False)
    assert dataset.name == "cifar10_part"
    counts = [1005, 974, 1032, 1016, 999, 937, 1030, 1001, 1025, 981]
    assert np.bincount(dataset.rows[1]).tolist() == counts
    assert dataset.rows[0].shape == (10000, 32, 32, 3)
    assert dataset.test_rows is not None
    assert dataset.test_rows[0].shape == (2000, 32, 32, 3)
    assert dataset.label_names[dataset.rows[1][0]] == "frog"
    # The first pixel of data_batch_1: 59, 62, 63
    np.testing.assert_array_equal(np.rint(dataset.rows[0][0, 0, 0] * 255), [59, 62, 63])


def test_celeba_smile(needs):
    needs("celeba_smile")
    for target in ("smiling", "male"):
        dataset = celeba_smile(target=target)
        assert np.bincount(dataset.rows[1]).tolist() == [2500, 2500]
        assert dataset.rows[0].shape == (5000, 28, 28, 3)
        assert dataset.test_rows is not None
        assert np.bincount(dataset.test_rows[1]).tolist() == [500, 500]
    with pytest.raises(UserError, match="target: 'happy'"):
        celeba_smile(target="happy")


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDBLEND_DATA", str(tmp_path))
    return tmp_path


def test_the_official_cifar10_archive(home):
    """An archive of the official layout, with two images a batch."""
    (home / "cifar10").mkdir()
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (6, 2, 3073), dtype=np.uint8)
    records[:, :, 0] %= 10
    names = [f"data_batch_{batch}.bin" for batch in range(1, 6)] + ["test_batch.bin"]
    path = home / "cifar10" / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, batch in zip(names[::-1], records[::-1], strict=True):
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = batch.size
            archive.addfile(member, io.BytesIO(batch.tobytes()))
    dataset = cifar10()
    assert dataset.name == "cifar10"
    assert dataset.rows[0].shape == (10, 32, 32, 3)
    assert dataset.test_rows is not None
    np.testing.assert_array_equal(dataset.test_rows[1], records[5, :, 0])
    green = records[1, 0, 1 + 1024 + 32 * 4 + 7]  # image 2, row 4, column 7
    np.testing.assert_allclose(dataset.rows[0][2, 4, 7, 1], green / 255, rtol=1e-6)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataError, match="not the complete CIFAR-10 archive"):
        cifar10(full=True)


def test_missing_and_damaged_files(home):
    for load, name in ((cifar10, "cifar10"), (celeba_smile, "celeba_smile")):
        with pytest.raises(MissingDataError, match=f"^{name}: .* is not in ") as error:
            load()
        assert "\n" not in str(error.value)
    (home / "celeba_smile").mkdir()
    (home / "celeba_smile" / "labels.json").write_text("{}")
    (home / "celeba_smile" / "train_5000_28x28.webp").write_text("nonsense")
    with pytest.raises(DataError, match="is not a readable image"):
        celeba_smile()
