# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The board: published tables rerun for every method, under two protocols."""
