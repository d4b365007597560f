# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Methods tuned with equal budgets: what is chosen, and by which rows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.errors import InputError

pytestmark = pytest.mark.usefixtures("compiled")

rng = np.random.default_rng(1)
INPUTS = rng.normal(size=(90, 3)).astype("f4")
ROWS = INPUTS, (INPUTS @ np.array([1.0, -2.0, 0.5])).astype("f4")
PARTS = np.array_split(np.arange(90), 3)
DATA = fb.federate(ROWS, PARTS, validation=0.3, test=0.3)


def loss(params, rows):
    return (rows[0] @ params - rows[1]) ** 2


def method(rate):
    return fb.fedavg(loss, fb.Work(rate, steps=2, batch_size=9))


ASKED: Any = {"rounds": 2, "measure": {"loss": fb.metrics.mean_loss(loss)}}
GRID = [1e-3, 0.1, 30.0]


def tuned(out, data=DATA, grid=GRID, **more):
    return fb.tune_alike(
        {"one": method, "clipped": lambda rate: method(min(rate, 0.05))},
        grid,
        jnp.zeros(3),
        data,
        seeds=2,
        out=out,
        **(ASKED | more),
    )


def test_the_best_on_validation_rows_is_compared(tmp_path):
    found = tuned(tmp_path)
    keys = jnp.stack([jax.random.key(0), jax.random.key(1)])
    best = fb.simulate(method(0.1), jnp.zeros(3), DATA, keys, **ASKED)
    assert np.array_equal(found.runs["one"].shared, best.shared)
    assert found.chosen["one"] == 0.1 and found.chosen["clipped"] in GRID[1:]
    mean = np.mean([of.validation.personal.loss.mean for of in best.complete().results])
    (score,) = [of["loss"] for of in found.scores[:3] if of["value"] == 0.1]
    assert score == pytest.approx(mean)
    assert [of["run"] for of in found.scores] == ["one"] * 3 + ["clipped"] * 3
    assert found.comparison.differences[0].row()["run"] == "one"
    assert (tmp_path / "tuned.csv").read_text().count("\n") == 7
    assert "one" not in found.at_edge


def test_test_rows_choose_nothing(tmp_path):
    """With targets of test rows turned around the same values are chosen."""
    assert DATA.test is not None
    inputs, targets = DATA.test.examples
    other = dataclasses.replace(DATA.test, examples=(inputs, -9 * targets))
    found = tuned(tmp_path, dataclasses.replace(DATA, test=other))
    assert found.chosen["one"] == 0.1
    first, last = (found.scores[place]["loss"] for place in (0, 1))
    assert last < first


def test_what_cannot_be_tuned(tmp_path):
    bare = fb.federate(ROWS, PARTS, test=0.3)
    with pytest.raises(InputError, match="federated_data: this is not data with"):
        tuned(tmp_path, bare)
    never = fb.Metric(lambda model, batch: jnp.array(jnp.nan), False)
    nan: Any = {"measure": {"nan": never}}
    with pytest.raises(InputError, match="one: nan is finite for no value"):
        tuned(tmp_path, grid=[0.1], **nan)
    with pytest.raises(InputError, match="seeds: 0 is not"):
        fb.tune_alike({"a": method}, GRID, jnp.zeros(3), DATA, seeds=0, **ASKED)


@pytest.mark.slow
def test_training_alone_is_tuned_too(tmp_path):
    def alone(rate):
        return fb.local_only(loss, fb.Work(rate, steps=2, batch_size=9))

    found = tuned(tmp_path, local=alone)
    assert list(found.comparison.table.rows)[-1] == "training alone"
    scores = [of["loss"] for of in found.scores if of["run"] == "training alone"]
    assert len(scores) == 3
    assert found.chosen["training alone"] == GRID[int(np.nanargmin(scores))]
    budget = found.runs["training alone"].budget
    assert budget is not None and found.runs["one"].alone == budget._asdict()
