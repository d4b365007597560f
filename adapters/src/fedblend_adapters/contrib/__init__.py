# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Methods for adapters that are not confirmed yet, see ``fedblend.contrib``."""
