# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The public datasets that are read from files: names, addresses, checksums.

Only checksums that are known are here. The LIBSVM sums are those of the text, because
the same text is found plain and packed by various versions of bzip2.
"""

from typing import NamedTuple


class PublicFile(NamedTuple):
    """A file of a public dataset."""

    name: str
    """As it is called in the folder, and at the end of its address."""
    checksum: str
    """In hexadecimal; 64 digits are sha256, 32 are md5."""
    size: int | None = None
    """In bytes, where it is known."""
    addresses: tuple[str, ...] = ()
    """Where it can be had, in the order of trying."""
    also: tuple[str, ...] = ()
    """Other names under which it is accepted."""
    unpacked: bool = False
    """Whether the checksum is that of the content of a ``.bz2`` file."""


class PublicSet(NamedTuple):
    """A public dataset."""

    folder: str
    """Below the data home."""
    files: tuple[PublicFile, ...]
    """All that is needed."""
    copies: tuple[PublicFile, ...] = ()
    """A reduced form, which is read when ``files`` are not there."""
    obtainable: bool = True
    """Whether ``get`` can download it."""
    instruction: str = ""
    """How to come by it otherwise, in one line."""


# MNIST's own page has refused plain downloads for years, so its mirror comes first.
_LECUN = "http://yann.lecun.com/exdb/mnist/"
_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_QMNIST = "https://raw.githubusercontent.com/facebookresearch/qmnist/"
_NTU = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"


def _mnist(name: str, checksum: str, size: int) -> PublicFile:
    return PublicFile(name, checksum, size, (_MIRROR + name, _LECUN + name))


def _qmnist(name: str, checksum: str, size: int) -> PublicFile:
    addresses = (f"{_QMNIST}master/{name}", f"{_QMNIST}main/{name}")
    return PublicFile(name, checksum, size, addresses)


def _libsvm(name: str, checksum: str, size: int | None) -> PublicSet:
    other = name.removesuffix(".bz2") if name.endswith(".bz2") else f"{name}.bz2"
    file = PublicFile(name, checksum, size, (_NTU + name,), (other,), unpacked=True)
    return PublicSet("libsvm", (file,))


PUBLIC: dict[str, PublicSet] = {
    "mnist": PublicSet(
        "mnist",
        (
            _mnist(
                "train-images-idx3-ubyte.gz",
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                9912422,
            ),
            _mnist(
                "train-labels-idx1-ubyte.gz",
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                28881,
            ),
            _mnist(
                "t10k-images-idx3-ubyte.gz",
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                1648877,
            ),
            _mnist(
                "t10k-labels-idx1-ubyte.gz",
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                4542,
            ),
        ),
    ),
    "mnist_writers": PublicSet(
        "mnist_writers",
        (
            _qmnist(
                "qmnist-train-labels-idx2-int.gz",
                "2c05dc77f6b916b38e455e97ab129a42a444f3dbef09b278a366f82904e0dd9f",
                463024,
            ),
            _qmnist(
                "qmnist-test-labels-idx2-int.gz",
                "9fbcbe594c3766fdf4f0b15c5165dc0d1e57ac604e01422608bb72c906030d06",
                526800,
            ),
        ),
    ),
    "femnist": PublicSet(
        "femnist",
        (
            PublicFile(
                "femnist_leaf_300writers.npz",
                "a113f93ca4a311dae6fb3e658ae2ccb86ab53c148f4d46bcd8ee3f88abd8eaa8",
                5310939,
            ),
        ),
        obtainable=False,
        instruction="there is no official file: build FEMNIST with LEAF "
        "(github.com/TalwalkarLab/leaf) and turn it into an .npz with "
        "fedblend.data.datasets.femnist_from_leaf",
    ),
    "cifar10": PublicSet(
        "cifar10",
        (
            PublicFile(
                "cifar-10-binary.tar.gz",
                "c32a1d4ab5d03f1284b67883e8d87530",
                170052171,
                ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
            ),
        ),
        copies=(
            PublicFile(
                "labels.json",
                "908fc0c2301e0f44f9972837be6bf787a92780dc85903a75093fd605fb55a69c",
                24135,
            ),
            PublicFile(
                "train_batch1_10000.webp",
                "3b5e57b749520214b0a82d8ea116a0c614658a49ab9387ff832ef664cb0f20c2",
                17073120,
            ),
            PublicFile(
                "test_first2000.webp",
                "7933dfa7305b7e2b8d120e3f0aaee4dbcdda042bb3c698c073fb9d88a27e24fb",
                3373774,
            ),
        ),
    ),
    "celeba_smile": PublicSet(
        "celeba_smile",
        (
            PublicFile(
                "labels.json",
                "5e60c04de7c129b8dc3a2a746e567cc4ef40b1d559877f81183a8159e84d3301",
                24072,
            ),
            PublicFile(
                "train_5000_28x28.webp",
                "d2e018cb54785c9eb559ad503464f163316ce02158acd1bb07bb7318d4b2033a",
                6660126,
            ),
            PublicFile(
                "test_1000_28x28.webp",
                "db7529d58304edda5379fca0c0a8c95964db5bfd90b4abed68e53ea2e4e6f06e",
                1314864,
            ),
        ),
        obtainable=False,
        instruction="CelebA may not be passed on: get it for research at "
        "mmlab.ie.cuhk.edu.hk/projects/CelebA.html and shrink it as "
        "fedblend.data.datasets.celeba_smile says",
    ),
    "shakespeare": PublicSet(
        "shakespeare",
        (
            PublicFile(
                "roles.json.xz",
                "cee05166fc32935a16ba521000877327234f6ba040c4ea8c15722975a8aa9e0f",
                1435208,
            ),
        ),
        obtainable=False,
        instruction="the text may not be passed on: split Project Gutenberg's etext "
        "100 by role with LEAF (github.com/TalwalkarLab/leaf) and write it as "
        "fedblend.data.datasets.shakespeare says",
    ),
    "stackexchange": PublicSet(
        "stackexchange",
        (
            PublicFile(
                "quantumcomputing.Posts.xml.xz",
                "a97b532e440a1f3c432f1f8ed93b8614bc62f6632cecf143424c59926a1a76cf",
                804600,
            ),
        ),
        obtainable=False,
        instruction="dumps change: take quantumcomputing.stackexchange.com from "
        "archive.org/details/stackexchange and pack its Posts.xml with xz",
    ),
    "wikitext-2": PublicSet(
        "wikitext-2",
        (
            PublicFile(
                "wiki.valid.tokens.xz",
                "1322771e23310248961e17b3c55df138cd3e5c57f2e36ac1d131e9c6158ccd74",
                305992,
            ),
            PublicFile(
                "wiki.test.tokens.xz",
                "306c08b989e77ca6d5587c58d90bf8f8fa3be85671b0eda75315de9f68584fbe",
                336552,
            ),
        ),
        obtainable=False,
        instruction="no address is known to last: take valid.txt and test.txt from "
        "word_language_model/data/wikitext-2 of github.com/pytorch/examples and pack "
        "them with xz as wiki.valid.tokens.xz and wiki.test.tokens.xz",
    ),
    "movielens": PublicSet(
        "movielens-1m",
        (
            PublicFile(
                "ml-1m.zip",
                "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20",
                5917549,
                ("https://files.grouplens.org/datasets/movielens/ml-1m.zip",),
            ),
        ),
        copies=(
            PublicFile(
                "ratings_ordered.dat.xz",
                "c96d92afacb8846d85d97e81aec45256e38f7e20761da22f54eb2566da20e632",
                2412728,
            ),
        ),
    ),
    "a6a": _libsvm(
        "a6a",
        "6023becedbd392fdc6a62ad94b60c9363149370d4c57ef13949fcc765842a031",
        802800,
    ),
    "ijcnn1": _libsvm(
        "ijcnn1.bz2",
        "16506cad788cf7c9607454150ed1994788204bac2ff4c9cb3b320036b6950d3f",
        None,
    ),
    "mushrooms": _libsvm(
        "mushrooms",
        "f39a4eb628dc61a7d43760815b061c9e497aa728ce1ad8bde57a09ef6043b538",
        879712,
    ),
    "w6a": _libsvm(
        "w6a",
        "0db197939896da01e6677f8dc39fe824dffcb75c185bd681bb870d33c93c8f82",
        1202812,
    ),
}
"""The public datasets, by the name that ``fedblend data get`` takes."""
