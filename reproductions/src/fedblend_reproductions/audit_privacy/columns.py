# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Columns of a canary: what other rows of one client do to all others.

Canaries send updates of their own, and have no part in what comes before training. So
the data is built twice, the second time with absurd numbers in the rows of one client.
Whatever else differs then depends on these rows without any noise.
"""

import numpy as np

from fedblend.config.build import Built, build
from fedblend.config.config import Config
from fedblend.config.tables import data
from fedblend.data.dataset import Dataset

ABSURD = 1e9
"""In place of quantities."""


def leak(config: Config, built: Built) -> str:
    """What other columns of the first client change, in words; empty if nothing."""
    whole = data.load_dataset(config.data)
    parts = data.share_out(config.data, whole).rows
    if not parts:  # the rows of a folder are used as they are
        return ""
    other = build(config, _with_absurd_rows(whole, parts[0]))
    if other.task != built.task:
        return "what the model is trained for"
    pairs = zip(built.federations, other.federations, strict=True)
    changed = max(
        sum(
            not np.array_equal(one.train.rows(client)[0], two.train.rows(client)[0])
            for client in range(one.clients)
        )
        for one, two in pairs
    )
    return f"the inputs of {changed - 1} other clients" if changed > 1 else ""


def _with_absurd_rows(whole: Dataset, mine: np.ndarray) -> Dataset:
    inputs, targets = (array.copy() for array in whole.rows)
    columns = np.ones(inputs.shape[1:], bool)
    if whole.schema is not None:
        columns[:] = [one.kind in ("number", "date") for one in whole.schema.kept]
    if inputs.dtype.kind == "f":
        inputs[mine] = np.where(columns, ABSURD, inputs[mine])
    if targets.dtype.kind == "f":
        targets[mine] = ABSURD
    return whole._replace(rows=(inputs, targets))
