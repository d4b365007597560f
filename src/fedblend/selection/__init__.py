# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Which model each client gets: a choice by validation or cross-validation."""
