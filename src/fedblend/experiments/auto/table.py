# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The methods of a comparison as a table: settings, metrics, gain over training alone.

``state`` is the content of ``auto.json``.
"""

from pathlib import Path
from typing import Any

from fedblend.report.page import write_page

GAINS = ("mean_gain", "low", "high", "better", "worse")
"""What a row has of the gain over training alone."""


def bits(summary: dict[str, Any], clients: int) -> float:
    """Bits that a client sends and receives in a finished run, mean over splits."""
    runs = summary["runs"]
    total = sum(run["bits"]["up"] + run["bits"]["down"] for run in runs)
    return total / len(runs) / clients


def rows(state: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each method that was compared, as in ``results.csv``."""
    return [
        _row(name, of, state["metric"])
        for name, of in state["methods"].items()
        if "test" in of
    ]


def _row(name: str, of: dict[str, Any], metric: str) -> dict[str, Any]:
    gain = of.get("gain_over_alone", {})
    return {
        "method": name,
        "setting": ", ".join(
            f"{key} {value:g}" for key, value in of["setting"].items()
        ),
        f"validation_{metric}": _cell(of["validation"]),
        **{f"test_{key}": _cell(value) for key, value in of["metrics"].items()},
        **{key: _cell(gain.get(key)) for key in GAINS},
        "bits_per_client": _cell(of.get("bits_per_client")),
        "seconds": of["seconds"],
        "not_trained": of.get("not_trained", ""),
    }


def _cell(value: Any) -> Any:
    return "" if value is None else value


def write_report(folder: Path, path: Path) -> Path:
    """Write the page of all methods, the verdict of ``auto.json`` on top."""
    return write_page([folder], path)
