# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Problems of which everything is known."""

from flix_by_hand import quadratic, real  # noqa: F401
