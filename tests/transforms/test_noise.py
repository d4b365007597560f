# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Noise from the operating system: its law, its grid, its secrets, no repetition."""

import os
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import subjaxprs
from scipy import stats

import fedblend as fb
import problems
from fedblend.theory.blt import Blt
from fedblend.transforms import noise
from fedblend.transforms.blt_noise import add_blt_noise
from fedblend.transforms.noise import GRAIN_BITS, NO_NAME, add_noise
from fedblend.trees import precision

on = problems.quadratics()
descent = fb.fedavg(on.loss, fb.Work(0.2, steps=1, batch_size=None))
PLAN: dict[str, Any] = {"rounds": 6, "cohort": fb.Cohort(2, epoch=3), "every": 2}
OPTIONS: dict[str, Any] = {"clip": 0.15, "noise": 1.5, "cohort": 2}
STRATEGY = Blt((0.75,), (0.6,))
METHODS = {
    "dp_fedavg": partial(fb.transforms.dp_fedavg, **OPTIONS),
    "dp_blt": partial(fb.transforms.dp_blt, **OPTIONS, strategy=STRATEGY),
}


def drawn(tree, std=1.0):
    return jax.jit(lambda values: add_noise(values, std, None))(tree)


def test_it_is_normal_and_new_in_every_call_entry_and_replica():
    zeros = jnp.zeros((4, 50, 100))
    first, second = np.asarray(drawn(zeros)), np.asarray(drawn(zeros))
    mapped = np.asarray(jax.vmap(partial(add_noise, std=1.0, key=None))(zeros))
    for found in (first, second, mapped):
        assert stats.kstest(found.ravel(), "norm").pvalue > 1e-6
    pieces = np.concatenate([first, second, mapped]).reshape(12, -1)
    others = np.corrcoef(pieces) - np.eye(12)
    assert np.abs(others).max() < 6 / np.sqrt(5000)


def test_it_is_new_in_every_step_of_a_compiled_loop_and_replica():
    def step(number, carry):
        total, all = carry
        after = add_noise(total, 1.0, None)
        return after, all.at[number].set(after - total)

    def loop(total):
        return jax.lax.fori_loop(0, 5, step, (total, jnp.zeros((5, *total.shape))))[1]

    steps = np.asarray(jax.jit(jax.vmap(loop))(jnp.zeros((3, 2000)))).reshape(15, -1)
    assert np.abs(np.corrcoef(steps) - np.eye(15)).max() < 6 / np.sqrt(2000)
    np.testing.assert_allclose(steps.std(axis=1), 1.0, atol=0.08)


@pytest.mark.parametrize("std", [0.75, 1e-3, 300.0])
@pytest.mark.parametrize("wide", [False, True])
def test_values_lie_on_a_grid_that_depends_on_the_noise_alone(std, wide):
    """Also where the value has bits below the grid."""
    with precision("float64" if wide else "float32"):
        values = jnp.full(3000, np.pi * std, jnp.float64 if wide else jnp.float32)
        found = np.asarray(drawn(values, std), np.float64)
    grid = 2.0 ** (np.floor(np.log2(std)) - GRAIN_BITS)
    assert std / 2**11 < grid <= std / 2**10
    np.testing.assert_array_equal(found % grid, 0)
    odd = (found / grid).astype(int) % 2
    assert 0.4 < odd.mean() < 0.6


def test_types_shapes_and_no_noise():
    values = {"a": jnp.ones((2, 3), jnp.bfloat16), "b": jnp.full(5, 0.3), "c": ()}
    found = drawn(values)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, values)
    assert found["a"].dtype == jnp.bfloat16
    assert (np.asarray(found["b"]) != 0.3).all()
    np.testing.assert_array_equal(drawn(values, 0.0)["b"], values["b"])


@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_has_other_noise_and_reveals_none(name, tmp_path):
    """Whoever has the checkpoint and the run that went on cannot subtract its noise."""
    run, second, third = (
        fb.simulate(
            METHODS[name](descent),
            on.params,
            on.federated_data,
            jax.random.key(0),
            **PLAN,
        )
        for _ in range(3)
    )
    blocks, path = iter(run), tmp_path / "checkpoint"
    next(blocks)
    next(blocks)
    fb.checkpoint.save(path, run)
    for other in (second, third):
        fb.checkpoint.restore(path, other)
        np.testing.assert_array_equal(other.shared, run.shared)
    models = np.stack([one.complete().shared for one in (run, second, third)])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(models[one] - models[other]).max() > 1e-3


@pytest.mark.parametrize("name", METHODS)
def test_replicas_have_noise_of_their_own_also_with_the_same_key(name):
    roots = jnp.stack([jax.random.key(0)] * 3)
    run = fb.simulate(
        METHODS[name](descent), on.params, on.federated_data, roots, **PLAN
    )
    models = np.asarray(run.complete().shared)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(models[one] - models[other]).max() > 1e-3


def test_without_noise_cohorts_are_those_of_the_seed():
    """Runs that ask for no privacy have the same bits again."""
    plan = {**PLAN, "cohort": 2}
    quiet = fb.transforms.dp_fedavg(descent, **{**OPTIONS, "noise": 0.0})
    both = [
        fb.simulate(quiet, on.params, on.federated_data, jax.random.key(0), **plan)
        for _ in range(2)
    ]
    one, other = (run.complete().shared for run in both)
    np.testing.assert_array_equal(one, other)


def test_cohorts_of_a_private_run_are_no_function_of_its_seed():
    chosen = []
    for _ in range(2):
        run = fb.simulate(
            METHODS["dp_fedavg"](descent),
            on.params,
            on.federated_data,
            jax.random.key(0),
            **{**PLAN, "cohort": 2, "rounds": 40, "every": 40},
        )
        chosen.append(run.cohorts.draw(run.key, range(40)))
    assert not np.array_equal(*chosen)
    ids = np.concatenate(chosen)
    assert (ids[:, 0] < ids[:, 1]).all()
    # Every client is equally likely: 160 of 7.
    assert stats.chisquare(np.bincount(ids.ravel(), minlength=7)).pvalue > 1e-6


def test_the_generator_is_chacha20():
    """Test vector 2 of RFC 8439, appendix A.1."""
    words = noise.chacha20(jnp.zeros(8, jnp.uint32), 1, 1)
    stream = np.asarray(words)[:, 0].astype("<u4").tobytes().hex()
    assert stream == (
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )


def test_normal_numbers_are_box_and_mullers():
    words = np.random.default_rng(0).integers(0, 2**32, (4, 4000), dtype=np.uint32)
    words[:, 0], words[:, 1] = 2**32 - 1, 0
    with jax.enable_x64(True):
        found = np.asarray(noise._normal(jnp.asarray(words)))
    high, low = words.reshape(2, 2, -1).astype(np.uint64)
    uniform, part = ((high << 20 | low >> 12).astype(float) + 0.5) / 2.0**52
    angle = np.pi / 2 * (part - 0.5 + (low[1] & 1)) + np.pi * (low[1] >> 1 & 1)
    expected = np.sqrt(-2 * np.log(uniform)) * [np.cos(angle), np.sin(angle)]
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-14)
    assert 8.5 < np.hypot(*found).max() < 8.6


def test_numbers_of_the_system_are_normal_and_independent():
    """Of both halves of pairs, and with noise that is small beside the number."""
    found = np.asarray(noise.add_noise(jnp.full(40_000, 5.0), 2.0, None)) - 5.0
    assert stats.kstest(found / 2.0, "norm").pvalue > 1e-6
    for apart in (1, 10_000, 20_000):
        both = np.corrcoef(found[:-apart], found[apart:])[0, 1]
        squares = np.corrcoef(found[:-apart] ** 2, found[apart:] ** 2)[0, 1]
        assert max(abs(both), abs(squares)) < 6 / np.sqrt(20_000)


def calls(jaxpr) -> list:
    """Calls of the host in a program and in its inner programs."""
    found = [one for one in jaxpr.eqns if one.primitive.name == "io_callback"]
    for inner in subjaxprs(jaxpr):
        found += calls(inner)
    return found


def test_no_leaf_travels_to_the_host_and_clients_share_a_call():
    tree = {"large": jnp.zeros((5, 300, 200)), "small": jnp.zeros((5, 3))}
    add = jax.vmap(lambda tree: noise.add_noise(tree, 1.0, None))
    (call,) = calls(jax.make_jaxpr(add)(tree).jaxpr)
    assert call.invars == []
    words = call.outvars[0].aval
    assert words.shape[0] == 5 and words.shape[1] >= 2 * (300 * 200 + 3)


def test_a_large_leaf_reaches_the_host_in_pieces_that_are_copied_at_once():
    """Copies of others wait for a thread, and two devices on two cores have none."""
    leaf = jnp.zeros((300, 200))
    asked: dict[str, Any] = {"state": NO_NAME, "round": 0, "counts": True, "key": None}
    add = partial(add_blt_noise, std=1.0, strategy=STRATEGY, **asked)
    (call,) = calls(jax.make_jaxpr(add)(leaf).jaxpr)
    sizes = [4 * operand.aval.size for operand in call.invars]
    assert sum(sizes) > 4 * 60_000
    assert max(sizes) <= noise.PIECE_BYTES < 100 * 1024


@pytest.mark.slow
def test_noise_on_as_many_devices_as_cores_comes_to_an_end():
    program = """
import fedblend, jax, jax.numpy as jnp
from fedblend.transforms.noise import add_noise
assert len(jax.devices()) == 2
add = jax.pmap(lambda tree: jax.lax.fori_loop(
    0, 50, lambda _, tree: add_noise(tree, 1.0, None), tree))
print(float(jnp.abs(add(jnp.zeros((2, 100_000)))).mean()))
"""
    cores = {"FEDBLEND_DEVICES": "2", "PJRT_NPROC": "2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **cores},
        timeout=120,
        capture_output=True,
        text=True,
    )
    # The mean of |N(0, 50)|, sqrt(2 * 50 / pi) = 5.64, of 200,000: to 1 % surely.
    assert abs(float(done.stdout) - 5.64) < 0.06, done.stderr
