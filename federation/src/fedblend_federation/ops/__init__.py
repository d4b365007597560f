# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The operators' side of a real federation: files, keys, policy, audit, doctor."""
