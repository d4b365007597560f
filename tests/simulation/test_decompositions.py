# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Losses may decompose matrices: no program waits for itself."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedblend.simulation.lowering import RANKS, in_small_batches, lower

SCRIPT = Path(__file__).with_name("decompose.py")


def batches(program) -> dict[str, int]:
    """The most matrices of one step, by the name of its primitive."""
    found: dict[str, int] = {}
    for step in program.eqns:
        inner = [
            getattr(leaf, "jaxpr", leaf)
            for leaf in jax.tree.leaves(
                step.params, is_leaf=lambda one: hasattr(one, "eqns")
            )
        ]
        several = [batches(one) for one in inner if hasattr(one, "eqns")]
        if (name := step.primitive.name) in RANKS:
            shape = step.invars[0].aval.shape
            several.append({name: int(np.prod(shape[: len(shape) - RANKS[name]]))})
        for one in several:
            found |= {name: max(one[name], found.get(name, 0)) for name in one}
    return found


def decomposed(matrices):
    """Decompositions by themselves, in a loop, in a branch, with a derivative."""
    value = jax.grad(lambda all: jnp.linalg.slogdet(all)[1].sum())(matrices)
    turned, _ = jax.lax.scan(
        lambda carry, _: (jnp.linalg.qr(carry)[0], None), matrices, length=2
    )
    chosen = jax.lax.cond(
        matrices[0, 0, 0] > 0,
        lambda all: jnp.linalg.cholesky(all @ all.mT),
        lambda all: all,
        matrices,
    )
    vectors = jax.vmap(lambda one: jnp.linalg.solve(one, one[0]))(matrices)
    return value, turned, chosen, vectors, jnp.linalg.svd(matrices)


def test_large_batches_are_decomposed_in_small_ones_to_the_same_bits():
    matrices = jax.random.normal(jax.random.key(0), (5, 12, 12)) + 9 * jnp.eye(12)[None]
    traced = jax.jit(decomposed).trace(matrices)
    program = traced.jaxpr.jaxpr
    before, after = batches(program), batches(in_small_batches(program))
    known = {"lu", "qr", "cholesky", "triangular_solve", "svd"}
    assert {name: 5 for name in known} == before
    assert {name: 2 for name in known} == after
    found = lower(traced, (matrices,)).compile()(matrices)
    jax.tree.map(np.testing.assert_array_equal, found, jax.jit(decomposed)(matrices))


def test_a_program_with_small_batches_is_left_alone():
    matrices = jnp.broadcast_to(jnp.eye(3), (100, 3, 3))
    program = jax.make_jaxpr(jnp.linalg.cholesky)(matrices).jaxpr
    assert batches(program) == {"cholesky": 100}
    assert in_small_batches(program) is program


def script(
    *arguments: str, devices: int, timeout: int = 1200
) -> subprocess.CompletedProcess:
    """The script where XLA has two threads, or as many as devices.

    Threads of OpenBLAS, which would multiply them, only take time.
    """
    own = {"FEDBLEND_DEVICES": str(devices), "PJRT_NPROC": "2"}
    own["OPENBLAS_NUM_THREADS"] = "1"
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_a_loss_decomposes_matrices_where_threads_are_as_few_as_devices():
    """It stood still in 3 of 3 runs."""
    done = script("float32", "20", "two", devices=2, timeout=120)
    assert done.stdout.split() == ["2", "two"], done.stderr[-2000:]


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """Processes that take CPU time from all others."""
    loop = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(loop) for _ in range(number)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize(("clients", "devices"), [(20, 2), (20, 1), (7, 4)])
def test_every_decomposition_comes_to_an_end_on_a_busy_machine(
    clients, devices, precision
):
    """54 combinations."""
    kinds = ["slogdet", "cholesky", "eigh", "svd", "qr", "inv", "expm", "newton", "two"]
    with busy(4):
        done = script(precision, str(clients), *kinds, devices=devices)
    assert done.stdout.split() == [str(devices), *kinds], done.stderr[-2000:]
