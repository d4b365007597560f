# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Interpreters of an algorithm: the simulation, its stores and its checkpoints."""
