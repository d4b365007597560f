# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The disagreement of two losses, on quadratics where it is known."""

import jax.numpy as jnp
import numpy as np

from fedblend.trees import precision
from fedblend_reproductions.mixed import theory


def test_disagreement_by_its_formulas():
    draws = np.random.default_rng(1)
    federated, central = draws.normal(size=(2, 5))
    weights = (0.7, 0.3)
    g_f, g_c = 0.7 * federated, 0.3 * central
    apart = g_f @ g_f / 0.7 + g_c @ g_c / 0.3
    whole = (g_f + g_c) @ (g_f + g_c)
    with precision("float64"):
        found = theory.disagreement(
            jnp.asarray(federated), jnp.asarray(central), weights
        )
        wanted = apart - whole, apart / whole, whole
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
