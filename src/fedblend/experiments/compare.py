# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Run configurations on the same clients and splits, and compare them.

Every configuration becomes an ordinary run in ``OUT/runs/NAME``. Beside them::

    comparison.json      the runs, the metric, all differences, who is best
    results              run x seed x split x model x metric, at the end
    clients              run x seed x client
    differences          every pair of runs: mean gain, interval, p-values
    client_differences   every pair of runs x client: gain and interval
    target               run x seed: rounds and bits until a metric reached a target
    table.md, table.tex  methods by columns, for a paper

Tables are CSV and Parquet. Training alone is computed once for all runs that share it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.config.config import Config, load, tables_differ
from fedblend.errors import ConfigError, RunError
from fedblend.experiments import alone, run_folder, tidy
from fedblend.experiments.differences import (
    ALONE,
    Contender,
    Difference,
    common_metrics,
    compared,
    contenders,
    data_keys,
)
from fedblend.experiments.run import Step, run_config
from fedblend.experiments.run_folder import Folder
from fedblend.experiments.tidy import Keys, Target
from fedblend.metrics import Spread, over_clients
from fedblend.report import tables
from fedblend.report.tables import Cell, Column, Table

MOST_PAIRS = 20
"""Of so many runs all pairs are compared, of more each with the first."""

Entry = str | Path | Config
"""A configuration, its file, or the folder of a finished run."""
OnStep = Callable[[str, Step], None]
"""Called with the name of a run and its progress."""


class Comparison(NamedTuple):
    """What lies between runs."""

    folders: Mapping[str, Path]
    metrics: Sequence[str]
    differences: Sequence[Difference]
    best: Mapping[str, str | None]
    """By metric: who is better than all others, None where nobody is for sure."""
    results: tidy.Rows
    target: tidy.Rows
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


def compare(
    entries: Sequence[Entry],
    out: str | Path,
    *,
    seeds: int | None = None,
    resume: bool = False,
    metrics: Sequence[str] | None = None,
    target: str | None = None,
    figures: bool = False,
    sets: Iterable[str] = (),
    on_step: OnStep = lambda name, step: None,
    on_warning: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Run configurations on the same clients and splits, and compare them.

    Args:
        entries: configurations, TOML files, or folders of finished runs.
        out: the folder of the comparison; it must not hold one yet, unless ``resume``.
        seeds: how many seeds to run, from the configuration's own on.
        resume: continue a comparison that was interrupted.
        metrics: what to test differences of; the main metric if None.
        target: such as "accuracy=0.9": how many rounds and bits it takes to get there.
        figures: draw figures for a paper, as PDF.
        sets: settings ``key=value`` for every configuration.
        on_step: called after every block of rounds of a run.
        on_warning: called with each warning, one line.

    Raises:
        InputError: one line: the configurations do not go together, or cannot run.
    """
    out = Path(out)
    wanted = None if target is None else Target.parse(target)
    configs, finished = read_entries(entries, seeds, tuple(sets))
    check_comparable(configs)
    if (out / "runs").exists() and not resume:
        raise RunError(
            f"{out}: holds a comparison already; --resume continues it, --out names "
            "another folder"
        )
    folders = dict(finished)
    for name, config in configs.items():
        folders[name] = out / "runs" / name
        share_alone(config, folders[name], configs, out)
        run_config(
            config,
            folders[name],
            resume=True,
            on_step=lambda step, name=name: on_step(name, step),
            on_warning=lambda line, name=name: on_warning(f"{name}: {line}"),
        )
    out.mkdir(parents=True, exist_ok=True)
    return write(folders, out, metrics=metrics, target=wanted, figures=figures)


def share_alone(
    config: Config, place: Path, configs: Mapping[str, Config], out: Path
) -> None:
    """Take training alone from a finished run, if its work is the same."""
    mine = alone.work_alone(config)
    for name, other in configs.items():
        done = Folder(out / "runs" / name)
        same = mine is not None and alone.work_alone(other) == mine
        finished = done.path != place and done.summary.exists()
        if same and finished and alone.share(done, config, Folder(place)):
            return


def read_entries(
    entries: Sequence[Entry], seeds: int | None, sets: Sequence[str] = ()
) -> tuple[dict[str, Config], dict[str, Path]]:
    """The configurations to run and the folders of finished runs, by name."""
    configs: dict[str, Config] = {}
    finished: dict[str, Path] = {}
    if not entries:
        raise RunError(
            "compare: nothing to compare; name configurations or run folders"
        )
    for entry in entries:
        if not isinstance(entry, Config) and Path(entry).is_dir():
            path = Path(entry)
            name = path.resolve().name
            run_folder.read_summary(Folder(path))
            _unused(name, path, configs, finished)
            finished[name] = path
            continue
        config = entry if isinstance(entry, Config) else load(Path(entry), sets)
        config = with_seeds(config, seeds)
        name = safe_name(config.name)
        if name in configs and not isinstance(entry, Config):
            name = safe_name(Path(entry).stem)
        _unused(name, entry, configs, finished)
        configs[name] = config
    return configs, finished


def _unused(name: str, entry: Any, *known: Mapping[str, Any]) -> None:
    if any(name in of for of in known):
        where = "a configuration" if isinstance(entry, Config) else str(entry)
        raise ConfigError(
            f"{where}: name: {name!r} is the name of another run of this comparison"
        )


def safe_name(name: str) -> str:
    """The name of a folder.

    >>> safe_name("my run: 1")
    'my-run-1'
    """
    kept = [sign if sign.isalnum() or sign in "._=-" else " " for sign in name]
    return "-".join("".join(kept).split()).strip(".") or "run"


def with_seeds(config: Config, seeds: int | None) -> Config:
    """The configuration with so many seeds, from its own (the first) on."""
    if seeds is None:
        return config
    if seeds < 1:
        raise ConfigError(f"--seeds: {seeds} is not 1 or more")
    first = run_folder.seeds_of(config)[0]
    chosen: Any = first if seeds == 1 else list(range(first, first + seeds))
    run = config.run.model_copy(update={"seed": chosen})
    return config.model_copy(update={"run": run})


def check_comparable(configs: Mapping[str, Config]) -> None:
    """Refuse configurations on other data, clients or splits than the first.

    Raises:
        ConfigError: one line with the key and both values.
    """
    if not configs:
        return
    (first, config), *others = configs.items()
    for name, other in others:
        wrong = tables_differ(data_keys(config), data_keys(other))
        if wrong:
            raise ConfigError(
                f"{name}: has other data than {first}, so they cannot be compared: "
                f"{wrong}"
            )


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
        results=tidy.results(folders, known),
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
    clients = tidy.clients(folders, known)
    names = {row["id"]: row["name"] for row in clients}
    tidy.write(out / "results", made.results)
    tidy.write(out / "clients", clients)
    tidy.write(out / "differences", [one.row() for one in tested])
    tidy.write(out / "client_differences", tidy.of_clients(tested, names))
    tidy.write(out / "target", made.target)
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
) -> tidy.Rows:
    if target is None:
        return []
    metrics = next(iter(found.values())).saved.evidence.metrics
    if target.metric not in metrics:
        known = ", ".join(metrics)
        raise RunError(
            f"--target: {target.metric!r} was not measured; there is {known}"
        )
    better = metrics[target.metric].higher_is_better
    return tidy.to_target(folders, keys, target, better)


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
