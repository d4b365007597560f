# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The board's page in Markdown, from its cells.

A table for each task and number of rounds: runs of different length are never in one
table. The first table of a task is that of the published number of rounds, with every
published number, also where nothing was run.
"""

from collections.abc import Iterable, Sequence
from statistics import mean, median, stdev

from fedblend_reproductions.board.cells import TUNING_SEED, Cell
from fedblend_reproductions.board.methods import BASELINE, METHODS, Method
from fedblend_reproductions.board.protocol import Difference
from fedblend_reproductions.board.published import ON_TASK
from fedblend_reproductions.board.rows import Row, row_of
from fedblend_reproductions.board.tasks import TASKS, Task

HEAD = (
    "method",
    "published",
    "theirs",
    "honest",
    "choosing on test rows is worth",
    "honest, minus fine-tuned",
    "rates chosen",
    "seeds",
    "seconds",
)
NOT_RUN = "not run"
MARK = "<!-- results -->"
"""What separates the guide of a page, which stays, from the results."""


def page(cells: Sequence[Cell], more: Iterable[str] = (), guide: str = "") -> str:
    """The page of all cells, with the lines of further sections, below its guide."""
    lines = [
        guide.partition(MARK)[0].strip() or "# The board",
        "",
        MARK,
        "",
        "Made by `fedblend board --page`. Accuracies are in percent over all held-out "
        "rows, mean and standard deviation over seeds. Differences have paired 95 % "
        "intervals over clients and seeds.",
    ]
    for task in TASKS.values():
        source = ON_TASK[task.name].source
        lines += ["", f"## {task.title}", "", f"Published: {source}."]
        reported = [
            cell["settings"]
            for cell in cells
            if cell["settings"]["task"] == task.name
            and cell["settings"]["seed"] != TUNING_SEED
        ]
        lengths = {(one["rounds"], one.get("patience", 0)) for one in reported}
        others = lengths - {(task.rounds, 0)}
        for length in ((task.rounds, 0), *sorted(others, reverse=True)):
            lines += ["", *_table(task, *length, cells)]
    return "\n".join([*lines, "", *more]).rstrip() + "\n"


def _table(task: Task, rounds: int, patience: int, cells: Sequence[Cell]) -> list[str]:
    rows = {
        name: row_of(task, method, rounds, cells, patience)
        for name, method in METHODS.items()
        if name not in task.skips
    }
    there = {name: row for name, row in rows.items() if row is not None}
    title = f"{task.title}: {rounds:,} rounds"
    if patience:
        title += f", or until none was better for {patience}"
    if rounds != task.rounds:
        title += f", the published table has {task.rounds:,}"
    lines = [f"### {title}", ""]
    if there:
        lines += [
            f"{len(there)} of {len(rows)} methods were run. {_answers(there)}",
            "",
        ]
    else:
        lines += ["Nothing was run with this number of rounds.", ""]
    lines += [_joined(HEAD), "|---" * len(HEAD) + "|"]
    baseline = there.get(BASELINE)
    numbers = ON_TASK[task.name].numbers[task.name] if rounds == task.rounds else {}
    left_out = []
    for name, row in rows.items():
        if row is None and METHODS[name].published not in numbers:
            left_out.append(METHODS[name].heading)
        else:
            lines.append(_line(task, METHODS[name], row, baseline))
    ours = {method.published for method in METHODS.values()}
    for name, number in numbers.items():
        if name not in ours:
            lines.append(_joined([name, f"{number:.2f}", "not in fedblend", ""]))
    if left_out:
        lines += ["", f"Not run: {', '.join(left_out)}."]
    return lines + ([] if not there else ["", _source(task, rounds, patience, cells)])


def _source(task: Task, rounds: int, patience: int, cells: Sequence[Cell]) -> str:
    own = [
        cell
        for cell in cells
        if cell["settings"]["task"] == task.name
        and cell["settings"]["rounds"] == rounds
        and cell["settings"].get("patience", 0) == patience
    ]
    devices = ", ".join(sorted({cell["device"] for cell in own}))
    commits = ", ".join(sorted({(cell["commit"] or "unknown")[:8] for cell in own}))
    rates = ", ".join(f"{rate:g}" for rate in task.rates)
    return (
        f"Measured on {devices} at commit {commits}, every {task.every(rounds)} "
        f"rounds. Rates {rates}, the first is {task.first_rate}; tried for "
        f"{task.tuning_rounds(rounds)} rounds."
    )


def _line(task: Task, method: Method, row: Row | None, baseline: Row | None) -> str:
    number = ON_TASK[task.name].numbers[task.name].get(method.published)
    heading = method.heading if method.personal else f"{method.heading} (one model)"
    first = [heading, "" if number is None else f"{number:.2f}"]
    if row is None:
        return _joined([*first, NOT_RUN, NOT_RUN])
    gap = None if method.name == BASELINE else row.minus(baseline)
    worth = row.worth
    entries = [
        _percent(row.theirs.values()),
        _percent(row.accuracies.values()),
        "" if worth is None else f"{100 * worth:+.2f}",
        _interval(gap),
        ", ".join(f"{rate:g}" for rate in sorted(row.rates)),
        ", ".join(map(str, sorted(row.theirs.keys() | row.honest.keys()))),
        f"{row.seconds:.0f}",
    ]
    return _joined([*first, *entries])


def _answers(rows: dict[str, Row]) -> str:
    """How many personal methods beat fine-tuning, and what choosing is worth."""
    verdicts: dict[str, list[str]] = {"ahead": [], "behind": [], "undecided": []}
    for name, row in rows.items():
        if METHODS[name].personal and name not in (BASELINE, "local_only"):
            gap = row.minus(rows.get(BASELINE))
            if gap is not None:
                verdicts[gap.verdict].append(METHODS[name].heading)
    number, sentences = sum(map(len, verdicts.values())), []
    if number:
        ahead, behind, rest = (
            f"{len(names)}" + (f" ({', '.join(names)})" if names else "")
            for names in verdicts.values()
        )
        sentences.append(
            f"Of {number} personal methods {ahead} beat fine-tuned FedAvg, {behind} "
            f"fall behind it, and {rest} cannot be told from it."
        )
    gains = {name: row.worth for name, row in rows.items() if row.worth is not None}
    if gains:
        top = max(gains, key=lambda name: gains[name])
        sentences.append(
            "Choosing rate and round on test rows is worth "
            f"{100 * median(gains.values()):.2f} points in the median of {len(gains)} "
            f"methods, at most {100 * gains[top]:.2f} ({METHODS[top].heading})."
        )
    return " ".join(sentences)


def _joined(entries: Iterable[str]) -> str:
    return "| " + " | ".join(entries) + " |"


def _percent(values: Iterable[float]) -> str:
    numbers = [100 * value for value in values]
    if not numbers:
        return NOT_RUN
    spread = f" ± {stdev(numbers):.2f}" if len(numbers) > 1 else ""
    return f"{mean(numbers):.2f}{spread}"


def _interval(gap: Difference | None) -> str:
    if gap is None:
        return ""
    low, high = 100 * gap.low, 100 * gap.high
    return f"{100 * gap.mean:+.2f} [{low:+.2f}, {high:+.2f}]"
