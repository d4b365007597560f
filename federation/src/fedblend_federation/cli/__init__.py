# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend federation``, which fedblend finds by the entry point of this app."""

from fedblend_federation.cli.experiments import app

__all__ = ["app"]
