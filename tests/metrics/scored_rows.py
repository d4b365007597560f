# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Rows whose inputs are the model's scores, with ties, masks and nonsense behind it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.core import Batch
from fedblend.metrics import Metric, evaluate

ONE = jnp.float32(1)


def apply(params, inputs):
    """The inputs are the scores."""
    return inputs * params


def cases(classes):
    """Scores rounded so that many tie, labels, and which rows count."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        scores = rng.normal(size=(50, classes)).round(seed % 2).astype(np.float32)
        labels = rng.integers(0, max(classes, 2), 50)
        mask = np.ones(50, bool) if seed < 2 else rng.random(50) < 0.5
        yield scores, labels, mask


def batch_of(scores, labels, mask):
    """The batch, with nonsense in the rows that do not count."""
    scores = np.where(mask.reshape(-1, *[1] * (scores.ndim - 1)), scores, np.nan)
    return Batch((jnp.asarray(scores), jnp.asarray(labels)), jnp.asarray(mask))


@partial(jax.jit, static_argnums=0)
def _evaluated(metric, batch):
    return evaluate({"it": metric}, ONE, batch)


def value_and_rows(metric: Metric, scores, labels, mask) -> tuple[float, Any]:
    """The number of a metric, and what the rows that count bring."""
    values, rows = _evaluated(metric, batch_of(scores, labels, mask))
    if "it" in rows:
        assert np.isnan(np.asarray(rows["it"])[~mask]).all()
    return float(values["it"]), np.asarray(rows["it"])[mask] if rows else None
