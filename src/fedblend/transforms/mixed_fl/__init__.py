# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Mixed FL: a federated loss and a loss at the server."""

from fedblend.transforms.mixed_fl.mixed_fl import mixed_fl

__all__ = ["mixed_fl"]
