# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Warnings of rates, and of LoCoDL's ``moved``, that may diverge."""

import pytest

from fedblend.config.build import build
from fedblend.config.config import check
from fedblend.runs.run import run_config

OWN = {"alpha": 0.5, "personal": {"solver": "lbfgs", "most": 3}}
RAND = {"compressor": {"name": "rand_k", "k": 2}}
NAMES = {
    "flix_locodl": OWN | RAND,
    "flix_compressed_scaffnew": OWN | {"copies": 2},
    "scafflix": OWN,
    "locodl": RAND,
    "compressed_scaffnew": {"copies": 2},
}
MOVED = (
    "algorithm.moved: 0.5 is above 0.013, and the clients' losses are not known to be "
    "so convex; LoCoDL may diverge. Without the key it is chosen"
)
"""P/(2 rate) is sqrt(rho/(1 + 2 omega))/(2 2 0.1), with omega 324 and 6 clients."""


def configured(tiny, name, **options):
    work = {"rate": 0.1, "steps": 2, "batch_size": 4}
    tiny["algorithm"] = {**work, "name": name, **NAMES[name], **options}
    tiny["run"] = {"rounds": 100, "every": 100}
    return check(tiny, "here")


@pytest.mark.parametrize("name", NAMES)
def test_a_rate_from_twice_the_inverse_of_the_smoothness_on_is_warned_of(name, tiny):
    tiny["model"]["l2"] = 0.1
    mixed = 0.5 if name.startswith("flix") else 1.0
    known = build(configured(tiny, "scafflix")).smoothness
    assert known is not None
    longest = 2 / (mixed**2 * known.smooth.max())
    (line,) = build(configured(tiny, name, rate=float(longest) * 1.01)).warnings
    start = (
        f"algorithm.rate: {longest * 1.01:g} is not below {longest:.3g}, 2/L of the "
    )
    assert line.startswith(start)
    assert build(configured(tiny, name, rate=float(longest) * 0.99)).warnings == ()


@pytest.mark.parametrize("name", ["flix_locodl", "locodl"])
def test_more_than_the_losses_are_convex_may_move_as_long_as_it_is_stable(name, tiny):
    assert build(configured(tiny, name, moved=0.5)).warnings == (MOVED,)
    assert build(configured(tiny, name, moved=0.012)).warnings == ()
    tiny["model"] |= {"name": "mlp", "hidden": [8]}  # whose constants nobody knows
    (line,) = build(configured(tiny, name, moved=0.5)).warnings
    assert line.startswith("algorithm.moved: 0.5 is above 0.01")


def test_what_the_losses_are_convex_may_move(tiny):
    tiny["model"]["l2"] = 2.2  # alpha^2 of it is above 0.5, and the duals are too slow
    assert build(configured(tiny, "flix_locodl", moved=0.5)).warnings == ()


@pytest.mark.slow
def test_the_warning_is_of_what_happens(tiny, tmp_path, no_figures):
    """From the same start: with 0.5 the loss grows, with what is chosen it falls."""
    tiny["measure"] |= {"splits": ["train"], "metrics": ["loss"]}
    losses = {}
    for moved in (None, 0.5):
        own = {} if moved is None else {"moved": moved}
        config = configured(tiny, "flix_locodl", **own)
        summary = run_config(config, tmp_path / str(moved))
        (one,) = summary["runs"]
        losses[moved] = one["measures"]["train"]["personal"]["loss"]["mean"]
        assert (MOVED in summary["warnings"]) == (moved is not None)
    assert losses[None] < 0.63 < 5 < losses[0.5]
