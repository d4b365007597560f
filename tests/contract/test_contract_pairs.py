# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Every algorithm under every transform: it ends as docs/pairs.md says.

A pair that diverges has no sign on the page. One test runs a few pairs, drawn by a
seed; the slow ones run all of them, and two transforms at a time.
"""

import re
import warnings
from functools import partial

import numpy as np
import pytest
from pairs import (
    ALGORITHMS,
    CLIENTS,
    ENDS,
    PAGE,
    TRANSFORMS,
    WITH,
    alone,
    cells_of,
    end,
    is_one_line,
    measured,
    plain_end,
    problem,
    start_loss,
    verdict,
)

import fedblend as fb
import problems
from fedblend import compress, transforms

CELLS = cells_of(PAGE.read_text("utf-8"))
ON = problems.quadratics((2,) * CLIENTS)
WORK = fb.Work(0.1, steps=4, batch_size=None)
NOISY = ("compressed", "diana", "common_mask", "perm_k")
CARRYING = {"scaffnew": NOISY, "scafflix": NOISY, "fedala": NOISY} | {
    "l2gd": (*NOISY, "downlink"),
    "flix_compressed_scaffnew": ("downlink",),
}
"""Algorithms whose clients carry errors on, and the transforms that make them."""
EXACT = ("compressed_scaffnew", "fedavg", "fedprox", "scaffnew", "scaffold", "svrg")
"""Methods that end at the optimum of the mean loss, with the steps they have here."""
BASES = ("fedavg", "scaffold", "flix", "partial")


def _scafflix(loss, work):
    solver = fb.solvers.gradient_descent(loss, 2.0)
    return fb.scafflix(loss, work, alpha=0.5, personal=solver)


def drawn(several: list, number: int, seed: int) -> list:
    """Some of these, always the same ones."""
    chosen = np.random.default_rng(seed).choice(len(several), number, replace=False)
    return [several[place] for place in sorted(chosen)]


def lines_of(build) -> list[str]:
    """The warnings of building something."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        build()
    return [str(warning.message) for warning in seen]


def test_the_page_has_every_pair_and_none_that_diverges():
    assert sorted(WITH) == list(TRANSFORMS)
    assert set(CELLS) == {(name, other) for name in ALGORITHMS for other in TRANSFORMS}
    assert set(CELLS.values()) == set(ENDS)


@pytest.mark.parametrize("name", CARRYING)
def test_errors_that_may_add_up_are_warned_of_in_one_line(name):
    on, made = problem(name), alone(name)
    for transform in CARRYING[name]:
        (line,) = lines_of(lambda other=transform: WITH[other](made, on))
        assert re.match(r"\w+: clients carry .* may add up without end.*; use \w", line)
        assert CELLS[name, transform] == "!"
    assert {other for other in WITH if CELLS[name, other] == "!"} == {*CARRYING[name]}


@pytest.mark.parametrize("build", [fb.algorithms.scaffnew, _scafflix])
def test_no_warning_where_nothing_adds_up(build):
    several, one = build(ON.loss, WORK), build(ON.loss, WORK._replace(steps=1))
    rand = compress.rand_k(1)
    for make in (
        lambda: transforms.diana(several, compress.identity()),
        lambda: transforms.ef21(several, compress.top_k(1)),
        lambda: transforms.downlink(several, compress.top_k(1)),
        lambda: transforms.diana(one, rand),
        lambda: transforms.common_mask(one, rand),
    ):
        assert not lines_of(make)
    with_one_mask = partial(transforms.common_mask, several, rand, how=transforms.diana)
    assert len(lines_of(with_one_mask)) == 1


@pytest.mark.parametrize("build", [fb.algorithms.scaffnew, _scafflix])
def test_compressed_broadcasts_add_up_also_under_ef21(build):
    """Each alone ends at the optimum, both together diverged."""
    several, one = build(ON.loss, WORK), build(ON.loss, WORK._replace(steps=1))
    made = [transforms.ef21(of, compress.top_k(1)) for of in (several, one)]
    warned = [
        lines_of(lambda of=of: transforms.downlink(of, compress.top_k(1)))
        for of in made
    ]
    assert "use broadcasts that are not compressed" in warned[0][0] and not warned[1]


RUN = [pair for pair, sign in CELLS.items() if sign in "=~"]


@pytest.mark.parametrize("pair", [("partial", "dp_blt"), *drawn(RUN, 5, seed=0)])
def test_a_pair_ends_as_the_page_says(pair):
    assert measured(*pair) == CELLS[pair]


@pytest.mark.slow
@pytest.mark.parametrize("pair", CELLS, ids="-".join)
def test_every_pair_ends_as_the_page_says(pair):
    assert measured(*pair) == CELLS[pair]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_the_algorithm_alone_ends_at_the_optimum(name):
    best = problems.optimum(problems.quadratics((2,) * CLIENTS, dim=4))
    np.testing.assert_allclose(plain_end(name).shared, best, rtol=0, atol=1e-4)


def twice(name: str, inner: str, outer: str) -> str:
    """How two transforms end, one around the other; "-" where they are refused."""
    on = problem(name)
    try:
        made = WITH[outer](WITH[inner](alone(name), on), on)
        ended = end(made, on)
    except ValueError as error:
        return "-" if is_one_line(error) else str(error)
    return verdict(ended, plain_end(name), start_loss(name))


USUAL = [
    (name, *two)
    for name in ("fedavg", "scaffold")
    for two in (
        ("diana", "downlink"),
        ("ef21", "downlink"),
        ("clip", "compressed"),
        ("mixed_fl", "compressed"),
        ("mixed_fl", "diana"),
        ("adaptive_clip", "diana"),
    )
]
TWO = [(name, a, b) for name in BASES for a in WITH for b in WITH if a != b]


@pytest.mark.slow
@pytest.mark.parametrize("three", [*USUAL, *drawn(TWO, 60, seed=1)], ids="-".join)
def test_two_transforms_end_near_the_algorithm_alone_or_are_refused(three):
    assert twice(*three) in ENDS
