# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""DCGD, DIANA and EF21 against the papers' pseudo-code, in float64, cohorts and all."""

import pytest

from double_precision import check_method, find_gaps


@pytest.mark.parametrize(("method", "count"), [("dcgd", 4), ("diana", 12), ("ef21", 8)])
def test_method_equals_its_papers_loop(method, count):
    check_method(find_gaps("compare_transforms"), method, count)


@pytest.mark.slow
def test_diana_equals_its_papers_loop_however_memories_begin_and_move():
    check_method(find_gaps("compare_transforms", "all"), "diana", 36)
