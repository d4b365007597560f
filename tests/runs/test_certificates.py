# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Certificates of a run: the numbers against NumPy, stopping, and what is refused."""

import numpy as np
import pytest

from fedblend.cli import main
from fedblend.config import toml
from fedblend.config.build import build
from fedblend.config.config import check
from fedblend.errors import ConfigError
from fedblend.report.terminal import _certificate_lines
from fedblend.runs.certificates import strong_convexity
from fedblend.runs.run import Step, run_config
from fedblend.trees import precision
from planned import FLIX, L2, ByHand, changed

ALPHA, EPS, EVERY = 0.5, 1e-7, 3
STOPPED = changed(
    FLIX, f"run.until={EPS}", f"run.every={EVERY}", "run.rounds=200", "run.seed=[1, 2]"
)


@pytest.fixture(scope="module")
def by_hand() -> ByHand:
    return ByHand()


def gap(by_hand: ByHand, x: np.ndarray, alpha: float = ALPHA) -> float:
    gradient = by_hand.gradient(alpha, x)
    return float(gradient @ gradient) / (2 * alpha**2 * L2)


@pytest.mark.slow
def test_a_run_stops_at_its_certificate(tmp_path, by_hand, compiled):
    """At the first record of NumPy's iterates that has it, and not one sooner."""
    config = check(STOPPED, "here")
    summary = run_config(config, tmp_path / "run")
    x, rounds = by_hand.average, 0
    step = 1 / (ALPHA**2 * by_hand.L.mean())
    while gap(by_hand, x) > EPS:
        for _ in range(EVERY):
            x = x - step * by_hand.gradient(ALPHA, x)
        rounds += EVERY
    assert 3 * EVERY < rounds < 200
    least = by_hand.least(ALPHA)
    for one in summary["runs"]:
        assert one["round"] == rounds
        found = one["certificate"]
        assert found["mu"] == pytest.approx(ALPHA**2 * L2)
        assert found["objective"] == pytest.approx(by_hand.value(ALPHA, x), abs=1e-9)
        assert found["gap"] == pytest.approx(gap(by_hand, x), rel=1e-4)
        assert found["gap"] == pytest.approx(
            found["gradient_norm"] ** 2 / (2 * found["mu"])
        )
        assert found["objective"] - least <= found["gap"] <= EPS
    (line,) = _certificate_lines(summary["runs"])
    assert line.startswith(f"certificate: f~ - min f~ <= {found['gap']:.3g} (f~ = ")
    _check_killed_and_resumed(tmp_path, summary)


def _check_killed_and_resumed(tmp_path, summary):
    """Killed right after the record at which it stops, it has nothing left to do."""
    config, end = check(STOPPED, "here"), summary["runs"][0]["round"]

    def killed(step: Step) -> None:
        if step.round == end:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_config(config, tmp_path / "killed", on_step=killed)
    again = run_config(config, tmp_path / "killed", resume=True)
    for one, other in zip(again["runs"], summary["runs"], strict=True):
        for key in ("round", "bits", "certificate"):
            assert one[key] == other[key]


NO_UNTIL = {
    ("run.until=1e-6", "run.precision=float32"): "run.until: 1e-06 is below 1e-05: "
    'float32 does not resolve it; run.precision = "float64" does',
    ("run.until=1e-14",): "1e-14 is below 1e-13: float64 does not resolve it",
    ("run.until=0.0",): "run.until: 0.0 is not above 0",
    ("run.until=1e-3", "model.l2=0.0"): "mu_alpha is 0; model.l2 above 0 gives it",
    ("run.until=1e-3", "algorithm.mix=outputs", "algorithm.rate=1.0"): "run.until: "
    "there is no certificate of mixed outputs",
    ("run.until=1e-3", "model.name=mlp", "algorithm.rate=1.0",
     "algorithm.personal.solver=lbfgs"): "run.until: needs the smoothness constant L_i",
}  # fmt: skip


@pytest.mark.parametrize("settings", NO_UNTIL, ids=" ".join)
def test_what_has_no_certificate(settings, tmp_path, capsys):
    file = tmp_path / "flix.toml"
    file.write_text(toml.write(FLIX))
    sets = [word for setting in settings for word in ("--set", setting)]
    out = tmp_path / "run"
    assert main(["run", str(file), "--out", str(out), *sets]) == 2
    said = capsys.readouterr().err
    assert said.strip().count("\n") == 0
    assert NO_UNTIL[settings] in said
    assert not out.exists()


def test_mu_of_weighted_clients(by_hand):
    """By rows where the run weighs by them, with the alpha of each client."""
    alpha = np.array([0.1, 0.5, 0.9, 1.0])
    settings = (f"algorithm.alpha={alpha.tolist()}", "algorithm.rate=1.0")
    with precision("float64"):
        for weights in ("uniform", "by_count"):
            config = check(changed(FLIX, *settings, f"run.weights={weights}"), "here")
            built = build(config)
            counts = np.array([len(a) for a, _ in by_hand.rows], float)
            shares = counts if weights == "by_count" else np.ones(4)
            (mu,) = strong_convexity(config, built)
            assert mu == pytest.approx(L2 * (shares / shares.sum()) @ alpha**2)
        noisy = {"clip": 1.0, "noise": 1.0, "delta": 1e-5}
        private = check({**changed(FLIX, *settings), "privacy": noisy}, "here")
        with pytest.raises(ConfigError, match="that may be told of a private run"):
            strong_convexity(private, built)
