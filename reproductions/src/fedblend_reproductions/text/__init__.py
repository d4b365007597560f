# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Language models on public text: a base, and the clients it has never seen."""
