# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a table looks like: its clients, its target, and how much clients differ.

*Labels* of a client differ from those of all clients by the total variation distance of
their frequencies. *Inputs*, and targets that are numbers, differ by the share of their
variance that lies between the means of clients. Both are above zero by chance alone, so
what the same rows would give if they were dealt to the clients at random stands beside
the first, and is subtracted from the second.
"""

from typing import Any, NamedTuple

import numpy as np

from fedblend.config.build import Built
from fedblend.data.dataset import DataError, generator
from fedblend.data.federated import FederatedData

JUDGED = 10
"""Test rows of a client from which it is judged by itself."""
SHUFFLES = 10
NAMED = 3
"""Clients or columns that a line names."""
LARGE, SMALL = 0.15, 0.03
"""Shares of variance, or distances beyond chance: what is called much, and little."""


class Rows(NamedTuple):
    """All rows of all clients, whatever they are held out for."""

    inputs: np.ndarray
    targets: np.ndarray
    owner: np.ndarray


def rows_of(data: FederatedData) -> Rows:
    """The rows of all splits together."""
    parts = []
    for split in data.splits.values():
        order = np.concatenate(
            [
                np.arange(start, start + count)
                for start, count in zip(split.starts, split.counts, strict=True)
            ]
        )
        inputs, targets = (np.asarray(leaf)[order] for leaf in split.examples)
        owner = np.repeat(np.arange(data.clients), split.counts)
        parts.append((inputs.reshape(len(inputs), -1), targets, owner))
    return Rows(*(np.concatenate(of) for of in zip(*parts, strict=True)))


def check(data: FederatedData, kind: str, client: str, target: str) -> None:
    """Refuse a table that nothing can be compared on."""
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
    if kind == "regression" and not np.ptp(rows_of(data).targets):
        raise DataError(f"{target}: is the same in all rows; there is nothing to learn")


def describe(built: Built) -> dict[str, Any]:
    """What is seen, as plain values."""
    data, task = built.federated_data, built.task
    rows = rows_of(data)
    sizes = np.bincount(rows.owner, minlength=data.clients)
    tested = data.splits["test"].counts
    small = np.flatnonzero(tested < JUDGED)
    seen: dict[str, Any] = {
        "clients": data.clients,
        "rows": len(rows.owner),
        "rows_of_a_client": [int(f(sizes)) for f in (np.min, np.median, np.max)],
        "too_small_to_judge": [data.name(int(client)) for client in small],
        "inputs": rows.inputs.shape[1],
        "kind": task.kind,
    }
    if task.kind in ("classes", "binary"):
        seen |= _classes(rows, data.clients, task.labels)
    else:
        targets = rows.targets.reshape(len(rows.targets), -1)
        seen["target_between_clients"] = float(between(targets, rows.owner).mean())
    shares = between(rows.inputs, rows.owner)
    names = _features(built, rows.inputs.shape[1])
    order = np.argsort(-shares)[:NAMED]
    seen["inputs_between_clients"] = float(shares.mean())
    seen["most_different_inputs"] = {names[i]: float(shares[i]) for i in order}
    seen["columns"] = _columns(built)
    return seen


def _classes(rows: Rows, clients: int, labels: tuple[str, ...]) -> dict[str, Any]:
    classes = max(len(labels), int(rows.targets.max()) + 1)
    names = labels or tuple(map(str, range(classes)))
    counts = _counts(rows.targets, rows.owner, clients, classes)
    pooled = counts.sum(axis=0) / counts.sum()
    draw = generator(0, "label shift by chance")
    shuffled = [
        _distance(_counts(rows.targets, draw.permutation(rows.owner), clients, classes))
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


def _counts(
    targets: np.ndarray, owner: np.ndarray, clients: int, classes: int
) -> np.ndarray:
    flat = np.bincount(owner * classes + targets, minlength=clients * classes)
    return flat.reshape(clients, classes)


def _distance(counts: np.ndarray) -> float:
    """The mean over clients of the total variation distance to all rows."""
    pooled = counts.sum(axis=0) / counts.sum()
    own = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return float((np.abs(own - pooled).sum(axis=1) / 2).mean())


def between(values: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """The share of each column's variance that lies between clients, less chance.

    >>> values = np.array([[0.0], [0.1], [1.0], [1.1]])
    >>> between(values, np.array([0, 0, 1, 1])).round(2)
    array([0.99])
    """
    values = np.asarray(values, np.float64)
    counts = np.bincount(owner)
    counts, owner = counts[counts > 0], np.unique(owner, return_inverse=True)[1]
    clients, rows = len(counts), len(values)
    if rows <= clients:
        return np.zeros(values.shape[1])
    means = np.stack([np.bincount(owner, column) / counts for column in values.T], 1)
    total = ((values - values.mean(axis=0)) ** 2).sum(axis=0)
    outside = (counts[:, None] * (means - values.mean(axis=0)) ** 2).sum(axis=0)
    within = (total - outside) / (rows - clients)
    share = (outside - (clients - 1) * within) / np.where(total > 0, total, 1)
    return np.where(total > 0, np.maximum(share, 0.0), 0.0)


def _features(built: Built, width: int) -> tuple[str, ...]:
    fitted = getattr(built, "preprocessing", ())
    names = fitted[0].features if fitted else built.task.columns
    return names if len(names) == width else tuple(f"input {i}" for i in range(width))


def _columns(built: Built) -> list[dict[str, Any]]:
    fitted = getattr(built, "preprocessing", ())
    return fitted[0].describe() if fitted else []


def lines(seen: dict[str, Any]) -> list[str]:
    """What is seen, in sentences."""
    few, usual, many = seen["rows_of_a_client"]
    said = [
        f"{seen['rows']} rows of {seen['clients']} clients, {few} to {many} each "
        f"(median {usual})."
    ]
    if seen["columns"]:
        said += [f"  {one['column']}: {one['done']}" for one in seen["columns"]]
    if "classes" in seen:
        said.append(_label_line(seen))
    else:
        share = seen["target_between_clients"]
        said.append(
            f"The target is a number; {share:.0%} of its variance lies between "
            f"clients ({_much(share)})."
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
