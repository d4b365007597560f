# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Where the clients' states, rows and models are kept."""
