# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Personal adapters and language models for fedblend."""
