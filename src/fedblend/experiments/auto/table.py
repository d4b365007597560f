# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The methods of a comparison as a table: settings, metrics, gain over training alone.

``state`` is the content of ``auto.json``.
"""

import math
from pathlib import Path
from typing import Any

from fedblend.experiments.auto.candidates import BY_NAME
from fedblend.report.page import write_page

GAINS = ("mean_gain", "low", "high", "p_holm", "better", "worse")
"""What a row has of the gain over training alone."""


def numbers(summary: dict[str, Any], clients: int, metric: str) -> dict[str, Any]:
    """What a finished run says of a method, mean over splits.

    Args:
        summary: of the run.
        clients: how many there are.
        metric: the criterion.
    """
    runs = summary["runs"]
    tested = [run["measures"]["test"]["personal"] for run in runs]
    means = {name: [of[name]["mean"] for of in tested] for name in tested[0]}
    shown = {
        name: None if None in values else math.fsum(values) / len(values)
        for name, values in means.items()
    }
    bits = sum(run["bits"]["up"] + run["bits"]["down"] for run in runs) / len(runs)
    return {
        "test": math.inf if shown[metric] is None else shown[metric],
        "metrics": shown,
        "bits_per_client": bits / clients,
    }


def rows(state: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each method that ran, as in ``results.csv``."""
    return [
        _row(name, of, state["metric"])
        for name, of in state["methods"].items()
        if "test" in of
    ]


def _row(name: str, of: dict[str, Any], metric: str) -> dict[str, Any]:
    tuned, gain = of["tuned"], of.get("gain_over_alone", {})
    return {
        "method": name,
        "rate": tuned["point"]["rate"],
        "setting": BY_NAME[name].setting or "",
        "value": _cell(tuned["point"]["value"]),
        "rounds": tuned["rounds"],
        f"validation_{metric}": tuned["score"],
        **{f"test_{key}": _cell(value) for key, value in of["metrics"].items()},
        **{key: _cell(gain.get(key)) for key in GAINS},
        "bits_per_client": of["bits_per_client"],
        "seconds": of["seconds"],
    }


def _cell(value: Any) -> Any:
    return "" if value is None else value


def write_report(folder: Path, path: Path) -> Path:
    """Write the page of all methods, the verdict of ``auto.json`` on top."""
    return write_page([folder], path)
