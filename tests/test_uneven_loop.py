# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Loops of uneven clients are those of each client alone; in integers, so exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedblend import uneven_loop
from fedblend.uneven_loop import own_loop

OWN = np.array([9, 1, 2, 1, 3, 0, 1, 2, 7, 1], np.int32)
SCALES = np.arange(10, dtype=np.int32)
START = np.array([1, 2, 3], np.int32)
EVEN = float(OWN.mean() / OWN.max())


def one(own, scale, start):
    def step(number, carry):
        here, taken, key = carry
        here = here * scale + number + jax.random.randint(key, (), 0, 9)
        return here, taken + 1, jax.random.fold_in(key, number)

    return own_loop(own, step, (start, jnp.int32(0), jax.random.key(0)), EVEN)


def alone(own, scale, start):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uneven_loop, "EVEN", 0.0)
        return one(own, scale, start)


def agree(found, expected):
    for a, b in zip(found[:2], expected[:2], strict=True):
        assert a.shape == b.shape
        np.testing.assert_array_equal(a, b)


def test_clients_that_take_turns_get_what_each_gets_alone():
    mapped = jax.jit(jax.vmap(one, (0, 0, None)))(OWN, SCALES, START)
    for place, own in enumerate(OWN):
        expected = jax.jit(alone)(own, SCALES[place], START)
        agree([leaf[place] for leaf in mapped], expected)


@pytest.mark.parametrize(
    "axes", [(0, 0, 0), (0, None, 0), (None, 0, None), (None, None, 0)]
)
def test_replicas_may_share_clients_or_values_or_neither(axes):
    """Under two maps; None is what the replicas share."""
    both = [np.stack([leaf, leaf[::-1] * 2]) for leaf in (OWN, SCALES, START)]
    given = [
        leaf if axis == 0 else leaf[0] for leaf, axis in zip(both, axes, strict=True)
    ]
    found, expected = (
        jax.jit(jax.vmap(jax.vmap(what, (0, 0, None)), axes))(*given)
        for what in (one, alone)
    )
    agree(found, expected)


def computed_over_needed() -> float:
    """Client-steps that are computed over those that are needed."""
    seen = []

    def step(number, here):
        jax.debug.callback(lambda here: seen.append(1), here)  # once for each seat
        return here + 1

    jax.vmap(lambda own: own_loop(own, step, jnp.float32(0), EVEN))(OWN)
    jax.effects_barrier()
    return len(seen) / OWN.sum()


def test_seats_cost_about_what_clients_need(monkeypatch):
    assert 1 <= computed_over_needed() <= 1.15
    monkeypatch.setattr(uneven_loop, "EVEN", 0.0)
    # All ten run as long as the longest.
    assert computed_over_needed() == len(OWN) * OWN.max() / OWN.sum()


def test_multiplications_of_products_and_convolutions_are_counted_in_loops_too():
    images, kernel = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 4))

    def program(images, kernel, matrix):
        found = jax.lax.conv_general_dilated(
            images, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        several = jax.lax.fori_loop(0, 9, lambda _, here: here @ matrix, matrix)
        return found, jax.jit(lambda a: a @ a)(several)

    traced = jax.make_jaxpr(program)(images, kernel, jnp.ones((5, 5)))
    # 6x6 places of 2 images, 27 products for each of 4 outputs; and twice 5x5x5.
    assert uneven_loop.multiplications(traced.jaxpr) == 2 * 36 * 27 * 4 + 2 * 125


@pytest.mark.parametrize("fewest", [0, 2**60])
def test_on_a_gpu_only_large_steps_take_turns(monkeypatch, fewest):
    taken = []
    in_turns = uneven_loop._take_turns
    monkeypatch.setattr(uneven_loop, "GPU_PRODUCTS", fewest)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(
        uneven_loop, "_take_turns", lambda *all: taken.append(1) or in_turns(*all)
    )
    found = jax.vmap(one, (0, 0, None))(OWN, SCALES, START)
    assert bool(taken) == (fewest == 0)
    agree(found, jax.vmap(alone, (0, 0, None))(OWN, SCALES, START))
