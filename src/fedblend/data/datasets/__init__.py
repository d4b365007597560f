# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Datasets by name: built in, or drawn at random."""

from fedblend.data.dataset import DATASETS as DATASETS
from fedblend.data.dataset import info as info
from fedblend.data.dataset import load as load
from fedblend.data.datasets.built_in import breast_cancer as breast_cancer
from fedblend.data.datasets.built_in import digits as digits
from fedblend.data.datasets.built_in import quadratic_loss as quadratic_loss
from fedblend.data.datasets.built_in import quadratics as quadratics
