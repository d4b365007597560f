# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The cross-silo board: tables of real silos, compared as by ``fedblend auto``."""
