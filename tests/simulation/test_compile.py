# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Programs: initial parameters, options of the compiler, programs that runs share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.simulation import devices
from fedblend.simulation.engine import Initial

KEY, KEYS = jax.random.key(3), jax.random.split(jax.random.key(3), 2)


def draw(key):
    return {"weight": jax.random.normal(key, (2, 3)), "zero": 0.0}


def test_drawn_parameters_have_their_shapes_before_they_are_drawn():
    initial = Initial(draw, KEY, each=False)
    assert "params" not in vars(initial)
    np.testing.assert_array_equal(initial.params["weight"], draw(KEY)["weight"])
    shapes = jax.eval_shape(lambda: initial.params)
    assert initial.shapes == shapes
    assert not initial.params["zero"].weak_type


def test_every_key_may_draw_its_own_and_given_parameters_stay():
    own = Initial(draw, KEYS, each=True)
    assert own.shapes["weight"].shape == (2, 2, 3)
    for place, key in enumerate(KEYS):
        np.testing.assert_array_equal(own.params["weight"][place], draw(key)["weight"])
    given = Initial(draw(KEY), KEYS, each=False)
    assert given.params["weight"].shape == (2, 3)
    assert given.shapes["zero"].shape == ()


def test_only_long_runs_on_a_gpu_have_kernels_timed(monkeypatch):
    assert devices.compiler_options(True, 10) == {"xla_disable_hlo_passes": "cse"}
    assert devices.compiler_options(False, 10) == {}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    short = devices.compiler_options(True, devices.TUNED_ROUNDS - 1)
    assert short["xla_gpu_autotune_level"] == 0
    assert devices.compiler_options(True, devices.TUNED_ROUNDS) == {}
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4")
    assert devices.compiler_options(True, 1) == {}


def test_what_cannot_be_drawn_is_said_at_once():
    with pytest.raises(ZeroDivisionError):
        Initial(lambda key: 1 // 0, KEY, each=False)


def test_a_run_with_the_programs_of_another_is_the_same_run():
    federated_data, _ = fb.datasets.quadratics(clients=3, dim=2)

    def algorithm(rate):
        return fb.fedavg(fb.datasets.quadratic_loss, fb.Work(rate, 1, None))

    def run(seed: int, rate: float) -> fb.Run:
        return fb.simulate(
            algorithm,
            jnp.zeros(2),
            federated_data,
            jax.random.split(jax.random.key(seed), 2),
            rounds=2,
            every=2,
            over=jnp.full(2, rate),
        )

    first, alone, after = run(0, 0.1), run(1, 0.3), run(1, 0.3)
    first.complete()
    after.share_programs(first)
    np.testing.assert_array_equal(after.complete().shared, alone.complete().shared)
    assert not np.array_equal(after.shared, first.shared)
    assert alone.compile_seconds > 0 == after.compile_seconds
