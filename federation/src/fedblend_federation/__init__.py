# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A real federation through Flower: the same algorithms, one client a node."""
