# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The tables of a configuration: a module has their keys and what these build."""
