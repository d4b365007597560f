# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The board: published tables rerun for every method, under two protocols.

A *task* is the data, the network and the local work of a published table; a *method* is
a row; a *cell* is one run of it, stored as one JSON file. Both protocols read their
numbers from the curves of the same cells. docs/results/board.md says how to
run it and how to add a row.
"""
