# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Large constants of compiled functions are their arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.data.federated import federate
from fedblend.simulation import lowering

WEIGHT = jax.random.normal(jax.random.key(7), (160, 160))
"""100 KB: large."""
SHOWN = "160x160xf32"


def loss(params, rows):
    return 0.5 * jnp.square((rows + params[None]) @ WEIGHT).sum(axis=1)


def dense(text):
    """The constants of a program that have the weight's shape."""
    return [
        line
        for line in text.splitlines()
        if "stablehlo.constant" in line and SHOWN in line
    ]


def test_a_constant_becomes_an_argument():
    rows = jnp.ones((3, 160))
    jitted = jax.jit(jax.grad(lambda params: loss(params, rows).sum()))
    params = jnp.zeros(160)
    assert dense(jitted.lower(params).as_text())
    program = lowering.lower(jitted.trace(params), (params,)).compile()
    assert [one is WEIGHT for one in program.constants[0]] == [True]
    np.testing.assert_array_equal(program(params), jitted(params))


def test_a_function_without_large_constants_is_compiled_as_it_is():
    jitted = jax.jit(lambda x: x + jnp.ones(3))
    program = lowering.lower(jitted.trace(jnp.ones(3)), (jnp.ones(3),)).compile()
    assert not program.constants
    np.testing.assert_array_equal(program(jnp.ones(3)), 2 * np.ones(3))


def test_jit_gives_the_same_with_constants_as_arguments():
    def twice(factor, tree):
        return {"x": factor * tree["x"] @ WEIGHT, "n": tree["n"] + 1}

    lifted = lowering.jit(twice, 1)
    tree = {"x": jnp.ones((2, 160)), "n": 3}
    for rows in (2, 2, 5):
        tree["x"] = jnp.ones((rows, 160))
        found, expected = lifted(2.0, tree), jax.jit(twice, static_argnums=0)(2.0, tree)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture
def lowered(monkeypatch):
    """The texts of all programs that a simulation lowers."""
    texts, lower = [], jax.stages.Traced.lower

    def keep(traced, *args, **options):
        found = lower(traced, *args, **options)
        texts.append(found.as_text())
        return found

    monkeypatch.setattr(jax.stages.Traced, "lower", keep)
    return texts


def simulate(**options):
    rows = np.asarray(jax.random.normal(jax.random.key(1), (24, 160)))
    run = fb.simulate(
        fb.apfl(loss, fb.Work(1e-3, steps=2, batch_size=2), alpha=0.5),
        jnp.zeros(160),
        federate(rows, np.arange(24).reshape(6, 4)),
        jax.random.key(0),
        rounds=2,
        cohort=4,
        measure={"loss": fb.metrics.mean_loss(loss)},
        **options,
    )
    return run.complete()


def test_no_program_of_a_run_holds_the_array(lowered):
    run = simulate()
    assert lowered and not [line for text in lowered for line in dense(text)]
    assert any(SHOWN in text for text in lowered)
    jax.block_until_ready(run.down)


def test_the_bits_do_not_depend_on_it(monkeypatch):
    before = simulate().down.shared
    monkeypatch.setattr(lowering, "LARGE", 2**40)
    np.testing.assert_array_equal(simulate().down.shared, before)
