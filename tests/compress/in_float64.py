# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Compressors on float64 vectors; prints dtype and bias in standard errors as JSON.

A program of its own, because JAX takes its precision once for a whole process. The
bias of a contractive compressor is not looked at.
"""

import json

import jax

jax.config.update("jax_enable_x64", True)

import numpy as np  # noqa: E402
from compressors import ALL, DIM, UNBIASED, draws, sent_and_back  # noqa: E402

vector = 1 / 3 - 0.1 * np.arange(DIM)


def bias(compressor) -> float:
    drawn = draws(compressor, vector, 2000)
    error = drawn.std(axis=0, ddof=1) / np.sqrt(2000) + 1e-13
    return float((np.abs(drawn.mean(axis=0) - vector) / error).max())


results = {}
for name, compressor in ALL.items():
    dtype = str(sent_and_back(compressor, jax.numpy.asarray(vector)).dtype)
    results[name] = (dtype, bias(compressor) if name in UNBIASED else 0.0)
print(json.dumps(results))
