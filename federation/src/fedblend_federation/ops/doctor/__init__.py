# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of a machine that takes part, or is to."""
