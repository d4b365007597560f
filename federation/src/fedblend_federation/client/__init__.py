# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A node of a deployment: one client, its rows, its policy."""
