# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What is known in advance: constants, step sizes, bounds and plans for FLIX."""

from fedblend.theory import constants
from fedblend.theory.constants import Smoothness
from fedblend.theory.mixture import Mixture, mixture

__all__ = ["Mixture", "Smoothness", "constants", "mixture"]
