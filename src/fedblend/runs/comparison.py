# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What lies between finished runs, in a folder::

    comparison.json      the runs, the metric, all differences, who is best
    results              run x seed x split x model x metric, at the end
    clients              run x seed x client
    differences          every pair of runs: mean gain, interval, p-values
    client_differences   every pair of runs x client: gain and interval
    target               run x seed: rounds and bits until a metric reached a target
    table.md, table.tex  methods by columns, for a paper
    figures              PDF, if asked for

Tables are CSV and Parquet.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.errors import RunError
from fedblend.metrics import Spread, over_clients
from fedblend.report import tables
from fedblend.report.tables import Cell, Column, Table
from fedblend.runs import result_tables, run_folder
from fedblend.runs.paired import (
    ALONE,
    Contender,
    Difference,
    common_metrics,
    compared,
    contenders,
)
from fedblend.runs.result_tables import Keys, Target
from fedblend.runs.run_folder import Folder

MOST_PAIRS = 20
"""Of so many methods all pairs are compared, of more each with the first."""


class Comparison(NamedTuple):
    """What lies between runs."""

    folders: Mapping[str, Path]
    metrics: Sequence[str]
    differences: Sequence[Difference]
    best: Mapping[str, str | None]
    """By metric: who is better than all others, None where nobody is for sure."""
    results: result_tables.Rows
    target: result_tables.Rows
    table: Table
    split: str
    lower: frozenset[str]
    """The metrics of which less is better."""

    def higher_is_better(self, metric: str) -> bool:
        """Whether more of a metric is better."""
        return metric not in self.lower

    def markdown(self) -> str:
        """The table in Markdown."""
        return tables.markdown(self.table)

    def latex(self) -> str:
        """The table in LaTeX."""
        return tables.latex(self.table)


def write(
    folders: Mapping[str, Path],
    out: Path,
    *,
    keys: Keys | None = None,
    metrics: Sequence[str] | None = None,
    target: Target | None = None,
    figures: bool = False,
) -> Comparison:
    """Compare finished runs, and write all tables to a folder.

    Args:
        folders: of the runs, by name.
        out: where the tables go.
        keys: further columns of the tables, by run.
        metrics: what to test; the main one if None.
        target: see ``compare``.
        figures: whether to draw.
    """
    known = keys or {name: {} for name in folders}
    found = contenders(folders)
    reference = None if len(found) <= MOST_PAIRS else next(iter(found))
    tested = compared(found, metrics, reference=reference)
    chosen, first = common_metrics(found, metrics), next(iter(found.values()))
    made = Comparison(
        folders=folders,
        metrics=chosen,
        differences=tested,
        best={metric: best(tested, metric) for metric in chosen},
        results=result_tables.results(folders, known),
        target=_to_target(folders, known, target, found),
        table=Table([], [], ""),
        split=first.saved.split,
        lower=frozenset(
            name
            for name, metric in first.saved.evidence.metrics.items()
            if not metric.higher_is_better
        ),
    )
    made = made._replace(table=summary_table(made, found, target))
    clients = result_tables.clients(folders, known)
    names = {row["id"]: row["name"] for row in clients}
    result_tables.write(out / "results", made.results)
    result_tables.write(out / "clients", clients)
    result_tables.write(out / "differences", [one.row() for one in tested])
    result_tables.write(
        out / "client_differences", result_tables.of_clients(tested, names)
    )
    result_tables.write(out / "target", made.target)
    run_folder.write_text(out / "table.md", made.markdown())
    run_folder.write_text(out / "table.tex", made.latex())
    run_folder.write_text(out / "comparison.json", run_folder.as_json(_facts(made)))
    if figures:
        from fedblend.report import paper_figures

        rows = {name: run_folder.read_rows(Folder(of)) for name, of in folders.items()}
        paper_figures.draw(rows, tested, out / "figures")
    return made


def _to_target(
    folders: Mapping[str, Path],
    keys: Keys,
    target: Target | None,
    found: Mapping[str, Contender],
) -> result_tables.Rows:
    if target is None:
        return []
    metrics = next(iter(found.values())).saved.evidence.metrics
    if target.metric not in metrics:
        known = ", ".join(metrics)
        raise RunError(
            f"--target: {target.metric!r} was not measured; there is {known}"
        )
    better = metrics[target.metric].higher_is_better
    return result_tables.to_target(folders, keys, target, better)


def best(tested: Sequence[Difference], metric: str) -> str | None:
    """Who is better than every other method after the correction, if one is."""
    wins: dict[str, int] = {}
    names = {name for one in tested for name in (one.name, one.other)}
    for one in tested:
        if one.metric == metric and one.significant:
            winner = one.name if one.gain.mean[0] > 0 else one.other
            wins[winner] = wins.get(winner, 0) + 1
    return next((name for name, won in wins.items() if won == len(names) - 1), None)


def summary_table(
    made: Comparison, found: Mapping[str, Contender], target: Target | None
) -> Table:
    """Methods by what a paper shows of them."""
    first = next(iter(found.values()))
    columns = []
    for metric in made.metrics:
        facts = first.saved.evidence.metrics[metric]
        scale, unit = (100.0, " (%)") if facts.bounded else (1.0, "")
        winner = made.best.get(metric)
        means = {
            name: Cell(
                [spread.mean for spread in _spreads(of, metric)], "", name == winner
            )
            for name, of in found.items()
        }
        worst = {
            name: Cell([spread.worst_tenth for spread in _spreads(of, metric)])
            for name, of in found.items()
        }
        split = first.saved.split
        columns.append(Column(f"{split} {metric}{unit}", means, scale))
        columns.append(Column(f"worst tenth{unit}", worst, scale))
    columns += _cost_columns(made, target)
    seeds = len(first.saved.seeds)
    spread = f", mean ± standard deviation over {seeds} seeds" if seeds > 1 else ""
    sure = "Bold: better than every other method (p < 0.05 after Holm's correction "
    sure += f"for {len(made.differences)} comparisons)."
    if not any(made.best.values()):
        sure = "No method is better than every other one for sure (Holm, 5 %)."
    clients = len(first.saved.ids)
    caption = f"Mean over {clients} clients{spread}. {sure}"
    return Table(list(found), columns, caption)


def _spreads(of: Contender, metric: str) -> list[Spread]:
    """A metric over the clients, in each seed."""
    better = of.saved.evidence.metrics[metric].higher_is_better
    return [over_clients(one, of.saved.counts, better) for one in of.values(metric)]


def _cost_columns(made: Comparison, target: Target | None) -> list[Column]:
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
                text = tables.bits_text(float(np.mean([row[key] for row in own])))
            else:
                text = tables.reached(own, key)
            cells.setdefault(key, {})[name] = Cell(text=text)
    return [Column(head, cells[key]) for key, head in heads.items()]


def _facts(made: Comparison) -> dict[str, Any]:
    return {
        "runs": {name: str(path) for name, path in made.folders.items()},
        "metrics": list(made.metrics),
        "alone": ALONE in made.table.rows,
        "best": dict(made.best),
        "differences": [one.row() for one in made.differences],
    }
