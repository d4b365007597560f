# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Federated algorithms, one file each: its equations, its reference, both halves.

A file in this folder is found because it exists: ``fedblend.registry`` imports them
all, and each registers its builder.
"""
