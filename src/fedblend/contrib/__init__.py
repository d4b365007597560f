# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Federated algorithms that follow their papers' equations and are not confirmed yet.

A method is here while no number of its paper is reproduced and no proven bound of it is
checked; one of the two moves its file to ``fedblend.algorithms``. Everything else is
the same: the contract suite runs it, configurations name it, and its builder is
``fb.algorithms.NAME``.
"""

import fedblend.algorithms  # noqa: F401 (registers all methods, these too)
