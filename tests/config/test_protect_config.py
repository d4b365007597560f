# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Noise for rows in a configuration: what it does to a run, and what it refuses."""

from copy import deepcopy

import jax
import numpy as np
import pytest

from fedblend.config.build import build
from fedblend.config.config import check
from fedblend.errors import ConfigError
from fedblend.simulation.simulate import set_up
from fedblend.transforms.row_noise import RowNoise
from tiny_config import TINY

FLIX = TINY["algorithm"] | {"name": "flix", "steps": 1, "alpha": 0.5}
NODES = {"partition": "nodes", "clients": 2, "kind": "regression", "columns": ["x"]}


def config(noise: float, **tables):
    content = deepcopy(TINY) | {"protect": {"rows": {"clip": 2.0, "noise": noise}}}
    return check(content | tables, "here")


def test_clients_train_on_noisy_gradients():
    models = []
    for noise in (0.0, 1.0, 1.0):
        built = build(config(noise))
        assert isinstance(built.hidden, RowNoise)
        built.hidden.counts = True  # as on nodes
        run = set_up(built.spec).complete()
        models.append(np.concatenate(list(map(np.ravel, jax.tree.leaves(run.shared)))))
        # Two steps of three clients in four rounds.
        assert sum(built.hidden.take_spent().values()) == (24 if noise else 0)
    bare, one, other = models
    assert np.abs(one - bare).max() > 1e-3
    assert np.abs(one - other).max() > 1e-3  # from the operating system


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"algorithm": TINY["algorithm"] | {"name": "mapper"}},
         "protect.rows: mapper uses losses of rows, and noise covers gradients alone"),
        ({"algorithm": FLIX | {"personal": {"solver": "lbfgs"}}},
         "protect.rows: algorithm.personal.solver = 'lbfgs' uses losses of rows"),
        ({"data": NODES, "run": {"rounds": 2}},
         "protect: is not for a federation; the policy of each node has it"),
        ({"protect": {"rows": {"noise": -1.0}}}, "rows.noise: -1.0 is not at least 0"),
        ({"protect": {"row": {}}}, "protect.row: unknown key; did you mean 'rows'?"),
    ],
)  # fmt: skip
def test_one_line_for_what_noise_does_not_cover(tables, line):
    with pytest.raises(ConfigError) as error:
        config(1.0, **tables)
    assert line in str(error.value)
