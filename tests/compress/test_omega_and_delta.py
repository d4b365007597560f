# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The theory of each compressor: unbiased within omega, contraction by delta.

Means over fixed seeds are held to 5 standard errors: of the few hundred numbers below
one would be farther off by chance once in some ten thousand sets of seeds.
"""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from compressors import ALL, CONTRACTIVE, DIM, UNBIASED, draws, own, sent_and_back

from fedblend import compress

ERRORS, DRAWS = 5, 2000
rng = np.random.default_rng(0)
VECTORS = {
    "normal": rng.standard_normal(DIM),
    "uneven": rng.standard_normal(DIM) * 10.0 ** np.linspace(-1, 1, DIM),
    "one entry": np.eye(DIM)[3] * -2.5,
    "equal": np.full(DIM, 0.7),
}
VECTORS = {name: value.astype(np.float32) for name, value in VECTORS.items()}
each_vector = pytest.mark.parametrize("vector", VECTORS.values(), ids=VECTORS)


def error_variances(drawn, vector) -> np.ndarray:
    return ((drawn - vector) ** 2).sum(axis=1) / (vector.astype(float) ** 2).sum()


def standard_error(values) -> np.ndarray:
    return values.std(axis=0, ddof=1) / np.sqrt(len(values))


@each_vector
@pytest.mark.parametrize("name", UNBIASED)
def test_the_mean_is_the_vector_and_the_variance_at_most_omega(name, vector):
    compressor = UNBIASED[name]
    drawn = draws(compressor, vector, DRAWS)
    rounding = 3e-6 * np.abs(vector)
    gap = np.abs(drawn.mean(axis=0) - vector)
    assert (gap <= ERRORS * standard_error(drawn) + rounding).all()
    assert compressor.omega is not None
    errors = error_variances(drawn, vector)
    bound = own(compressor.omega(DIM))
    assert errors.mean() <= bound + ERRORS * standard_error(errors) + 1e-6


@each_vector
@pytest.mark.parametrize("client", [0, 1, 2])
def test_rand_k_reaches_its_omega_client_by_client(vector, client):
    compressor = UNBIASED["rand_k by client"]
    assert compressor.omega is not None
    errors = error_variances(draws(compressor, vector, DRAWS, client), vector)
    omega = own(compressor.omega(DIM), client)
    np.testing.assert_allclose(omega, DIM / [3, 12, 1][client] - 1)
    assert abs(errors.mean() - omega) <= ERRORS * standard_error(errors) + 1e-6


def test_natural_compression_reaches_its_omega_at_four_thirds():
    vector = np.full(DIM, 4 / 3, np.float32)
    errors = error_variances(draws(UNBIASED["natural"], vector, DRAWS), vector)
    assert abs(errors.mean() - 1 / 8) <= ERRORS * standard_error(errors)


@each_vector
@pytest.mark.parametrize("name", CONTRACTIVE)
def test_the_error_is_at_most_one_minus_delta(name, vector):
    compressor = CONTRACTIVE[name]
    assert compressor.delta is not None
    errors = error_variances(draws(compressor, vector, DRAWS), vector)
    bound = 1 - own(compressor.delta(DIM))
    assert errors.mean() <= bound + ERRORS * standard_error(errors) + 1e-6


def test_top_k_and_sign_reach_their_delta():
    """Equal entries are top-k's worst vector, a single one that of signs."""
    equal, single = VECTORS["equal"], VECTORS["one entry"]
    errors = error_variances(draws(CONTRACTIVE["top_k"], equal, DRAWS), equal)
    np.testing.assert_allclose(errors, 1 - 4 / DIM, rtol=1e-6)
    errors = error_variances(draws(CONTRACTIVE["sign"], single, DRAWS), single)
    np.testing.assert_allclose(errors, 1 - 1 / DIM, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ALL)
def test_zeros_stay_zeros(name, dtype):
    drawn = draws(ALL[name], jnp.zeros(DIM, dtype), DRAWS)
    np.testing.assert_array_equal(drawn, 0)


@pytest.mark.parametrize("name", [name for name in ALL if "k" not in name])
def test_a_vector_of_one_entry(name):
    drawn = draws(ALL[name], np.array([-1.5], np.float32), DRAWS)
    gap = np.abs(drawn.mean(axis=0) + 1.5)
    assert (gap <= ERRORS * standard_error(drawn) + 1e-6).all()


@pytest.mark.parametrize("places", ["shared", "seed", "sent"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dim", [1, 2, DIM])
def test_all_entries_are_the_identity(places, dtype, dim):
    vector = jnp.asarray(VECTORS["normal"][:dim], dtype)
    for compressor in (compress.rand_k(dim, places=places), compress.top_k(dim)):
        back = sent_and_back(compressor, vector)
        assert back.dtype == vector.dtype
        np.testing.assert_array_equal(back, vector)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [name for name in ALL if "rand_k" not in name])
def test_an_entry_that_is_not_finite_does_not_arrive_as_one(name, value):
    vector = jnp.asarray(VECTORS["normal"]).at[2].set(value)
    drawn = draws(ALL[name], vector, DRAWS, client=1)
    assert not np.isfinite(drawn).all(axis=1).any()


@pytest.mark.parametrize("name", UNBIASED)
def test_half_precision_is_unbiased_to_its_rounding(name):
    vector = jnp.asarray(VECTORS["normal"], jnp.bfloat16)
    drawn = draws(UNBIASED[name], vector, DRAWS)
    wanted = np.asarray(vector, float)
    gap = np.abs(drawn.mean(axis=0) - wanted)
    assert (gap <= ERRORS * standard_error(drawn) + 2.0**-8 * np.abs(wanted)).all()


@pytest.mark.slow
def test_double_precision_in_a_process_of_its_own():
    script = Path(__file__).with_name("in_float64.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert set(results) == set(ALL)
    wide = {name for name, (dtype, _) in results.items() if dtype == "float64"}
    assert wide == set(ALL) - {"natural"}
    assert all(gap <= ERRORS for _, gap in results.values()), results


def test_draws_of_other_keys_differ():
    vector = VECTORS["normal"]
    for name in set(UNBIASED) - {"identity"}:
        drawn = draws(UNBIASED[name], vector, DRAWS)
        assert len(np.unique(drawn, axis=0)) > 1, name
