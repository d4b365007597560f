# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a kept run of ``fedblend auto`` tells, next to the models of the verdict."""

from typing import Any

import numpy as np

from fedblend.runs.auto.candidates import BY_NAME

FAR = {"linear": 0.01, "tabular": 0.05}
"""Part of its score by which a kept run may differ from the models of the verdict, by
the model: networks have other first weights."""


def bits_per_client(summary: dict[str, Any], clients: int) -> float:
    """Bits that a client sends and receives in a finished run, mean over splits."""
    runs = summary["runs"]
    total = sum(run["bits"]["up"] + run["bits"]["down"] for run in runs)
    return total / len(runs) / clients


def distance_warning(
    summary: dict[str, Any], metric: str, name: str, tested: float, rounds: int
) -> str | None:
    """A warning where a kept run has not reached the models of the verdict."""
    personal = [run["measures"]["test"]["personal"] for run in summary["runs"]]
    ended = float(np.mean([one[metric]["mean"] for one in personal]))
    if abs(ended - tested) <= FAR[BY_NAME[name].model] * abs(tested):
        return None
    return (
        f"the run of {BY_NAME[name].title} that is kept has a test {metric} of "
        f"{ended:.4g} after {rounds} rounds, the models of the verdict have "
        f"{tested:.4g}: deploy it with more rounds"
    )
