# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The state of a comparison, ``auto.json``, and its methods as a table."""

import hashlib
from pathlib import Path
from typing import Any

from fedblend.errors import RunError
from fedblend.report.page import write_page
from fedblend.runs import run_folder
from fedblend.runs.auto.candidates import Request

FORMAT = 2

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


def open_state(request: Request, out: Path) -> dict[str, Any]:
    """What is known of a comparison: nothing, or what the folder has."""
    if not request.table.is_file():
        raise RunError(f"{request.table}: no such file")
    digest = hashlib.sha256(request.table.read_bytes()).hexdigest()
    place = str(request.table.absolute())
    asked = {**request._asdict(), "table": place, "sha256": digest}
    asked |= {"inputs": list(request.inputs), "drop": list(request.drop)}
    path = out / "auto.json"
    if not path.exists():
        if out.exists() and (not out.is_dir() or (out / "config.toml").exists()):
            raise RunError(f"{out}: holds something else; --out names another folder")
        return {"format": FORMAT, "request": asked, "methods": {}, "left_out": []}
    state = run_folder.read_json(path)
    if state.get("format") != FORMAT:
        raise RunError(
            f"{out}: holds a comparison by another version of fedblend; --out names "
            "another folder"
        )
    for key, value in asked.items():
        there = (state.get("request") or {}).get(key)
        if there != value:
            raise RunError(
                f"{out}: holds a comparison with another {key}: {there} there, {value} "
                "here; --out names another folder"
            )
    return state
