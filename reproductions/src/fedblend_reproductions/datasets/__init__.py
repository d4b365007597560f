# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The datasets of the papers; fedblend finds them by the entry point of this module."""

from fedblend_reproductions.datasets.characters import article_text as article_text
from fedblend_reproductions.datasets.characters import role_texts as role_texts
from fedblend_reproductions.datasets.characters import shakespeare as shakespeare
from fedblend_reproductions.datasets.characters import wikitext2 as wikitext2
from fedblend_reproductions.datasets.fashion_mnist import fashion_mnist as fashion_mnist
from fedblend_reproductions.datasets.femnist import femnist as femnist
from fedblend_reproductions.datasets.femnist import (
    femnist_from_leaf as femnist_from_leaf,
)
from fedblend_reproductions.datasets.libsvm import libsvm as libsvm
from fedblend_reproductions.datasets.mnist import mnist as mnist
from fedblend_reproductions.datasets.mnist import mnist_writers as mnist_writers
from fedblend_reproductions.datasets.movielens import movielens as movielens
from fedblend_reproductions.datasets.photographs import celeba_smile as celeba_smile
from fedblend_reproductions.datasets.photographs import cifar10 as cifar10
from fedblend_reproductions.datasets.stackexchange import stackexchange as stackexchange
from fedblend_reproductions.datasets.stackexchange import (
    stackexchange_text as stackexchange_text,
)
from fedblend_reproductions.datasets.stackexchange import user_texts as user_texts
from fedblend_reproductions.datasets.synthetic import synthetic as synthetic
from fedblend_reproductions.datasets.synthetic_mixture import (
    synthetic_mixture as synthetic_mixture,
)
from fedblend_reproductions.datasets.two_sines import two_sines as two_sines
