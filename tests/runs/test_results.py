# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What is odd about data and results is said on screen and in the summary."""

import json
from typing import Any

import jax
import numpy as np
import pytest
from scipy.optimize import minimize

import fedblend as fb
from fedblend import losses as objectives
from fedblend.config.config import check
from fedblend.errors import ConfigError
from fedblend.metrics import Spread
from fedblend.runs import results
from fedblend.runs.run import run_config

DRAW = np.random.default_rng(0)
ROWS = 12
PARTS = [np.arange(3), np.arange(3, ROWS)]
"""Two clients of different size: each counts the same."""
TARGETS: dict[str, tuple[np.ndarray, tuple[int, ...]]] = {
    "cross_entropy": (np.arange(ROWS) % 5 % 3, (3,)),
    "logistic": ((np.arange(ROWS) % 3 == 0).astype(int), ()),
    "squared_error": (DRAW.normal(size=(ROWS, 2)) + 3, (2,)),
    "multilabel": (DRAW.integers(0, 2, (ROWS, 3)), (3,)),
    "sequence_cross_entropy": (DRAW.integers(-1, 3, (ROWS, 4)), (4, 3)),
}


@pytest.mark.parametrize("name", TARGETS)
def test_chance_is_the_least_loss_of_a_constant(name):
    targets, shape = TARGETS[name]
    width = shape[-1] if shape else 1
    federated_data = fb.federate((np.zeros((ROWS, 1)), targets), PARTS)

    def apply(params, inputs):
        """The same for all rows, and all places of a sequence."""
        return jax.numpy.broadcast_to(params.reshape(shape[-1:]), (len(inputs), *shape))

    loss = getattr(objectives, name)(apply)

    def mean_over_clients(params):
        each = [loss(params, (targets[part], targets[part])) for part in PARTS]
        return sum(one.mean() for one in each) / len(each)

    with jax.numpy_rank_promotion("allow"), jax.enable_x64(True):
        gradient = jax.jit(jax.value_and_grad(mean_over_clients))
        best = minimize(lambda p: [np.asarray(v) for v in gradient(p)], np.zeros(width), jac=True)  # noqa: E501  # fmt: skip
    assert results.chance(name, federated_data) == pytest.approx(best.fun, rel=1e-6)


def test_a_loss_without_constant_predictions_has_no_chance():
    federated_data = fb.federate((np.zeros((ROWS, 1)), np.zeros(ROWS, int)), PARTS)
    assert results.chance("ranking", federated_data) is None


def ended(**losses: float) -> Any:
    """What a run with these losses on test rows measured last."""
    spreads = {
        model: {"loss": Spread(value, *[value] * 5, clients=2)}
        for model, value in losses.items()
    }
    return {"test": spreads}


def test_losses_worse_than_chance_are_reported_with_both_numbers():
    run = [ended(personal=17.25, local=0.5)]
    (line,) = results.worse_than_chance(run, 0.6931)
    assert "the loss of the personal models is 17.25 on test rows" in line
    assert "worse than 0.6931" in line
    assert results.worse_than_chance(run, 20.0) == []
    assert results.worse_than_chance(run, None) == []
    run = [ended(personal=0.5, local=2.0, shared=9.0)]
    (line,) = results.worse_than_chance(run, 0.6931)
    assert "the models trained alone is 2 on" in line
    seeds = [ended(personal=0.5), ended(personal=3.0), ended(personal=float("nan"))]
    (line,) = results.worse_than_chance(seeds, 0.6931)
    assert "is 3 on test rows" in line


@pytest.fixture
def nonsense(tiny, tmp_path) -> dict:
    """An index, inputs of wild scales and real targets, as tables have them."""
    lines = ["index,income,who,ill"]
    for row in range(40):
        income = 1e4 * (1 + row % 7) * (1 + row % 2)
        lines.append(f"{row},{income},{'ab'[row % 2]},{row % 3 == 0:.1f}")
    text = "\n".join(lines).replace("True", "1.0").replace("False", "0.0")
    (tmp_path / "own.csv").write_text(text)
    own = {"file": str(tmp_path / "own.csv"), "target": "ill", "client": "who"}
    own |= {"partition": "by_key", "preprocess": "none"}
    tiny["data"] = {**own, "test": 0.25}
    tiny["model"] = {"name": "logistic"}
    tiny["run"] = {"rounds": 2, "every": 1}
    tiny["measure"] |= {"metrics": ["loss"], "splits": ["test"]}
    return tiny


@pytest.mark.usefixtures("compiled")
def test_nonsense_is_warned_of_on_screen_and_in_the_summary(
    nonsense, tmp_path, monkeypatch
):
    warned: list[str] = []
    config, out = check(nonsense, "here"), tmp_path / "out"
    summary = run_config(config, out, on_warning=warned.append)
    expected = [
        "targets are 0.0 and 1.0 only, and taken as two classes",
        "look like an index or an id: 'index' (all values differ)",
        "wild scales: 'income' up to 1.4e+05",
        "the loss of the personal models is ",
    ]
    assert len(warned) == len(expected)
    for line, part in zip(warned, expected, strict=True):
        assert part in line
    assert summary["warnings"] == warned
    assert json.loads((out / "summary.json").read_text())["warnings"] == warned
    again: list[str] = []
    run_config(config, out, resume=True, on_warning=again.append)
    assert again == warned


def test_inputs_that_are_named_are_meant(nonsense):
    from fedblend.config.build import build

    nonsense["data"]["inputs"] = ["index"]
    assert not [line for line in build(check(nonsense, "")).warnings if "an id" in line]


def test_logistic_refuses_real_targets(nonsense):
    from fedblend.config.build import build

    nonsense["data"]["kind"] = "regression"
    with pytest.raises(ConfigError, match='"logistic" is for two classes'):
        build(check(nonsense, "here"))
    nonsense["model"]["loss"] = "squared_error"
    assert build(check(nonsense, "here")).task.kind == "regression"
