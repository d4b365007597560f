# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""APFL against its paper's equations in NumPy loops, and against known answers."""

import pytest

from double_precision import check_method, find_gaps


@pytest.fixture(scope="module")
def gaps() -> dict[str, float]:
    """The largest difference in every comparison."""
    return find_gaps("compare_apfl")


@pytest.mark.parametrize(("method", "count"), [("apfl", 13), ("averaged", 3)])
def test_a_run_equals_the_loops(gaps, method, count):
    check_method(gaps, method, count)


@pytest.mark.parametrize("mix", ["parameters", "outputs"])
def test_the_slope_of_alpha_is_that_of_central_differences(gaps, mix):
    assert gaps[f"slope, {mix}"] < 1e-6


def test_mixtures_of_outputs_and_of_parameters_differ_on_networks(gaps):
    """On the linear models above they are the same run."""
    assert gaps["slopes apart"] > 1e-3


def test_long_training_with_one_step_a_round_leads_to_each_clients_own_minimizer(gaps):
    assert gaps["limit, 1 steps, rate 0.4"] < 1e-5


def test_with_more_steps_it_stays_off_by_about_the_rate(gaps):
    """w moves away within a round and is put back, so that v never comes to rest."""
    far, near = (gaps[f"limit, 5 steps, rate {rate}"] for rate in (0.08, 0.02))
    assert near > 1e-3
    assert 3 < far / near < 4.5
