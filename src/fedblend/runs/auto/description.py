# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Description of a table: its clients, its target, and how much clients differ.

*Labels* of a client differ from those of all clients by the total variation distance of
their frequencies. *Inputs*, and targets that are numbers, differ by the share of their
variance that lies between the means of clients. Both are above zero by chance alone, so
the first is shown next to its value for rows that are dealt to clients at random, and
that value is subtracted from the second.
"""

from typing import Any

import numpy as np

from fedblend.config.build import Built
from fedblend.data.dataset import NUMBERS, DataError, Dataset, generator
from fedblend.data.federated import FederatedData
from fedblend.data.readers.tables import check_names
from fedblend.data.readers.targets import log_shift_of, look_like_counts
from fedblend.runs.auto.candidates import Request
from fedblend.runs.auto.linear import read_rows, row_order
from fedblend.runs.auto.looks import look
from fedblend.runs.auto.verdict import JUDGED
from fedblend.stats.survival import read_targets

SHUFFLES = 10
NAMED = 3
"""Clients or columns that a line names."""
LARGE, SMALL = 0.15, 0.03
"""Shares of variance, or distances beyond chance: what is called much, and little."""
FEWEST_COUNTS = 7
"""Different whole numbers from which they may be counts, and not classes."""
ROWS_OF_A_CLASS = 5
"""Half of the classes need so many rows, so that each part of a split has one."""
ONE_ROW = 0.5
"""Share of the target's variance from which a row is named."""


def look_at(request: Request, *datasets: Dataset) -> tuple[Request, list[str]]:
    """The request with what was done to columns, and what was found, in lines.

    Args:
        request: ``keep`` and ``inputs`` name columns that stay as they are.
        datasets: the table, with each of its targets.
    """
    schema = datasets[0].schema
    if schema is None:
        return request, []
    keep = (*request.keep, *request.inputs)
    of_table = {one.name: one for one in schema.columns}
    check_names(keep, [*of_table], "input", f"{request.table}: keep")
    gone = [name for name in keep if of_table[name].encoding == "drop"]
    found = dict.fromkeys(one for each in datasets for one in look(each, keep))
    choices = dict.fromkeys(gone, "standardize")
    choices |= {one.column: one.choice for one in found if one.choice}
    return request._replace(preprocess=choices), [one.line for one in found]


def all_targets(data: FederatedData) -> np.ndarray:
    """Targets of the rows of all splits together."""
    splits = data.splits.values()
    return np.concatenate(
        [np.asarray(split.examples[1])[row_order(split)] for split in splits]
    )


def check(data: FederatedData, kind: str, client: str, target: str) -> None:
    """Refuse a table on which methods cannot be compared."""
    if data.clients < 2:
        raise DataError(
            f"{client}: all rows belong to one client, {data.name(0)!r}; a comparison "
            "needs 2 clients or more"
        )
    tested, validated = data.splits["test"], data.splits["validation"]
    if not tested.total or not validated.total:
        raise DataError(
            f"{client}: none of the {data.clients} clients has 4 rows, which it needs "
            "to train, validate and test"
        )
    targets = all_targets(data)
    if kind in NUMBERS and not np.ptp(targets):
        raise DataError(f"{target}: is the same in all rows; there is nothing to learn")
    if kind == "classes":
        counts = np.unique(targets, return_counts=True)[1]
        if np.median(counts) < ROWS_OF_A_CLASS:
            raise DataError(
                f"{target}: {len(counts)} classes in {len(targets)} rows, most of them "
                f"with fewer than {ROWS_OF_A_CLASS}; group its values into fewer "
                "classes, or predict another column"
            )


def are_counts(built: Built, request: Request) -> bool:
    """Whether the target is taken as counts though nobody asked for a kind."""
    task = built.task
    if request.kind is not None or request.scale is not None:
        return False
    numbers = task.kind == "regression" and task.outputs == 1
    whole = all(label.isdecimal() for label in task.labels)
    if not numbers and (len(task.labels) < FEWEST_COUNTS or not whole):
        return False
    targets = all_targets(built.federated_data)
    return look_like_counts(
        targets if numbers else np.array(task.labels, float)[targets]
    )


def log_shift(built: Built, request: Request) -> float | None:
    """What is added to targets before their logarithm; None if they stay as they are.

    Raises:
        DataError: a logarithm is asked for, of a target that has none.
    """
    numbers = built.task.kind == "regression" and built.task.outputs == 1
    if request.scale == "log" and not numbers:
        raise DataError(
            f"--scale log: {request.target} is no single number, but {built.task.kind}"
        )
    if not numbers or request.scale == "linear":
        return None
    targets = all_targets(built.federated_data)
    if request.scale == "log":
        return 0.0 if targets.min() > 0 else 1.0
    return log_shift_of(targets)


def count_events(data: FederatedData) -> np.ndarray:
    """The events of every client, of targets that are times."""
    _, targets, owner = read_rows(data.splits.values())
    return np.bincount(owner, read_targets(targets)[1], data.clients).astype(int)


def target_warnings(built: Built, target: str) -> list[str]:
    """Warnings of clients without events, and of a row with most of the variance."""
    if built.task.kind == "survival":
        data = built.federated_data
        none = [data.name(int(one)) for one in np.flatnonzero(count_events(data) == 0)]
        return [f"all rows of {one!r} are censored: they tell little" for one in none]
    if built.task.kind != "regression":
        return []
    flat = all_targets(built.federated_data).astype(np.float64).reshape(-1)
    away = (flat - flat.mean()) ** 2
    share = away.max() / away.sum()
    if share < ONE_ROW:
        return []
    return [
        f"{target}: one of {len(flat)} rows has {share:.0%} of its variance, so that "
        "squared errors tell little about the others; check its value, "
        f"{flat[away.argmax()]:g}"
    ]


def describe(built: Built) -> dict[str, Any]:
    """The description as plain values."""
    data, task = built.federated_data, built.task
    inputs, targets, owner = read_rows(data.splits.values())
    sizes = np.bincount(owner, minlength=data.clients)
    tested = data.splits["test"].counts
    small = np.flatnonzero(tested < JUDGED)
    seen: dict[str, Any] = {
        "clients": data.clients,
        "rows": len(owner),
        "rows_of_a_client": [int(f(sizes)) for f in (np.min, np.median, np.max)],
        "too_small_to_judge": [data.name(int(client)) for client in small],
        "inputs": inputs.shape[1],
        "kind": task.kind,
    }
    if task.kind in ("classes", "binary"):
        seen |= _classes(targets, owner, task.labels)
    elif task.kind == "survival":
        events = count_events(data)
        seen["events"] = [int(f(events)) for f in (np.sum, np.min, np.max)]
    else:
        flat = targets.reshape(len(targets), -1)
        seen["target_between_clients"] = float(variance_between(flat, owner).mean())
        seen["log_shift"] = task.log_shift
    shares = variance_between(inputs, owner)
    names = _features(built, inputs.shape[1])
    order = np.argsort(-shares)[:NAMED]
    seen["inputs_between_clients"] = float(shares.mean())
    seen["most_different_inputs"] = {names[i]: float(shares[i]) for i in order}
    seen["columns"] = built.preprocessing[0].describe() if built.preprocessing else []
    return seen


def _classes(
    targets: np.ndarray, owner: np.ndarray, labels: tuple[str, ...]
) -> dict[str, Any]:
    classes = max(len(labels), int(targets.max()) + 1)
    names = labels or tuple(map(str, range(classes)))
    counts = _counts(targets, owner, classes)
    pooled = counts.sum(axis=0) / counts.sum()
    draw = generator(0, "label shift by chance")
    shuffled = [
        _distance(_counts(targets, draw.permutation(owner), classes))
        for _ in range(SHUFFLES)
    ]
    rarest = int(pooled.argmin())
    shares = counts[:, rarest] / np.maximum(counts.sum(axis=1), 1)
    return {
        "classes": {
            name: float(share) for name, share in zip(names, pooled, strict=True)
        },
        "rarest": names[rarest],
        "rarest_by_client": [float(f(shares)) for f in (np.min, np.median, np.max)],
        "label_distance": _distance(counts),
        "label_distance_by_chance": float(np.mean(shuffled)),
    }


def _counts(targets: np.ndarray, owner: np.ndarray, classes: int) -> np.ndarray:
    clients = int(owner.max()) + 1
    flat = np.bincount(owner * classes + targets, minlength=clients * classes)
    return flat.reshape(clients, classes)


def _distance(counts: np.ndarray) -> float:
    """The mean over clients of the total variation distance to all rows."""
    pooled = counts.sum(axis=0) / counts.sum()
    own = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return float((np.abs(own - pooled).sum(axis=1) / 2).mean())


def variance_between(values: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """The share of each column's variance that lies between clients, less chance.

    >>> values = np.array([[0.0], [0.1], [1.0], [1.1]])
    >>> variance_between(values, np.array([0, 0, 1, 1])).round(2)
    array([0.99])
    """
    counts = np.bincount(owner)
    counts, owner = counts[counts > 0], np.unique(owner, return_inverse=True)[1]
    clients, rows = len(counts), len(values)
    if rows <= clients:
        return np.zeros(values.shape[1])

    def share(column: np.ndarray) -> float:
        away = column - column.mean()
        total = away @ away
        outside = counts @ (np.bincount(owner, away) / counts) ** 2
        within = (total - outside) / (rows - clients)
        return max((outside - (clients - 1) * within) / total, 0.0) if total else 0.0

    return np.array([share(column.astype(np.float64)) for column in values.T])


def _features(built: Built, width: int) -> tuple[str, ...]:
    fitted = built.preprocessing
    names = fitted[0].features if fitted else built.task.columns
    return names if len(names) == width else tuple(f"input {i}" for i in range(width))


def lines(seen: dict[str, Any]) -> list[str]:
    """The description in sentences."""
    few, usual, many = seen["rows_of_a_client"]
    said = [
        f"{seen['rows']} rows of {seen['clients']} clients, {few} to {many} each "
        f"(median {usual})."
    ]
    if seen["columns"]:
        said += [
            f"  {one['column']}: {one['seen']}; {one['done']}"
            for one in seen["columns"]
        ]
    if "classes" in seen:
        said.append(_label_line(seen))
    elif "events" in seen:
        total, low, high = seen["events"]
        said.append(
            f"{total} events, {low} to {high} of a client; other rows are censored."
        )
    else:
        share, shift = seen["target_between_clients"], seen["log_shift"]
        what = "a number"
        if seen["kind"] == "counts":
            what = (
                "a count, so models predict the logarithm of its mean, errors are "
                "Poisson deviances, and predictions are mean counts (--kind regression "
                "or classes: otherwise)"
            )
        if shift is not None:
            inside = f"it + {shift:g}" if shift else "it"
            what = (
                f"a skewed number, so models predict log({inside}), errors are those "
                "of the logarithm, and predictions are in the unit of the table "
                "(--scale linear: without the logarithm)"
            )
        said.append(
            f"The target is {what}; {share:.0%} of its variance lies between clients "
            f"({_much(share)})."
        )
    share = seen["inputs_between_clients"]
    most = ", ".join(
        f"{name} {of:.0%}" for name, of in seen["most_different_inputs"].items()
    )
    said.append(
        f"{seen['inputs']} inputs; {share:.0%} of their variance lies between clients "
        f"({_much(share)}), most of {most}."
    )
    small = seen["too_small_to_judge"]
    if small:
        names = ", ".join(small[:NAMED]) + (", ..." if len(small) > NAMED else "")
        who = "1 client" if len(small) == 1 else f"{len(small)} clients"
        said.append(
            f"Fewer than {JUDGED} test rows have {who} ({names}): enough to train with "
            "the others and to get a model, too few to be judged by itself."
        )
    return said


def _label_line(seen: dict[str, Any]) -> str:
    shares = sorted(seen["classes"].items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {share:.1%}" for name, share in shares[:5])
    more = f" and {len(shares) - 5} more" if len(shares) > 5 else ""
    low, usual, high = seen["rarest_by_client"]
    distance, chance = seen["label_distance"], seen["label_distance_by_chance"]
    return (
        f"{len(shares)} classes: {shown}{more}. By client, {seen['rarest']!r} is "
        f"{low:.1%} to {high:.1%} (median {usual:.1%}); labels differ by "
        f"{distance:.3f} between clients (total variation; {chance:.3f} by chance: "
        f"{_much(distance - chance)})."
    )


def _much(share: float) -> str:
    return "much" if share > LARGE else "little" if share < SMALL else "some"
