# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""From the columns of a raw table to inputs: schema, statistics, preprocessing."""
