# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Against the papers' pseudo-code in NumPy loops, in float64, cohorts and all."""

import pytest

from double_precision import check_method, find_gaps

METHODS = {
    "compare": {
        "fedavg": 4,
        "fedprox": 1,
        "fedopt": 4,
        "scaffold": 12,
        "svrg": 6,
        "local only": 1,
        "finetune": 1,
        "reptile": 8,
        "fomaml": 8,
    },
    "compare_relatives": {
        "l2gd": 4,
        "fedrep": 3,
        "partial": 4,
        "agnostic": 4,
        "mapper": 4,
    },
    "compare_personalized": {"perfedavg": 4, "pfedme": 2, "ditto": 2},
}
"""Methods of a module, and how many comparisons each has."""


@pytest.mark.parametrize(
    ("module", "method", "count"),
    [
        (module, method, count)
        for module, methods in METHODS.items()
        for method, count in methods.items()
    ],
)
def test_method_equals_its_papers_loop(module, method, count):
    check_method(find_gaps(module), method, count)


@pytest.mark.parametrize(
    "problem", ["logistic", pytest.param("quadratics", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("solver", "count"), [("dgd", 4), ("dcgd", 2), ("diana", 8)])
def test_flix_equals_its_papers_algorithms_1_to_3(problem, solver, count):
    check_method(find_gaps("compare_flix", problem), f"{problem}, {solver}", count)
