# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The differences between finished runs, as tables in a folder::

results.csv             run x seed x split x model x metric, at the end
clients.csv             run x seed x client
differences.csv         every pair of runs: mean gain, interval, p-values
client_differences.csv  every pair of runs x client: gain and interval
target.csv              run x seed: rounds and bits until a target is reached
table.md, table.tex     methods by columns, for a paper
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.errors import RunError
from fedblend.metrics import Metric, Spread, client_spread
from fedblend.report import tables
from fedblend.report.measures import main_splits, value_at
from fedblend.report.tables import Cell, MeasureColumn, MethodTable
from fedblend.runs import run_folder
from fedblend.runs.paired import (
    Contender,
    Difference,
    common_metrics,
    contenders,
    pair_differences,
)
from fedblend.runs.run_folder import Folder

MOST_PAIRS = 20
"""Of so many methods all pairs are pair_differences, of more each with the first."""


Rows = list[dict[str, Any]]
Keys = Mapping[str, Mapping[str, Any]]
"""By run: further columns, such as the value of a swept key."""


class TargetValue(NamedTuple):
    """A value of a metric that a run is to reach."""

    metric: str
    value: float

    @classmethod
    def parse(cls, text: str) -> "TargetValue":
        """``accuracy=0.9`` as a target."""
        metric, equals, number = text.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = float("nan")
        if not equals or not metric or abs(value) == float("inf") or value != value:
            raise RunError(
                f"--target: {text!r} is not METRIC=NUMBER, such as accuracy=0.9"
            )
        return cls(metric.strip(), value)


class Comparison(NamedTuple):
    """The differences between runs, and their tables."""

    folders: Mapping[str, Path]
    metrics: Sequence[str]
    differences: Sequence[Difference]
    best: Mapping[str, str | None]
    """By metric: the run that is clearly better than all others, or None."""
    results: Rows
    target: Rows
    table: MethodTable
    split: str
    lower: frozenset[str]
    """The metrics of which less is better."""

    def higher_is_better(self, metric: str) -> bool:
        """Whether more of a metric is better."""
        return metric not in self.lower

    def means(self, run: str, split: str, model: str, metric: str) -> list[Any]:
        """The means over clients at the end of a run, one for each seed."""
        wanted = (run, split, model, metric)
        keys = ("run", "split", "model", "metric")
        return [
            row["mean"]
            for row in self.results
            if tuple(row[key] for key in keys) == wanted
        ]

    def markdown(self) -> str:
        """The table in Markdown."""
        return tables.markdown(self.table)

    def latex(self, label: str = "tab:comparison") -> str:
        """The table in LaTeX."""
        return tables.latex(self.table, label)

    def __repr__(self) -> str:
        return self.markdown()

    _repr_markdown_ = markdown

    def report(self, path: str | Path) -> Path:
        """Write all runs as one HTML page."""
        from fedblend.report.page import write_page

        return write_page(list(self.folders.values()), Path(path))


def write(
    folders: Mapping[str, Path],
    out: Path,
    *,
    keys: Keys | None = None,
    metrics: Sequence[str] | None = None,
    target: TargetValue | None = None,
) -> Comparison:
    """Compare finished runs, and write all tables to a folder.

    Args:
        folders: of the runs, by name.
        out: where the tables go.
        keys: further columns of the tables, by run.
        metrics: what to test; the main one if None.
        target: see ``compare``.
    """
    known = keys or {name: {} for name in folders}
    found = contenders(folders)
    reference = None if len(found) <= MOST_PAIRS else next(iter(found))
    tested = pair_differences(found, metrics, reference=reference)
    chosen, first = common_metrics(found, metrics), next(iter(found.values()))
    facts = first.saved.evidence.metrics
    made = Comparison(
        folders=folders,
        metrics=chosen,
        differences=tested,
        best={metric: best(tested, metric) for metric in chosen},
        results=result_rows(folders, known),
        target=target_rows(folders, known, target, facts),
        table=MethodTable([], [], ""),
        split=first.saved.split,
        lower=frozenset(
            name for name, metric in facts.items() if not metric.higher_is_better
        ),
    )
    made = made._replace(table=summary_table(made, found, target))
    clients = client_rows(folders, known)
    names = {row["id"]: row["name"] for row in clients}
    write_rows(out / "results.csv", made.results)
    write_rows(out / "clients.csv", clients)
    write_rows(out / "differences.csv", [one.row() for one in tested])
    write_rows(out / "client_differences.csv", gain_rows(tested, names))
    write_rows(out / "target.csv", made.target)
    run_folder.write_text(out / "table.md", made.markdown())
    run_folder.write_text(out / "table.tex", made.latex())
    return made


def best(tested: Sequence[Difference], metric: str) -> str | None:
    """The run that is better than every other after the correction, if any."""
    wins: dict[str, int] = {}
    names = {name for one in tested for name in (one.name, one.other)}
    for one in tested:
        if one.metric == metric and one.significant:
            winner = one.name if one.gain.mean[0] > 0 else one.other
            wins[winner] = wins.get(winner, 0) + 1
    return next((name for name, won in wins.items() if won == len(names) - 1), None)


def summary_table(
    made: Comparison, found: Mapping[str, Contender], target: TargetValue | None
) -> MethodTable:
    """Methods by what a paper shows of them."""
    first = next(iter(found.values()))
    columns = []
    for metric in made.metrics:
        facts = first.saved.evidence.metrics[metric]
        scale, unit = (100.0, " (%)") if facts.bounded else (1.0, "")
        winner = made.best.get(metric)
        spreads = {name: _spreads(of, metric) for name, of in found.items()}
        values = {name: [one.mean for one in of] for name, of in spreads.items()}
        better = max if facts.higher_is_better else min
        top = better(values, key=lambda name: np.mean(values[name]))
        sure_of = [one for one in made.differences if one.metric == metric]
        pairs = [one[:2] for one in sure_of if one.significant and top in one[:2]]
        losers = {name for pair in pairs for name in pair} - {top}
        means = {
            name: Cell(of, "", name == winner, name in losers)
            for name, of in values.items()
        }
        worst = {
            name: Cell([one.worst_tenth for one in of]) for name, of in spreads.items()
        }
        split = first.saved.split
        columns.append(MeasureColumn(f"{split} {metric}{unit}", means, scale))
        columns.append(MeasureColumn(f"worst tenth{unit}", worst, scale))
    columns += _cost_columns(made, target)
    seeds = len(first.saved.seeds)
    spread = f", mean ± standard deviation over {seeds} seeds" if seeds > 1 else ""
    sure = "Bold: better than every other method (p < 0.05 after Holm's correction "
    sure += f"for {len(made.differences)} comparisons)."
    if not any(made.best.values()):
        sure = "No method is better than every other one for sure (Holm, 5 %)."
    clients = len(first.saved.ids)
    if any(cell.worse for column in columns for cell in column.cells.values()):
        sure += f" {tables.WORSE}: worse than the best mean, likewise."
    caption = f"Mean over {clients} clients{spread}. {sure}"
    return MethodTable(list(found), columns, caption)


def _spreads(of: Contender, metric: str) -> list[Spread]:
    """A metric over the clients, in each seed."""
    better = of.saved.evidence.metrics[metric].higher_is_better
    return [client_spread(one, of.saved.counts, better) for one in of.values(metric)]


def _cost_columns(made: Comparison, target: TargetValue | None) -> list[MeasureColumn]:
    """Bits in all, or what it took to reach the target."""
    heads = {"bits_up": "bits up", "bits_down": "bits down"}
    cells: dict[str, dict[str, Cell]] = {}
    rows = made.results if target is None else made.target
    if target is not None:
        ending = f" to {target.value:g}"
        heads = {
            key: f"{of}{ending}" for key, of in {"round": "rounds", **heads}.items()
        }
    for name in made.folders:
        own = [row for row in rows if row["run"] == name]
        for key in heads:
            if target is None:
                text = tables.human_bits(float(np.mean([row[key] for row in own])))
            else:
                text = tables.mean_to_target(own, key)
            cells.setdefault(key, {})[name] = Cell(text=text)
    return [MeasureColumn(head, cells[key]) for key, head in heads.items()]


def result_rows(folders: Mapping[str, Path], keys: Keys) -> Rows:
    """A row for each run, seed, split, model and metric, at the end of the run."""
    rows = []
    for name, path in folders.items():
        summary = run_folder.read_summary(Folder(path))
        for one in summary["runs"]:
            first = {"run": name, "algorithm": summary["algorithm"], **keys[name]}
            first |= {"seed": one["seed"], "round": one["round"]}
            first |= {f"bits_{way}": one["bits"][way] for way in ("up", "down")}
            for split, models in one["measures"].items():
                for model, metrics in models.items():
                    for metric, spread in metrics.items():
                        place = {"split": split, "model": model, "metric": metric}
                        rows.append({**first, **place, **spread})
    return rows


def client_rows(folders: Mapping[str, Path], keys: Keys) -> Rows:
    """A row for each run, seed and client, with all columns of ``clients.csv``."""
    return [
        {
            "run": name,
            **keys[name],
            **{key: _number(key, of) for key, of in row.items()},
        }
        for name, path in folders.items()
        for row in run_folder.read_table(Folder(path).clients)
    ]


def _number(key: str, text: str) -> Any:
    if key in ("name", "training"):
        return text
    if key in ("seed", "id", "train", "validation", "test", "bits_up", "bits_down"):
        return int(text)
    return float(text) if text else None


def target_rows(
    folders: Mapping[str, Path],
    keys: Keys,
    target: TargetValue | None,
    facts: Mapping[str, Metric],
) -> Rows:
    """A row for each run and seed: the rounds and bits to reach a target, if any.

    Personal models count, by their mean over clients on the split that is shown. A run
    is measured after every block of rounds, so the number is that of a block's end.
    """
    if target is None:
        return []
    if target.metric not in facts:
        known = ", ".join(facts)
        raise RunError(
            f"--target: {target.metric!r} was not measured; there is {known}"
        )
    sign = 1 if facts[target.metric].higher_is_better else -1
    found = []
    for name, path in folders.items():
        rows = run_folder.read_rows(Folder(path))
        split = main_splits(rows)[0]
        place = ("measures", split, "personal", target.metric, "mean")
        for seed in dict.fromkeys(row["seed"] for row in rows):
            own = [row for row in rows if row["seed"] == seed]
            there = [
                row for row in own if sign * (value_at(row, *place) - target.value) >= 0
            ]
            at = there[0] if there else {}
            found.append(
                {"run": name, **keys[name], "seed": seed}
                | {"split": split, "metric": target.metric, "target": target.value}
                | {"reached": bool(there)}
                | {key: at.get(key) for key in ("round", "bits_up", "bits_down")}
            )
    return found


def gain_rows(found: Sequence[Difference], names: Mapping[int, str]) -> Rows:
    """A row for each difference and client: its gain and the ends of the interval."""
    return [
        {
            "run": one.name,
            "other": one.other,
            "split": one.split,
            "metric": one.metric,
            "id": int(client),
            "name": names.get(int(client), ""),
            "gain": float(one.gain.value[place]),
            "low": float(one.gain.low[place]),
            "high": float(one.gain.high[place]),
        }
        for one in found
        for place, client in enumerate(one.ids)
    ]


def write_rows(path: Path, rows: Rows) -> None:
    """Write a table, whole; nothing where there are no rows."""
    if rows:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        whole = [{key: _cell(row.get(key)) for key in columns} for row in rows]
        run_folder.write_table(path, whole)


def _cell(value: Any) -> Any:
    """NaN as an empty cell; infinity stays, it is an open end of an interval."""
    return None if isinstance(value, float) and value != value else value
