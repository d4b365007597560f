# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Message by message or compiled in blocks: the same run, and the same bits sent."""

from functools import cache

import jax
import numpy as np
import pytest
from messages import run_by_messages
from registry import CASES, others_later

from fedblend.simulation.serialize import WireError, build_tree, pack, unpack
from runs import SETTINGS, close, cohort_of, outcome, problem, same_bits, usual_run

each_case = pytest.mark.parametrize("name", others_later(CASES))
MESSAGES = ("message", "up", "down", "server", "state")
"""Of a run's shapes, what is sent or saved."""


@cache
def by_messages(name: str):
    return run_by_messages(
        CASES[name](problem(name)),
        problem(name),
        jax.random.key(0),
        rounds=SETTINGS["rounds"],
        cohort=cohort_of(name),
    )


@pytest.mark.parametrize("name", others_later(CASES))
def test_messages_and_simulation_agree_on_shared_and_personal_models(name):
    told = by_messages(name)
    (down, server), states, models = outcome(usual_run(name))
    close((told.down, told.server), (down, server))
    close(told.states, states)
    close(told.models, models)


@each_case
def test_bits_counted_are_those_of_the_messages(name):
    told, ledger = by_messages(name), usual_run(name).bits()
    np.testing.assert_array_equal(ledger.up, told.bits_up)
    np.testing.assert_array_equal(ledger.down, told.bits_down)


def example_of(shapes, seed: int = 0):
    """Some values of these shapes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: np.asarray(rng.normal(size=leaf.shape) * 9).astype(leaf.dtype),
        shapes,
    )


@each_case
def test_every_message_survives_bytes_and_back(name):
    shapes = usual_run(name).shapes
    for kind in MESSAGES:
        message = example_of(getattr(shapes, kind))
        arrays, words = unpack(pack(message, {"round": "3"}))
        assert words["round"] == "3"
        back = build_tree(arrays, getattr(shapes, kind))
        assert jax.tree.structure(back) == jax.tree.structure(message)
        same_bits(message, back)


@each_case
def test_a_wrongly_shaped_message_is_refused(name):
    shapes = usual_run(name).shapes.down
    longer = jax.tree.map(
        lambda leaf: np.zeros((*leaf.shape, 2), leaf.dtype), example_of(shapes)
    )
    other = jax.tree.map(lambda leaf: leaf.astype(np.float64), example_of(shapes))
    for wrong in (longer, other):
        arrays, _ = unpack(pack(wrong))
        with pytest.raises(WireError, match="expected"):
            build_tree(arrays, shapes)
    for wrong, words in ((example_of(shapes.shared), "missing"), ((), "missing")):
        arrays, _ = unpack(pack(wrong))
        with pytest.raises(WireError, match=words):
            build_tree(arrays, shapes)
    arrays, _ = unpack(pack(example_of(shapes)))
    with pytest.raises(WireError, match="not expected"):
        build_tree(arrays | {"more": np.zeros(1)}, shapes)


@each_case
def test_a_damaged_message_is_refused(name):
    shapes = usual_run(name).shapes.down
    data = pack(example_of(shapes))
    for cut in (0, 7, 8, len(data) // 2, len(data) - 1):
        with pytest.raises(WireError):
            unpack(data[:cut])
    for place in range(0, len(data), 5):
        damaged = bytearray(data)
        damaged[place] ^= 0xFF
        with pytest.raises(WireError):
            build_tree(unpack(bytes(damaged))[0], shapes)
