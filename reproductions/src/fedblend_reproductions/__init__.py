# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What papers claim, measured: ``fedblend reproduce``."""
