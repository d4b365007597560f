# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Data: where rows come from, who holds them, how they are read."""
