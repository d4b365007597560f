# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Readers of the user's own files: tables, arrays."""
