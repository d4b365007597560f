# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""An empirical lower bound on epsilon: canaries against a private configuration."""
