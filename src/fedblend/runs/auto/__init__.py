# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""From a table to what to deploy, without a configuration: ``fedblend auto``."""

from fedblend.runs.auto.auto import auto as auto
from fedblend.runs.auto.folder import AutoResult as AutoResult
