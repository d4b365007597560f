# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Datasets by name: built in, drawn at random, or read from public files."""

import difflib
import inspect
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from fedblend.data.dataset import DataError, Dataset, check
from fedblend.data.datasets.breast_cancer import breast_cancer
from fedblend.data.datasets.celeba_smile import celeba_smile
from fedblend.data.datasets.cifar10 import cifar10
from fedblend.data.datasets.digits import digits
from fedblend.data.datasets.femnist import femnist, femnist_from_leaf
from fedblend.data.datasets.libsvm import libsvm
from fedblend.data.datasets.mnist import mnist
from fedblend.data.datasets.movielens import movielens
from fedblend.data.datasets.quadratics import quadratic_loss, quadratics
from fedblend.data.datasets.shakespeare import shakespeare
from fedblend.data.datasets.stackexchange import stackexchange
from fedblend.data.datasets.stackexchange_text import stackexchange_text
from fedblend.data.datasets.synthetic import synthetic
from fedblend.data.datasets.two_sines import two_sines
from fedblend.data.datasets.wikitext2 import wikitext2

__all__ = [
    "SOURCES",
    "SourceInfo",
    "breast_cancer",
    "celeba_smile",
    "cifar10",
    "digits",
    "femnist",
    "femnist_from_leaf",
    "libsvm",
    "load",
    "mnist",
    "movielens",
    "options",
    "quadratic_loss",
    "quadratics",
    "shakespeare",
    "stackexchange",
    "stackexchange_text",
    "synthetic",
    "two_sines",
    "wikitext2",
]


class SourceInfo(NamedTuple):
    """What there is to know of a dataset before it is loaded."""

    loader: Callable[..., Dataset]
    description: str
    rows: int | None
    """Training rows; None where options decide."""
    test_rows: int | None
    """Rows of the official test set."""
    classes: int | None
    """None for regression."""
    clients: int | None
    """Natural clients."""
    license: str
    """The terms, and what to cite."""
    needs: tuple[str, ...] = ()
    """The public sets whose files it reads; see ``data.public``."""


_OWN = "Drawn at random; no license needed."
_LIBSVM = "LIBSVM page; cite Chang & Lin 2011"

SOURCES: dict[str, SourceInfo] = {
    "digits": SourceInfo(
        digits, "Handwritten digits, 8 x 8", 1797, None, 10, None,
        "CC BY 4.0; UCI, Alpaydin & Kaynak 1998",
    ),
    "breast_cancer": SourceInfo(
        breast_cancer, "Tumours by 30 measurements, standardized", 569, None, 2, None,
        "CC BY 4.0; UCI, Wolberg et al. 1995",
    ),
    "synthetic": SourceInfo(
        synthetic, "Linear models that differ by client (gamma, beta)", None, None, 10,
        100, _OWN + " Cite Li et al. 2020",
    ),
    "two_sines": SourceInfo(
        two_sines, "Points on one of two sine curves", 10000, 400000, None, 200,
        _OWN + " Cite Gasanov et al. 2022",
    ),
    "mnist": SourceInfo(
        mnist, "Handwritten digits, 28 x 28, with writers if wanted", 60000, 10000, 10,
        539, "CC BY-SA 3.0; LeCun et al. 1998; writers: Yadav & Bottou 2019",
        ("mnist", "mnist_writers"),
    ),
    "femnist": SourceInfo(
        femnist, "Handwritten characters by writer, 28 x 28", 41495, 4763, 62, 300,
        "NIST SD 19, public domain; LEAF, BSD-2; Caldas et al. 2018", ("femnist",),
    ),
    "cifar10": SourceInfo(
        cifar10, "Photographs, 32 x 32, or a part (10000 + 2000)", 50000, 10000, 10,
        None, "No formal license; Krizhevsky 2009", ("cifar10",),
    ),
    "celeba_smile": SourceInfo(
        celeba_smile, "Faces, 28 x 28, smiling or not", 5000, 1000, 2, None,
        "Non-commercial research only, not to be passed on; Liu et al. 2015",
        ("celeba_smile",),
    ),
    "shakespeare": SourceInfo(
        shakespeare, "The next character in Shakespeare's roles, windows of 80", 54500,
        None, 80, 1129, "World Library's text, personal non-commercial use, not to be "
        "passed on; McMahan et al. 2017; Caldas et al. 2018", ("shakespeare",),
    ),
    "stackexchange": SourceInfo(
        stackexchange, "Tags of posts on quantum computing by user, bags of words",
        1664, None, 100, 331, "CC BY-SA 3.0 and 4.0, the posts' users on "
        "quantumcomputing.stackexchange.com", ("stackexchange",),
    ),
    "stackexchange_text": SourceInfo(
        stackexchange_text, "The next character in those posts by user, windows of 80",
        26878, None, 80, 331, "CC BY-SA 3.0 and 4.0, the posts' users on "
        "quantumcomputing.stackexchange.com", ("stackexchange",),
    ),
    "wikitext-2": SourceInfo(
        wikitext2, "The next character in articles of Wikipedia, windows of 80", 12807,
        14222, 80, None, "CC BY-SA 3.0; Merity et al. 2017", ("wikitext-2",),
    ),
    "movielens": SourceInfo(
        movielens, "The next movie a user rates, from up to ten before it", 994169,
        None, 3953, 6040, "Research, not commercial, not to be passed on; Harper & "
        "Konstan 2015", ("movielens",),
    ),
    "a6a": SourceInfo(
        partial(libsvm, "a6a"), "Adult incomes, 122 features", 11220, None, 2, None,
        f"CC BY 4.0 (UCI Adult); {_LIBSVM}", ("a6a",),
    ),
    "ijcnn1": SourceInfo(
        partial(libsvm, "ijcnn1"), "IJCNN 2001 challenge, 22 features", 49990, None, 2,
        None, f"No license given; Prokhorov 2001; {_LIBSVM}", ("ijcnn1",),
    ),
    "mushrooms": SourceInfo(
        partial(libsvm, "mushrooms"), "Edible or not, 112 features", 8124, None, 2,
        None, f"CC BY 4.0 (UCI Mushroom); {_LIBSVM}", ("mushrooms",),
    ),
    "w6a": SourceInfo(
        partial(libsvm, "w6a"), "Web pages, 300 features", 17188, None, 2, None,
        f"No license given; Platt 1998; {_LIBSVM}", ("w6a",),
    ),
    "libsvm": SourceInfo(
        libsvm, "Your own file in LIBSVM format (name = its path)", None, None, 2, None,
        "Your own",
    ),
}  # fmt: skip
"""All datasets, by name."""


def options(name: str) -> dict[str, inspect.Parameter]:
    """The options of a dataset, with their defaults."""
    return dict(inspect.signature(_source(name).loader).parameters)


def load(name: str, /, **chosen) -> Dataset:
    """Load a dataset by name with these options, and check it."""
    allowed = options(name)
    for option in chosen:
        if option not in allowed:
            raise DataError(f"{name}: no option {option!r}; {_hint(option, allowed)}")
    for option, parameter in allowed.items():
        if parameter.default is parameter.empty and option not in chosen:
            raise DataError(f"{name}: the option {option!r} must be given")
    try:
        dataset = _source(name).loader(**chosen)
    except TypeError as error:
        raise DataError(f"{name}: an option has the wrong type: {error}") from None
    check(dataset)
    return dataset


def _source(name: str) -> SourceInfo:
    if name not in SOURCES:
        raise DataError(f"dataset: {name!r} is unknown; {_hint(name, SOURCES)}")
    return SOURCES[name]


def _hint(word: str, known) -> str:
    near = difflib.get_close_matches(word, known, 1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(known)}" if known else "it has none"
