# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Warnings of rates that may diverge."""

import pytest

from fedblend.config.build import build
from fedblend.config.config import check

OWN = {"alpha": 0.5, "personal": {"solver": "lbfgs", "most": 3}}
RAND = {"compressor": {"name": "rand_k", "k": 2}}
NAMES = {
    "flix_locodl": OWN | RAND,
    "flix_compressed_scaffnew": OWN | {"copies": 2},
    "scafflix": OWN,
    "locodl": RAND,
    "compressed_scaffnew": {"copies": 2},
}


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
