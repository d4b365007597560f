# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The tables of a configuration: data only."""
