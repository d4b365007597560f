# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models with a frozen base, and a small change of it as their parameters."""
