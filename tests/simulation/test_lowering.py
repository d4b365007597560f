# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Large constants, decompositions, and programs kept for later processes."""

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

import fedblend as fb
from fedblend.data.federated import federate
from fedblend.simulation import compile
from fedblend.simulation.compile import RANKS, lower, split_batches

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
    program = compile.lower(jitted.trace(params), (params,)).compile()
    assert [one is WEIGHT for one in program.args[0]] == [True]
    np.testing.assert_array_equal(program(params), jitted(params))


def test_a_function_without_large_constants_is_compiled_as_it_is():
    jitted = jax.jit(lambda x: x + jnp.ones(3))
    program = compile.lower(jitted.trace(jnp.ones(3)), (jnp.ones(3),)).compile()
    assert not program.args
    np.testing.assert_array_equal(program(jnp.ones(3)), 2 * np.ones(3))


def test_jit_gives_the_same_with_constants_as_arguments():
    def twice(factor, tree):
        return {"x": factor * tree["x"] @ WEIGHT, "n": tree["n"] + 1}

    lifted = compile.jit(twice, 1)
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
    monkeypatch.setattr(compile, "LARGE", 2**40)
    np.testing.assert_array_equal(simulate().down.shared, before)


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
    before, after = batches(program), batches(split_batches(program))
    known = {"lu", "qr", "cholesky", "triangular_solve", "svd"}
    assert {name: 5 for name in known} == before
    assert {name: 2 for name in known} == after
    found = lower(traced, (matrices,)).compile()(matrices)
    jax.tree.map(np.testing.assert_array_equal, found, jax.jit(decomposed)(matrices))


def test_a_program_with_small_batches_is_left_alone():
    matrices = jnp.broadcast_to(jnp.eye(3), (100, 3, 3))
    program = jax.make_jaxpr(jnp.linalg.cholesky)(matrices).jaxpr
    assert batches(program) == {"cholesky": 100}
    assert split_batches(program) is program


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


NAMES = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def no_folder():
    before = {name: getattr(jax.config, name) for name in NAMES}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("no_folder")
def test_programs_go_to_the_folder_that_was_named_first(tmp_path):
    first = fb.compile_cache(tmp_path / "programs")
    assert first == tmp_path / "programs"
    assert (tmp_path / "programs").is_dir()
    assert fb.compile_cache(tmp_path / "others") == first
    assert getattr(jax.config, NAMES[0]) == str(first)


@pytest.mark.usefixtures("no_folder")
def test_without_a_folder_that_can_be_written_runs_compile_anew(tmp_path):
    (tmp_path / "file").write_text("")
    assert fb.compile_cache(tmp_path / "file" / "programs") is None
    assert getattr(jax.config, NAMES[0]) is None
