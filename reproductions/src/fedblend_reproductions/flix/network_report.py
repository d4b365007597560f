# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""F9's comparison of methods on a task: what is concluded, by a criterion fixed before
anything was run.
"""

from typing import Any, NamedTuple

import numpy as np

from fedblend_reproductions.claims import Finding, Numbers, Verdict, lead
from fedblend_reproductions.flix import network_runs as runs
from fedblend_reproductions.flix.network_choice import Outcome, Row
from fedblend_reproductions.flix.network_task import ALPHAS, Setting, Task
from fedblend_reproductions.plots import banded, legend_above, panels

SHORT = 0.05
"""How far below the paper's accuracy FedAvg may be for a comparison to count."""
CRITERION = (
    "Criterion, fixed before the run: FLIX at the setting (solver, alpha inside (0, "
    "1), x_i, rate) that is best on validation rows is compared on test rows, by "
    "examples, with FedAvg and with the best model without mixing (FedAvg, or FLIX's "
    "own code with alpha 1, which starts at the mean of x_i), each at its best setting "
    "on validation rows; differences have 95 % intervals over clients and seeds. "
    "Reproduced if both intervals are above 0 and FedAvg is at most "
    f"{SHORT} short of the paper's accuracy; partly if both differences are above 0, "
    "but an interval is not or FedAvg is shorter; not reproduced if a difference is 0 "
    "or less."
)
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""97.5 % quantiles for 1, 2, ... degrees of freedom."""


class Gap(NamedTuple):
    """How much more of the test rows is right, and half of its 95 % interval.

    ``clients`` and ``seeds`` are the standard errors over either alone.
    """

    mean: float
    half: float
    clients: float
    seeds: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.half:.4f}"


def compared(ours: Row, other: Row, counts: np.ndarray) -> Gap:
    """How far ahead ``ours`` is, seed by seed; ``counts`` are test rows of clients.

    Both variances are added: what varies with client and seed alike counts twice, so
    the interval is rather too wide. A row with one seed is compared with every seed.
    """
    weights = counts / counts.sum()
    gaps = np.where(counts > 0, ours.clients - other.clients, 0)
    by_seed, by_client = gaps @ weights, gaps.mean(axis=0)
    mean = float(by_seed.mean())
    clients = float(np.sqrt(np.sum((weights * (by_client - mean)) ** 2)))
    count = len(by_seed)
    seeds = float(by_seed.std(ddof=1) / np.sqrt(count)) if count > 1 else 0.0
    quantile = STUDENT[min(count - 2, len(STUDENT) - 1)] if count > 1 else 0.0
    half = float(np.hypot(1.96 * clients, quantile * seeds))
    return Gap(mean, half, clients, seeds)


def verdict(gaps: list[Gap], short: float) -> Verdict:
    """The verdict by the gaps to FedAvg and to the best model without mixing."""
    if min(gap.mean for gap in gaps) <= 0:
        return Verdict.differs
    clear = all(gap.mean > gap.half for gap in gaps)
    return Verdict.reproduced if clear and short <= SHORT else Verdict.partly


def best(rows: dict[Setting, Row], solver: str | None = None) -> Setting:
    """The setting that is best on validation rows, of a solver or of all."""
    those = [one for one in rows if solver in (None, one.solver)]
    return max(those, key=lambda one: rows[one].validation)


def finding(
    task: Task, outcome: Outcome, paper: dict[float, float], why: str
) -> Finding:
    """What it comes to; ``paper`` are its accuracies by alpha, 1 being FedAvg's."""
    flix, shared = outcome.flix, outcome.shared
    chosen = best(flix)
    ours = flix[chosen]
    fedavg, control = (shared[best(shared, kind)] for kind in (runs.FEDAVG, runs.LOCAL))
    rows = {
        "FLIX": ours,
        "FedAvg": fedavg,
        "alpha 1, local steps": control,
        "FedAvg, fine-tuned": outcome.finetuned,
        "alone": outcome.alone,
    }
    if outcome.ran(runs.ONE):
        rows["FLIX, one gradient a round"] = flix[best(flix, runs.ONE)]
        rows["alpha 1, one gradient a round"] = shared[best(shared, runs.ONE)]
    assert task.federated_data.test is not None
    counts = task.federated_data.test.counts
    gaps = {name: compared(ours, row, counts) for name, row in rows.items()}
    unmixed = compared(ours, shared[best(shared)], counts)
    short = paper[1.0] - fedavg.test
    ours_in_words = (
        f"Test accuracy by examples: FLIX {ours.test:.4f} ({ours.words}), in brackets "
        "what it has more and the 95 % interval over clients and seeds: "
        + ", ".join(
            f"{name} {row.test:.4f} ({gaps[name]})"
            for name, row in rows.items()
            if name != "FLIX"
        )
        + f"; and {unmixed} against the best without mixing. All of them have "
        f"{task.plan.rounds} rounds and {len(ours.scores)} seeds."
    )
    lacking = (
        f"FedAvg is {short:.3f} short of the paper's accuracy: these runs are too "
        "short to settle the claim. "
        if short > SHORT
        else ""
    )
    return Finding(
        verdict([gaps["FedAvg"], unmixed], short),
        ours_in_words,
        _numbers(task, outcome, rows, {**gaps, "best without mixing": unmixed}),
        {"rounds": curves(rows), "alphas": by_alpha(outcome, paper)},
        f"{lacking}{_how(task, outcome)} {why}",
        _table(outcome, rows, gaps),
        criterion=CRITERION,
    )


def headline(numbers: Numbers) -> str:
    """FLIX less FedAvg."""
    gap = lead(numbers["flix_minus"]["FedAvg"]["mean"], "FedAvg")
    return f"FLIX is {gap} in test accuracy"


def _how(task: Task, outcome: Outcome) -> str:
    """What was tried, how long, and what errors are of."""
    plan, tried = task.plan, outcome.trial
    mixing = sum(one.alpha < 1 for one in tried)
    one = outcome.ran(runs.ONE)
    solvers = ", half of either side by one gradient a round" if one else ""
    power = f", and over alpha^{plan.power} by one gradient" if one else ""
    return (
        f"{mixing} settings of FLIX and {len(tried) - mixing} without mixing were "
        f"tried for {plan.trial} rounds with all {plan.seeds} seeds{solvers}; "
        f"{len(outcome.flix)} of FLIX (each alpha at its best) and "
        f"{len(outcome.shared)} without mixing were run for all {plan.rounds} rounds, "
        "and the last choice is among these. All choices are on validation rows, over "
        f"all seeds. Fine-tuning and training alone choose among "
        f"{outcome.finetuned.tried} and {outcome.alone.tried} settings (rate, steps). "
        "FLIX's rates are those tried over alpha^2 by local steps, as a step of the "
        f"mixture is that much shorter{power}. "
        f"x_i are trained once, for {plan.own.steps} steps at {plan.own.rates[0]:g} "
        "(few), or until training alone is best on validation rows (many: "
        f"{outcome.alone.words}); `alone` has that one seed. An interval adds the "
        "variance over clients to that over seeds (Student's)."
    )


def _table(
    outcome: Outcome, rows: dict[str, Row], gaps: dict[str, Gap]
) -> list[list[str]]:
    """The rows, and then all settings that were run to the end."""
    head = ["", "setting", "of", "seeds", "test accuracy", "FLIX less it"]

    def line(name: str, row: Row, gap: str) -> list[str]:
        seeds, accuracy = str(len(row.scores)), f"{row.test:.4f}"
        return [name, row.words, str(row.tried), seeds, accuracy, gap]

    return [
        head,
        *(line(name, row, str(gaps[name])) for name, row in rows.items()),
        *(
            line("also to the end", row, "")
            for row in (*outcome.flix.values(), *outcome.shared.values())
            if all(row is not one for one in rows.values())
        ),
    ]


def _numbers(task: Task, outcome: Outcome, rows, gaps) -> dict[str, Any]:
    finished = {**outcome.flix, **outcome.shared}
    return {
        "plan": {**task.plan._asdict(), "clients": task.federated_data.clients},
        "rows": {name: row.numbers() for name, row in rows.items()},
        "to_the_end": {row.words: row.numbers() for row in finished.values()},
        "flix_minus": {name: gap._asdict() for name, gap in gaps.items()},
        "trial[solver, own, alpha, rate, validation]": [
            [*setting, value] for setting, value in outcome.trial.items()
        ],
    }


LEVELS = {"FedAvg, fine-tuned": "--", "alone": ":"}
SHADE = "0.35"


def curves(rows: dict[str, Any]) -> Any:
    """Test accuracy over the rounds; what has none of its own is a line across."""
    with panels(1, 1, width=5.5, height=3.4) as (figure, axes):
        ax = axes[0, 0]
        for name, row in rows.items():
            if name in LEVELS:
                style = {"color": SHADE, "linestyle": LEVELS[name]}
                ax.axhline(row.test, label=name, **style)
            else:
                tests = [score.test for score in row.scores]
                banded(ax, row.scores[0].rounds, tests, label=name)
        ax.set(xlabel="communication rounds", ylabel="test accuracy")
        legend_above(figure, ax, most=2)
    return figure


def by_alpha(outcome: Any, paper: dict[float, float]) -> Any:
    """Accuracy for each alpha: tried on validation rows, at the end, the paper's."""
    solvers = {setting.solver for setting in outcome.flix}
    places = [*ALPHAS, 1.0]
    with panels(1, 3, width=3.2, height=3.4) as (figure, (axes,)):
        tried, ended, theirs = axes
        for number, solver in enumerate(sorted(solvers)):
            mine = {
                alpha: [
                    value
                    for one, value in outcome.trial.items()
                    if one.solver == solver and one.alpha == alpha
                ]
                for alpha in places
            }
            style = {"color": f"C{number}", "marker": "o", "markersize": 4}
            best = [max(values) for values in mine.values()]
            tried.plot(places, best, label=solver, **style)
            ran = [*outcome.flix.items(), *outcome.shared.items()]
            # Of several with one alpha the last stays: the best on validation rows.
            rows = {
                setting.alpha: row
                for setting, row in sorted(ran, key=lambda one: one[1].validation)
                if setting.solver == solver
            }
            across = sorted(rows)
            tests = np.array(
                [[score.test[-1] for score in rows[alpha].scores] for alpha in across]
            )
            banded(ended, across, tests.T, label=solver, **style)
        theirs.plot(ALPHAS, [paper[alpha] for alpha in ALPHAS], "ko-", markersize=4)
        theirs.axhline(paper[1.0], color=SHADE)
        tried.set(title="validation, trial", ylabel="accuracy")
        ended.set(title="test, to the end")
        theirs.set(title="the paper's Table 1")
        for ax in axes:
            ax.set(xlabel="alpha, the weight of the shared model", xticks=places)
        legend_above(figure, tried, most=3)
    return figure
