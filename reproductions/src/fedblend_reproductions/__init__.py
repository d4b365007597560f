# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Claims of the papers behind fedblend, measured: ``fedblend reproduce``."""
