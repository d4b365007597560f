# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Looks at a table before anything is trained, which protect from false scores.

Each look is a function from a table to findings: a line that names a column, what was
seen, with its number, and what was done. What is certain is done: an identifier or a
copy of the target is dropped, a number that means missing is read as missing. What is
uncertain is only said, since a column that is wrongly dropped costs more than one that
is wrongly kept; ``--keep`` undoes any of it.

*Chance.* A pattern counts where chance alone would have broken it ``BROKEN`` times or
more: values that never differ within a client, or never repeat there, are compared with
the same values dealt to the rows at random.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import median_abs_deviation, spearmanr

from fedblend.data.dataset import Dataset, generator
from fedblend.data.preprocess.columns import MISSING, Column
from fedblend.data.readers.checks import leaks, list_some

DONE = {"": "left in, look at it", "drop": "dropped", "one_hot": "kept as categories"}
"""By the choice of ``data.preprocess``; others are numbers that mean missing."""
CLASSES = ("classes", "binary")
BROKEN = 20
"""Times that chance alone would break a pattern; with fewer, it may be chance."""
RARELY = 0.02
"""Part of these times that a pattern may be broken all the same."""
SAME_ORDER = 0.9999
"""Rank correlation from which a column is the target, rounded or transformed."""
TOGETHER, MOST_TOGETHER = 0.995, 5
"""R^2 from which so many columns, or fewer, make the target."""
MOST_ROWS = 10_000
"""Rows that are looked at where some do as well as all."""
MEASURED, FEW = 20, 8
"""Different values of a measurement, at least, and of a code, at most."""
CLEAR = 6.0
"""Akaike's criterion falls by this where numbers are codes."""
CODES = [0.0, -1.0, *(s * (10.0**d - 1) for s in (1, -1) for d in range(1, 7))]
"""Numbers that may mean a missing value: 0, -1, 9, 99, ..., and -9, -99, ..."""
SPIKE, GAP, FAR, AWAY = 5, 1.0, 4.0, 2.5
"""Rows that have such a number; its distance from the next one and from the median, in
robust deviations of the others; and that distance from which it is said only."""
ALIKE, SURE = 0.2, 5.0
"""Correlation of rows that follow each other in time, and in its deviations."""
_TIME = re.compile(r"(.*[ _.-])?(year|date|time|month|week|day|hour|wave|period)s?")
_ID = re.compile(r"(.*[ _.-])?(no|nr|num|number|code|key|mrn|ssn|fips|zip|\w*id)")


class ColumnFinding(NamedTuple):
    """What was seen in a column, and what was done."""

    column: str
    what: str
    choice: str = ""
    """Of ``data.preprocess``; empty where nothing was done."""

    @property
    def line(self) -> str:
        """One line in words."""
        done = DONE.get(self.choice, "read as missing")
        return f"{self.column}: {self.what}; {done}"


class ClientTable(NamedTuple):
    """A dataset as the looks see it."""

    dataset: Dataset
    columns: dict[str, Column]
    values: dict[str, np.ndarray]
    """As the schema encodes them, NaN where a value is missing."""
    owner: np.ndarray
    """The number of each row's client."""
    names: np.ndarray
    """Of the clients."""

    def present(self, *encodings: str) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Names of columns, their values that are not missing, the rows' clients."""
        for name, values in self.values.items():
            column = self.columns[name]
            if column.encoding in encodings:
                # Rare categories share a code, which names nothing.
                last = len(column.categories) if column.other else np.inf
                there = values < last
                yield name, values[there], self.owner[there]


def look(dataset: Dataset, keep: Sequence[str] = ()) -> list[ColumnFinding]:
    """What all looks find; ``keep`` names columns that stay as they are."""
    targets = dataset.rows[1]
    if dataset.schema is None or dataset.keys is None:
        return []
    if targets.ndim > 1 or np.ptp(targets) == 0:
        return []
    names, owner = np.unique(dataset.keys, return_inverse=True)
    columns = {one.name: one for one in dataset.schema.kept}
    values = dict(zip(columns, np.asarray(dataset.rows[0]).T, strict=True))
    table, found = ClientTable(dataset, columns, values, owner, names.astype(str)), []
    for one in LOOKS:
        for each in [*one(table)]:
            if each.column in keep:
                each = each._replace(choice="")
            if each.choice == "drop":
                del values[each.column]
            elif each.choice.startswith(MISSING):
                old, code = values[each.column], each.choice.removeprefix(MISSING)
                values[each.column] = np.where(old == float(code), np.nan, old)
            found.append(each)
    return found


def _is_whole(values: np.ndarray) -> bool:
    return bool((values == np.rint(values)).all())


def _count_pairs(first: np.ndarray, second: np.ndarray) -> int:
    """How many different pairs two columns have."""
    one, two = (np.unique(of, return_inverse=True)[1] for of in (first, second))
    return len(np.unique(one.astype(np.int64) * (two.max(initial=0) + 1) + two))


def _is_recoded(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether each value of one column goes with one value of the other."""
    pairs = _count_pairs(first, second)
    return pairs == len(np.unique(first)) == len(np.unique(second))


def copies(table: ClientTable) -> Iterator[ColumnFinding]:
    """Columns that alone tell the target: the same in other words, or nearly so."""
    targets = table.dataset.rows[1]
    for name, how in leaks(table.dataset).items():
        values = table.values[name]
        there = ~np.isnan(values)
        if table.dataset.kind not in CLASSES:
            order: Any = spearmanr(values[there], targets[there])[0]
            same = abs(order) > SAME_ORDER
        else:
            same = _is_recoded(values[there], targets[there])
            same |= _is_recoded(there, targets)
        if same:
            yield ColumnFinding(name, f"is the target in other words ({how})", "drop")
        else:
            yield ColumnFinding(name, f"alone tells the target ({how})")


def client_columns(table: ClientTable) -> Iterator[ColumnFinding]:
    """Columns that are the same in all rows of a client."""
    describing = []
    for name, own, owner in table.present("standardize", "flag", "one_hot"):
        first = np.zeros(len(table.names))
        first[owner] = own
        if (own != first[owner]).any():
            continue
        counts = np.unique(own, return_counts=True)[1]
        clients = len(np.unique(owner))
        if (len(own) - clients) * (1 - ((counts / len(own)) ** 2).sum()) < BROKEN:
            continue
        numbers = table.columns[name].encoding == "standardize"
        if len(counts) == clients and (not numbers or _names_things(name, own)):
            yield ColumnFinding(name, f"names the client, {clients} values", "drop")
        else:
            describing.append(name)
    if describing:
        what = "the same in all rows of a client, so no help to models of one client"
        yield ColumnFinding(", ".join(describing), what)


def _names_things(name: str, values: np.ndarray) -> bool:
    """Whether numbers are names: they run without a gap, or the column says so."""
    running = np.ptp(values) == len(np.unique(values)) - 1
    return _is_whole(values) and (running or _is_id(name))


def _is_id(name: str) -> bool:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return _ID.fullmatch(words) is not None


def identifiers(table: ClientTable) -> Iterator[ColumnFinding]:
    """Whole numbers that name rows, or groups of rows within a client."""
    draw = generator(0, "identifiers")
    for name, own, owner in table.present("standardize"):
        if not _is_whole(own) or _TIME.fullmatch(name.lower()):
            continue
        different = len(np.unique(own))
        if different <= MEASURED:
            continue
        clients, sure = len(np.unique(owner)), _is_id(name)
        pairs, dealt = (_count_pairs(owner, of) for of in (own, draw.permutation(own)))
        repeats, chance = len(own) - pairs, len(own) - dealt
        if different == len(own):
            changes = np.count_nonzero(np.diff(owner[np.argsort(own)]))
            apart = 0 < changes < clients <= len(own) - BROKEN
            what, sure = f"all {different} values differ", sure or apart
        elif chance >= BROKEN and repeats <= RARELY * chance:
            what = f"{repeats} values repeat within a client, by chance {chance} would"
            sure = not _alike(table, table.values[name])
        elif pairs == different > clients and dealt - different >= BROKEN:
            what = (
                f"each of {different} values is in one client only: a patient or the "
                f"like? --group {name} keeps its rows in one part of a split"
            )
            sure = _names_things(name, own)
        elif sure:
            what, sure = f"{different} codes, by its name", False
        else:
            continue
        yield ColumnFinding(name, what, "drop" if sure else "")


def split_names(table: ClientTable) -> Iterator[ColumnFinding]:
    """Columns that say which part of somebody's split a row is in."""
    for name in table.values:
        if {"train", "test"} <= {one.lower() for one in table.columns[name].categories}:
            yield ColumnFinding(name, "names the parts of a split", "drop")


def missing_numbers(table: ClientTable) -> Iterator[ColumnFinding]:
    """Numbers such as 0, -1 and 999, far from all others, that several rows have."""
    for name, own, owner in table.present("standardize"):
        different = np.unique(own)
        for code, following in (different[:2], different[:-3:-1]):
            rest = own[own != code]
            rows = len(own) - len(rest)
            if len(different) <= MEASURED or code not in CODES or rows < SPIKE:
                continue
            unit = 1.4826 * median_abs_deviation(rest)
            far = abs(code - np.median(rest))
            if 0 < GAP * unit <= abs(code - following) and far >= AWAY * unit:
                who = np.bincount(owner[own == code])
                what = (
                    f"{code:g} in {rows} of {len(own)} rows, {who.max()} of them of "
                    f"{table.names[who.argmax()]}; all others {rest.min():g} to "
                    f"{rest.max():g}"
                )
                sure = far >= FAR * unit
                yield ColumnFinding(name, what, f"{MISSING}{code:g}" if sure else "")


def _within(values: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Values less the mean of their client, in deviations; 0 where they are missing."""
    filled = np.nan_to_num(values - np.nanmean(values))
    means = np.bincount(owner, filled) / np.maximum(np.bincount(owner), 1)
    away = filled - means[owner]
    return away / max(away.std(), 1e-300)


def _target(table: ClientTable) -> np.ndarray:
    """The target less the mean of its client; of classes, the most frequent one."""
    targets = table.dataset.rows[1]
    if table.dataset.kind in CLASSES:
        targets = targets == np.bincount(targets).argmax()
    return _within(targets.astype(np.float64), table.owner)


def _residual(inputs: Sequence[np.ndarray], target: np.ndarray) -> np.ndarray:
    """What is left of a target by least squares."""
    matrix = np.stack(inputs, axis=1)
    square = matrix.T @ matrix + 1e-9 * len(matrix) * np.eye(len(inputs))
    return target - matrix @ np.linalg.solve(square, matrix.T @ target)


def codes(table: ClientTable) -> Iterator[ColumnFinding]:
    """Few whole numbers whose categories tell more of the target, by least squares."""
    step = max(len(table.owner) // MOST_ROWS, 1)
    owner, target = table.owner[::step], _target(table)[::step]
    few, base = {}, []
    for name in dict.fromkeys(one for one, *_ in table.present("standardize", "flag")):
        values = table.values[name][::step]
        base += [_within(of, owner) for of in (values, np.isnan(values) + 0.0)]
        different, counts = np.unique(values[~np.isnan(values)], return_counts=True)
        if (
            2 < len(different) <= FEW
            and _is_whole(different)
            and counts.min() >= BROKEN
        ):
            few[name] = [_within((values == of) + 0.0, owner) for of in different]
    free = len(target) - len(base) - len(table.names)
    without = np.linalg.norm(_residual(base, target)) if few else 1.0
    for name, inputs in few.items():
        left = np.linalg.norm(_residual(base + inputs, target))
        gain = 2 * free * np.log(without / left) - 2 * (len(inputs) - 2)
        if gain > CLEAR:
            what = f"{len(inputs)} whole numbers that tell more as categories"
            yield ColumnFinding(name, what, "one_hot")


def sums(table: ClientTable) -> Iterator[ColumnFinding]:
    """Columns that together make a target that is a number."""
    if table.dataset.kind in CLASSES:
        return
    step = max(len(table.owner) // MOST_ROWS, 1)
    target, owner = _target(table)[::step], table.owner[::step]
    inputs = {
        name: _within(table.values[name][::step], owner)
        for name, *_ in table.present("standardize")
    }
    chosen, rest, told = [], target, 0.0
    while told < SAME_ORDER and len(chosen) < min(MOST_TOGETHER, len(inputs)):
        telling = {name: abs(of @ rest) for name, of in inputs.items()}
        chosen.append(max(telling, key=lambda name: telling[name]))
        rest = _residual([inputs[name] for name in chosen], target)
        told = 1 - rest @ rest / (target @ target)
    if told > TOGETHER and len(chosen) > 1:
        for name in chosen:
            others = ", ".join(one for one in chosen if one != name)
            yield ColumnFinding(
                name, f"makes the target with {others} (R^2 {told:.4f})"
            )


def missing_patterns(table: ClientTable) -> Iterator[ColumnFinding]:
    """Columns that some clients never have, and others always."""
    sizes = np.bincount(table.owner)
    for name, values in table.values.items():
        absent = np.bincount(table.owner, np.isnan(values))
        share = absent.sum() / len(values)
        if 0 < share < 1:
            # Not by chance, in a client that is so large.
            never = (absent == sizes) & (share**sizes < np.exp(-BROKEN))
            always = (absent == 0) & ((1 - share) ** sizes < np.exp(-BROKEN))
            if never.any() and always.any():
                who, whom = (list_some([*table.names[of]]) for of in (never, always))
                yield ColumnFinding(
                    name, f"missing in all rows of {who}, in none of {whom}"
                )


def dates(table: ClientTable) -> Iterator[ColumnFinding]:
    """Dates in the future, and after the time of their row."""
    limits = {"in the future": np.datetime64("today", "D").astype(int) + 1}
    if table.dataset.time is not None:
        limits["after the time of their row"] = table.dataset.time
    for name, *_ in table.present("date"):
        for what, limit in limits.items():
            late = np.count_nonzero(table.values[name] > limit)
            if late:
                yield ColumnFinding(name, f"{late} dates are {what}")


def _alike(table: ClientTable, values: np.ndarray) -> float:
    """How alike neighbors in this order are in the target; 0 where it may be chance."""
    order = np.lexsort((values, table.owner))
    order = order[~np.isnan(values[order])]
    if not order.size:
        return 0.0
    target, owner = _target(table)[order], table.owner[order]
    same = owner[1:] == owner[:-1]
    pairs, size = max(same.sum(), 1), max((target**2).mean(), 1e-300)
    alike = float((target[1:] * target[:-1])[same].sum() / pairs / size)
    return alike if alike > max(ALIKE, SURE / pairs**0.5) else 0.0


def _order_of_rows(table: ClientTable) -> np.ndarray:
    """The numbers of rows, NaN of clients whose rows are sorted by the target."""
    order = np.argsort(table.owner, kind="stable")
    owner, change = table.owner[order][1:], np.diff(_target(table)[order])
    change[owner != table.owner[order][:-1]] = 0
    rises, falls = (np.bincount(owner, way) for way in (change > 0, change < 0))
    numbers = np.arange(len(order), dtype=np.float64)
    numbers[(np.minimum(rises, falls) == 0)[table.owner]] = np.nan
    return numbers


def series(table: ClientTable) -> Iterator[ColumnFinding]:
    """A column of time, or the order of rows, along which targets are alike."""
    if table.dataset.time is not None:
        return
    moments = {}
    for name, own, owner in table.present("date", "standardize"):
        many = _is_whole(own) and len(own) >= 2 * len(np.unique(own))
        once = many and len(own) == _count_pairs(owner, own)
        if once or table.columns[name].kind == "date" or _TIME.fullmatch(name.lower()):
            moments[name] = table.values[name]
    moments["order of rows"] = _order_of_rows(table)
    for name, values in moments.items():
        alike = _alike(table, values)
        if alike:
            what = f"targets that follow each other are alike (correlation {alike:.2f})"
            what += (
                "; if it is time, random test rows flatter: --time COLUMN tests the "
            )
            what += "last ones"
            yield ColumnFinding(name, what)
            return


LOOKS: tuple[Callable[[ClientTable], Iterator[ColumnFinding]], ...] = (
    copies,
    client_columns,
    identifiers,
    split_names,
    missing_numbers,
    codes,
    sums,
    missing_patterns,
    dates,
    series,
)
"""In this order: each sees what the ones before have left."""
