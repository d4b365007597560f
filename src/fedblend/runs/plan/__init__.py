# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Plans of FLIX before anything is run: ``fedblend plan``."""

from fedblend.runs.plan.result import PlanResult as PlanResult
from fedblend.runs.plan.result import plan as plan
