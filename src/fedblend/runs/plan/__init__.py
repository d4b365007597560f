# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Plans of FLIX before anything is run: ``fedblend plan``."""

from fedblend.runs.plan.offers import PlanResult as PlanResult
from fedblend.runs.plan.offers import plan as plan
