# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""One TOML file describes a run: its schema, and what is built from it."""
