# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The folder of a comparison: what is known of it, and what it found."""

import hashlib
from pathlib import Path
from typing import Any

from fedblend.errors import RunError
from fedblend.report.page import write_page
from fedblend.runs import run_folder
from fedblend.runs.auto.candidates import Request
from fedblend.runs.saved_run import load
from fedblend.runs.survival_models import SurvivalModels

FORMAT = 2
"""Of ``auto.json``."""
GAINS = ("mean_gain", "low", "high", "better", "worse")
"""What a row has of the gain over training alone."""


def method_rows(state: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each method that was compared, as in ``results.csv``."""
    metric, found = state["metric"], []
    for name, of in state["methods"].items():
        if "test" not in of:
            continue
        gain = of.get("gain_over_alone", {})
        setting = ", ".join(f"{key} {value:g}" for key, value in of["setting"].items())
        row = {
            "method": name,
            "setting": setting,
            f"validation_{metric}": of["validation"],
            **{f"test_{key}": value for key, value in of["metrics"].items()},
            **{key: gain.get(key) for key in GAINS},
            "bits_per_client": of.get("bits_per_client"),
            "seconds": of["seconds"],
            "not_trained": of.get("not_trained"),
        }
        found.append({key: "" if of is None else of for key, of in row.items()})
    return found


def open_state(request: Request, out: Path) -> dict[str, Any]:
    """What is known of a comparison: nothing, or what the folder has."""
    if not request.table.is_file():
        raise RunError(f"{request.table}: no such file")
    with request.table.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    place = str(request.table.absolute())
    asked = {**request._asdict(), "table": place, "sha256": digest}
    asked |= {key: list(getattr(request, key)) for key in ("inputs", "drop", "keep")}
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


class AutoResult:
    """A finished comparison: its verdict, its methods, its models, its page.

    ``folder`` is where all of it lies; ``verdict`` has three sentences; ``deploy`` is
    the name of the method to deploy, None where nothing can be told.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._state = run_folder.read_comparison(folder)
        self.verdict: list[str] = self._state["verdict"]
        self.deploy: str | None = self._state["deploy"]
        self.metric: str = self._state["metric"]

    @property
    def metrics(self) -> list[str]:
        """What was measured on test rows; ``metric`` is the one that decides."""
        return [key[5:] for key in self.table[0] if key.startswith("test_")]

    @property
    def titles(self) -> dict[str, str]:
        """The methods in words, by name."""
        return {name: of["title"] for name, of in self._state["methods"].items()}

    @property
    def table(self) -> list[dict[str, Any]]:
        """A row for each method: its settings, metrics and gain over training alone."""
        return method_rows(self._state)

    def frame(self) -> Any:
        """``table`` as a pandas frame."""
        import pandas

        return pandas.DataFrame(self.table)

    @property
    def deployed(self) -> str:
        """Which rows the models to deploy are trained on; empty without any."""
        return self._state.get("deployed", "")

    def run(self, method: str | None = None) -> Any:
        """The saved run of a method.

        By default of the one to deploy, whose models are trained on all rows. Of times
        until an event, models that predict as a run does.
        """
        if self._state["kind"] == "survival":
            return SurvivalModels(self.folder, method)
        deployed = method is None and self.deploy is not None
        return load(self.folder if deployed else self._folder(method))

    def predict(self, rows: Any, *, client: str, method: str | None = None) -> Any:
        """Predictions for rows of a client, by its own model."""
        return self.run(method).predict(rows, client=client)

    def report(self, path: str | Path) -> Path:
        """Write the page to another place."""
        return write_page([self.folder], Path(path))

    def _folder(self, method: str | None) -> Path:
        found = self._state["findings"]
        chosen = method or self.deploy or (found and found["choice"]["method"])
        if not (self.folder / "runs" / str(chosen)).is_dir():
            kept = ", ".join(sorted(one.name for one in self.folder.glob("runs/*")))
            raise RunError(f"method: {chosen!r} has no run; there is {kept or 'none'}")
        return self.folder / "runs" / str(chosen)

    def __repr__(self) -> str:
        return "\n".join(self.verdict)
