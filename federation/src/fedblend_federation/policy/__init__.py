# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What the operator of a node allows: which experiments, which rows, how much."""
