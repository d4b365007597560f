# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Runs and trees of arrays as files and messages."""
