# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What is known in advance: constants, steps, bounds, plans, the cost of privacy."""

from fedblend.theory import apfl as apfl
from fedblend.theory import blt as blt
from fedblend.theory import bounds as bounds
from fedblend.theory import certificate as certificate
from fedblend.theory import constants as constants
from fedblend.theory import diana as diana
from fedblend.theory import error_feedback as error_feedback
from fedblend.theory import generalization as generalization
from fedblend.theory import local_training as local_training
from fedblend.theory import mixed_fl as mixed_fl
from fedblend.theory import plan as plan
from fedblend.theory import privacy as privacy
from fedblend.theory import steps as steps
from fedblend.theory.bounds import predicted as predicted
from fedblend.theory.constants import Mixture as Mixture
from fedblend.theory.constants import Smoothness as Smoothness
from fedblend.theory.constants import mixture as mixture
from fedblend.theory.constants import stationary_weights as stationary_weights
from fedblend.theory.constants import weights as weights
from fedblend.theory.plan import Plan as Plan
from fedblend.theory.plan import Solver as Solver
from fedblend.theory.plan import Traffic as Traffic
from fedblend.theory.plan import largest_alpha as largest_alpha
from fedblend.theory.plan import largest_alpha_for_bits as largest_alpha_for_bits
from fedblend.theory.plan import rounds_needed as rounds_needed
from fedblend.theory.plan import table as table
