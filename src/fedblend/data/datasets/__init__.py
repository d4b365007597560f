# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Datasets by name: built in, drawn at random, or read from public files."""

from fedblend.data.dataset import DATASETS as DATASETS
from fedblend.data.dataset import info as info
from fedblend.data.dataset import load as load
from fedblend.data.datasets.characters import article_text as article_text
from fedblend.data.datasets.characters import role_texts as role_texts
from fedblend.data.datasets.characters import shakespeare as shakespeare
from fedblend.data.datasets.characters import wikitext2 as wikitext2
from fedblend.data.datasets.femnist import femnist as femnist
from fedblend.data.datasets.femnist import femnist_from_leaf as femnist_from_leaf
from fedblend.data.datasets.libsvm import libsvm as libsvm
from fedblend.data.datasets.mnist import fashion_mnist as fashion_mnist
from fedblend.data.datasets.mnist import mnist as mnist
from fedblend.data.datasets.movielens import movielens as movielens
from fedblend.data.datasets.photographs import celeba_smile as celeba_smile
from fedblend.data.datasets.photographs import cifar10 as cifar10
from fedblend.data.datasets.scikit_learn import breast_cancer as breast_cancer
from fedblend.data.datasets.scikit_learn import digits as digits
from fedblend.data.datasets.stackexchange import stackexchange as stackexchange
from fedblend.data.datasets.stackexchange import (
    stackexchange_text as stackexchange_text,
)
from fedblend.data.datasets.stackexchange import user_texts as user_texts
from fedblend.data.datasets.synthetic import quadratic_loss as quadratic_loss
from fedblend.data.datasets.synthetic import quadratics as quadratics
from fedblend.data.datasets.synthetic import synthetic as synthetic
from fedblend.data.datasets.synthetic import two_sines as two_sines
from fedblend.data.datasets.synthetic_mixture import (
    synthetic_mixture as synthetic_mixture,
)
