# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""From a table to what to deploy, without a configuration: ``fedblend auto``."""

from fedblend.runs.auto.result import AutoResult as AutoResult
from fedblend.runs.auto.result import auto as auto
