# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Federated learning by mixing."""
