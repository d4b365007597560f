# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The additive model: its optimum by scipy, and its kept run where effects bend."""

import json

import jax
import numpy as np
import pytest
from scipy.optimize import minimize

import fedblend as fb
from fedblend.errors import RunError
from fedblend.models import build
from fedblend.models.tabular import BINS, additive
from fedblend.runs.auto import candidates, comparison
from fedblend.runs.auto.candidates import ALONE


def bent(clients=12, count=40, seed=0):
    """A target that rises to the middle of a number and falls behind it."""
    draw = np.random.default_rng(seed)
    x = draw.uniform(0, 100, clients * count)
    site = np.repeat(np.arange(clients), count)
    y = draw.normal(0, 3, clients)[site] - np.abs(x - 50) / 10
    return {"site": site, "x": x.round(3), "y": (y + draw.normal(size=len(x))).round(4)}


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    wanted = (ALONE, "fedavg", "own_intercepts", "additive")
    some = [one for one in candidates.CANDIDATES if one.name in wanted]
    out = tmp_path_factory.mktemp("additive") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "CANDIDATES", some)
        patch.setattr(comparison, "SPLITS", 3)
        return fb.auto(bent(), client="site", target="y", out=out, quiet=True)


def test_effects_that_bend_are_deployed_and_the_kept_run_agrees(deployed):
    assert deployed.deploy == "additive"
    state = json.loads((deployed.folder / "auto.json").read_text())
    methods = state["methods"]
    assert methods["additive"]["test"] < 0.3 * methods["own_intercepts"]["test"]
    assert not any("is kept" in line for line in state["warnings"])
    summary = deployed.run().summary
    kept = [
        one["measures"]["test"]["personal"]["mse"]["mean"] for one in summary["runs"]
    ]
    np.testing.assert_allclose(kept, methods["additive"]["by_split"], rtol=1e-3)


def test_what_there_is_no_time_for_is_said_and_added_later(tmp_path, monkeypatch):
    """The model is solved for, whatever the time; the run that it needs is next."""
    wanted = (ALONE, "fedavg", "additive")
    some = [one for one in candidates.CANDIDATES if one.name in wanted]
    monkeypatch.setattr(comparison, "CANDIDATES", some)
    monkeypatch.setattr(comparison, "SPLITS", 3)
    asked = {"client": "site", "target": "y", "out": tmp_path / "out", "quiet": True}
    with monkeypatch.context() as patch:
        patch.setattr(comparison, "START", 1e9)
        assert fb.auto(bent(), **asked, minutes=3).deploy == "additive"
    assert (tmp_path / "out" / "deployed").is_dir()
    with pytest.raises(RunError, match="run of additive was left out for lack of time"):
        fb.load(tmp_path / "out")
    found = fb.auto(bent(), **asked, minutes=4)
    assert fb.load(tmp_path / "out").folder.path == found.run("additive").folder.path
    state = json.loads((tmp_path / "out" / "auto.json").read_text())
    assert not any("the run of" in line for line in state["warnings"])
    begun = {one.name: one.stat().st_ctime for one in tmp_path.glob("out/runs/*")}
    assert begun[ALONE] < begun["additive"] < begun["fedavg"]


def test_the_model_and_its_optimum_are_those_of_a_transcription():
    """Entry by entry, and the joint objective by scipy's optimizer."""
    draw = np.random.default_rng(1)
    numbers, ranks = draw.normal(size=(60, 1)), BINS * draw.random((60, 1))
    owner = np.repeat([0, 1, 2], 20)
    width = BINS / 4
    entries = [
        [1.0, x, *(min(max((r - k * width) / width, 0), 1) for k in range(4))]
        for x, r in zip(numbers[:, 0], ranks[:, 0], strict=True)
    ]
    table = np.array(entries)
    targets = table @ draw.normal(size=6) + owner + draw.normal(size=60)
    ridge, level = 0.01, 0.5

    def value(z):
        gap = table @ z[:6] + z[6:][owner] - targets
        own = (z[6:] ** 2).sum() / level
        return 0.5 * (gap @ gap + own + 60 * ridge * (z[1:6] ** 2).sum())

    best = minimize(value, np.zeros(9), method="BFGS", options={"gtol": 1e-7}).x
    inputs = np.hstack([numbers, ranks]).astype(np.float32)
    model = build("additive", (2,), 1, ranks=1, bins=4)
    data = fb.federate(
        (inputs, targets.astype(np.float32)),
        [np.flatnonzero(owner == c) for c in range(3)],
    )
    algorithm = fb.algorithms.hierarchical(
        fb.losses.squared_error(model.apply),
        fb.Work(1.0, steps=1, batch_size=None),
        level=level,
        ridge=ridge,
    )
    run = fb.simulate(
        algorithm, model.init, data, jax.random.key(0), rounds=2, weights="uniform"
    )
    shared = run.complete().shared
    np.testing.assert_allclose(shared.weight[0], best[1:6], atol=2e-3)
    np.testing.assert_allclose(shared.bias[0], best[0], atol=2e-3)


def test_more_bins_than_ranks_are_made_of_are_refused():
    with pytest.raises(ValueError, match=rf"{BINS + 1} .*{BINS}"):
        additive(3, 1, ranks=1, bins=BINS + 1)
