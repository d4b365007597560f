# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m fedblend``: the command line."""

from fedblend.cli import entry

entry()
