# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Runs described by a file: configuration, output folder, command-line building."""
