# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation: the server of a federation learns sums of answers only."""
