# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What ``fedblend auto`` tells besides the verdict, as tables: who, why, what, worth.

*Calibration.* Every row is predicted by models of the linear method that clients are to
use, fitted to four fifths of all rows that are not this one's fifth. What was observed
and what was expected are means over a client's rows. The interval is that of the
observed mean: Wilson's of a share, Student's of a number around its prediction.

*Effects* are the coefficients of that method on all rows; see ``linear.coefficients``.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from scipy import stats
from scipy.special import expit, softmax

from fedblend.data.dataset import Task
from fedblend.data.preprocess.columns import SCALED
from fedblend.data.preprocess.preprocessing import Preprocessing
from fedblend.runs.auto.candidates import ALONE, BY_NAME
from fedblend.runs.auto.linear import PooledRows, coefficients
from fedblend.runs.auto.tuning import Table, models
from fedblend.runs.auto.verdict import Findings, MethodScores, difference, interval
from fedblend.runs.auto.why import FEWEST, explain_gaps, fitted_rows
from fedblend.runs.auto.worth import learning_curve, worth_in_rows
from fedblend.stats.survival import read_targets

FOLDS = 5
MOST_EXPLAINED = 200
"""Clients of which it is told why they differ: those with the most rows."""
LEVEL = "level"
EFFECTS = {
    "binary": "odds ratio",
    "regression": "change of the target",
    "survival": "hazard ratio",
}
"""What a coefficient is shown as, by the kind of target."""
SHARES = ("binary", "classes", "survival")
"""Targets of which a mean is the share of a class, or of events."""
COVERED = 0.95
Row = dict[str, Any]


def insight(
    table: Table,
    scores: Mapping[str, MethodScores],
    found: Findings,
    settings: Mapping[str, Mapping[str, float]],
    left: Callable[[], float],
) -> tuple[dict[str, list[Row]], Row]:
    """Tables by name, and facts for ``auto.json``: what there is time for.

    Args:
        table: with the splits that are tested.
        scores: of the methods that are trained.
        found: what is decided.
        settings: of the methods.
        left: the seconds that are left; raises if the user asked to stop.
    """
    untold: list[str] = []

    def going(what: str = "") -> bool:
        there = left() > 0
        untold.extend([what] * (not there and what not in untold))
        return there

    tested, task = table.tested, table.task
    method, candidate = found.choice.method, found.choice.candidate
    rows, data = fitted_rows(tested), tested.federated_data
    names = [data.name(client) for client in range(data.clients)]
    fitted = tested.preprocessing[0] if tested.preprocessing else None
    place = outcome(task, rows)
    clients = [
        {"client": name, **of, **missing, **gain}
        for name, of, missing, gain in zip(
            names,
            _targets(task, rows, place),
            _missing(rows, fitted),
            _gains(scores, found, names),
            strict=True,
        )
    ]
    tables = {"clients": clients}
    setting, linear = settings[method], BY_NAME[method].model == "linear"
    by_row = task.kind != "survival"  # what single rows are expected to be
    if (
        linear
        and task.outputs == 1
        and {*setting} <= {"level", "slopes", "ridge"}
        and going("effects")
    ):
        tables["effects"] = effects(task, method, rows, setting, names, fitted)
    few = max(FEWEST, int(np.sort(rows.counts)[-MOST_EXPLAINED:][0]))
    if by_row:
        gaps = explain_gaps(
            task.kind,
            rows,
            task.outputs,
            names,
            fitted,
            fewest=few,
            going=lambda: going("why clients differ (of some or all)"),
        )
        tables["why"] = [
            {
                "client": gap.client,
                "rows": gap.rows,
                "loss": gap.loss,
                **gap.parts,
                "clear": " ".join(gap.clear),
                "why": str(gap),
            }
            for gap in gaps
        ]
    curve = learning_curve(
        task, ALONE, table.to_test, settings[ALONE], lambda: left() > 0
    )
    facts: Row = {"outcome": None, "effect": effect_name(task), "untold": untold}
    if curve is not None:
        worth = worth_in_rows(curve, scores[candidate].test)
        facts["worth"] = {**worth._asdict(), "said": str(worth)}
    else:
        untold.append("worth in rows")
    if linear and by_row:
        told = calibration(
            task, method, rows, setting, place, lambda: going("calibration")
        )
        for line, more in zip(clients, told, strict=False):
            line |= more
    if task.kind in SHARES:
        facts["outcome"] = task.labels[place] if task.labels else str(place)
    return {name: of for name, of in tables.items() if of}, facts


def outcome(task: Task, rows: PooledRows) -> int:
    """The class whose share is told: the second of two, or else the rarest."""
    if task.kind != "classes" or task.outputs <= 2:
        return 1
    return int(np.bincount(rows.targets, minlength=task.outputs).argmin())


def _observed(task: Task, rows: PooledRows, place: int) -> np.ndarray:
    """Of each row whether it has the outcome, or its number."""
    if task.kind == "classes":
        return (rows.targets == place).astype(float)
    if task.kind == "binary":
        return (rows.targets > 0).astype(float)
    if task.kind == "survival":
        return read_targets(rows.targets)[1].astype(float)
    return rows.targets.reshape(len(rows.targets), -1)[:, 0]


def _restore(task: Task, value: float) -> float:
    """A mean in the unit of the table."""
    if task.kind == "counts":
        return value * task.loss_unit
    if task.kind != "regression":
        return value
    whole = np.array([task.center + task.scale * value])
    return float(task.restore_unit(whole)[0])


def _targets(task: Task, rows: PooledRows, place: int) -> list[Row]:
    values = _observed(task, rows, place)
    return [
        {
            "rows": at.stop - at.start,
            "target": _restore(task, float(values[at].mean()))
            if at.stop > at.start
            else None,
        }
        for at in rows.clients
    ]


def _missing(rows: PooledRows, fitted: Preprocessing | None) -> list[Row]:
    """What part of a client's values is missing, and the columns that are most."""
    columns, first = {}, 0
    for column in fitted.schema.kept if fitted else ():
        first += len(column.features)
        if column.missing:
            columns[column.name] = first  # after the ones, its last input
    kept, found = len(fitted.schema.kept) if fitted else 1, []
    for at in rows.clients:
        parts = {name: rows.inputs[at, of].mean() for name, of in columns.items()}
        most = sorted(parts, key=lambda name: -parts[name])
        said = [f"{name} {parts[name]:.0%}" for name in most if parts[name] > 0.5]
        share = sum(parts.values()) / kept
        found.append({"missing": float(share), "missing_most": ", ".join(said)})
    return found


def _gains(
    scores: Mapping[str, MethodScores], found: Findings, names: list[str]
) -> list[Row]:
    """What each client gains by the candidate, as the verdict judges it."""
    alone, method = (
        scores[name].test for name in (found.choice.alone, found.choice.candidate)
    )
    gaps, lines = difference(alone, method), []
    for client, name in enumerate(names):
        own = gaps[:, [client]]
        known = bool(np.isfinite(own).all())
        mean, low, high = interval(own) if known else (None,) * 3
        word = "gains" if name in found.who.gain else "unclear"
        lines.append(
            {
                "alone": float(alone[: len(gaps), client].mean()),
                "method": float(method[: len(gaps), client].mean()),
                "gain": mean,
                "low": low,
                "high": high,
                "verdict": "better alone" if name in found.who.harmed else word,
            }
        )
    return lines


def cross_predict(
    task: Task,
    method: str,
    rows: PooledRows,
    setting: Mapping[str, float],
    going: Callable[[], bool] = lambda: True,
) -> np.ndarray | None:
    """The scores of every row by models of the other folds; None without time."""
    found = np.empty((len(rows.targets), task.outputs))
    folds = np.arange(len(found)) % FOLDS
    for fold in range(FOLDS):
        if not going():
            return None
        train, held = (rows.take(part) for part in (folds != fold, folds == fold))
        own = models(task, method, train, setting)
        found[folds == fold] = held.scores(own)
    return found


def calibration(
    task: Task,
    method: str,
    rows: PooledRows,
    setting: Mapping[str, float],
    place: int,
    going: Callable[[], bool] = lambda: True,
) -> list[Row]:
    """What was expected of each client, and the interval of what was observed.

    Nothing if ``going`` says that there is no time for it.
    """
    scores = cross_predict(task, method, rows, setting, going)
    if scores is None:
        return []
    values = _observed(task, rows, place)
    expected = scores[:, 0]
    if task.kind == "binary":
        expected = expit(scores[:, 0])
    elif task.kind == "classes":
        expected = softmax(scores, axis=1)[:, place]
    elif task.kind == "counts":
        expected = np.exp(scores[:, 0])
    lines = []
    for at in rows.clients:
        own, mean = values[at], expected[at]
        ends: tuple[float, float] = (np.nan, np.nan)
        if task.kind in SHARES and len(own):
            ends = stats.binomtest(int(own.sum()), len(own)).proportion_ci(
                COVERED, method="wilson"
            )
        elif len(own) > 1:
            error = stats.sem(own - mean)
            ends = stats.t.interval(COVERED, len(own) - 1, own.mean(), error)
        keys = ("expected", "observed_low", "observed_high")
        line = dict.fromkeys(keys)
        if np.isfinite(ends).all():
            of = (float(mean.mean()), *map(float, ends))
            line = dict(zip(keys, (_restore(task, one) for one in of), strict=True))
        lines.append(line)
    return lines


def effects(
    task: Task,
    method: str,
    rows: PooledRows,
    setting: Mapping[str, float],
    names: list[str],
    fitted: Preprocessing | None,
) -> list[Row]:
    """The coefficients of a linear method: those of all, then each client's own."""
    share = method != ALONE
    found = coefficients(task.kind, rows, 1, **setting, share=share)
    far = stats.norm.ppf((1 + COVERED) / 2)
    if task.kind == "regression":
        far = stats.t.ppf((1 + COVERED) / 2, found.freedom)
    inputs = [LEVEL, *_inputs(fitted, len(found.shared) - 1)]
    parts = [("", found.shared, found.shared_error)] if share else []
    parts += list(zip(names, found.own, found.own_error, strict=True))
    # The likelihood of counts is so many times what is minimized.
    far /= np.sqrt(task.loss_unit) if task.kind == "counts" else 1.0
    return [
        {"client": client, "input": name}
        | {
            key: _effect(task, value + side * far * error)
            for key, side in (("effect", 0), ("low", -1), ("high", 1))
        }
        for client, values, errors in parts
        for name, value, error in zip(inputs, values, errors, strict=True)
        if error > 0 and (name != LEVEL or task.kind != "survival")
    ]


def _effect(task: Task, value: float) -> float:
    if task.kind == "regression" and task.log_shift is None:
        return float(task.scale * value)
    with np.errstate(over="ignore"):
        return float(np.exp(task.scale * value))


def effect_name(task: Task) -> str:
    """What an effect is, in words."""
    if task.kind == "regression" and task.log_shift is not None:
        return "factor of the target"
    return EFFECTS.get(task.kind, "rate ratio")


def _inputs(fitted: Preprocessing | None, width: int) -> list[str]:
    """Names of inputs, with the step of those that are standardized."""
    found: list[str] = []
    for column, of in zip(
        fitted.schema.kept if fitted else (),
        fitted.fitted if fitted else (),
        strict=True,
    ):
        first, *rest = column.features
        step = f"{first}, per {of.deviation:.3g}"
        found += [step if column.encoding in SCALED else first, *rest]
    return found if len(found) == width else [f"input {i}" for i in range(width)]
