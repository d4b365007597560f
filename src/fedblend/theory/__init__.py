# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What is known in advance: constants, steps, bounds, the cost of privacy."""

from fedblend.theory import blt as blt
from fedblend.theory import bounds as bounds
from fedblend.theory import constants as constants
from fedblend.theory import local_training as local_training
from fedblend.theory import privacy as privacy
from fedblend.theory import steps as steps
from fedblend.theory.constants import MixtureConstants as MixtureConstants
from fedblend.theory.constants import Smoothness as Smoothness
from fedblend.theory.constants import mixture as mixture
