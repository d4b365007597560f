# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What every client gains by one run over another, and how sure that is.

Runs on the same clients with the same splits are paired twice: each client is measured
in both, and on the same test rows. A client's difference and its 95 % interval are as
in ``stats.gains``, from its rows alone; the mean over clients has an interval over
clients and seeds. P-values and their correction are in ``stats.intervals``.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.config.config import Config, tables_differ
from fedblend.errors import RunError, hint
from fedblend.metrics import main_first
from fedblend.runs import per_row_scores, run_folder
from fedblend.runs.per_row_scores import SavedScores
from fedblend.runs.run_folder import Folder
from fedblend.stats.gains import Evidence, Gain, gain_summary
from fedblend.stats.intervals import LEVEL, holm, p_value

ALONE = "training alone"
"""The name of the models that clients train alone, where all runs have the same."""
PLACES = ("file", "path")
"""Where data lies, which is no difference if its content is the same."""


class Contender(NamedTuple):
    """One method of a comparison: its models on the rows of a split."""

    saved: SavedScores
    model: str = "personal"

    def values(self, metric: str) -> np.ndarray:
        """The metric of every client, [seeds, clients]."""
        split = self.saved.split
        measured = self.saved.evidence.measured
        return np.stack([of[split][self.model][metric] for of in measured])


class Difference(NamedTuple):
    """What clients gain by one method over another; more is better for any metric."""

    name: str
    other: str
    split: str
    metric: str
    ids: np.ndarray
    gain: Gain
    """Of every client, with its interval; ``gain.mean`` has the mean and its own."""
    p: float
    """That the mean is not zero; NaN where a test is not possible."""
    corrected: float = float("nan")
    """The p-value after Holm's correction for all comparisons made together."""

    @property
    def significant(self) -> bool:
        """Whether the mean is not zero, after the correction."""
        return self.corrected < LEVEL

    def row(self) -> dict[str, Any]:
        """Plain values: the mean, its interval, p-values, how many clients gain."""
        found, (mean, low, high) = gain_summary(self.gain), self.gain.mean
        return {
            "run": self.name,
            "other": self.other,
            "split": self.split,
            "metric": self.metric,
            "mean_gain": mean,
            "low": low,
            "high": high,
            "p": self.p,
            "p_holm": self.corrected,
            "significant": self.significant,
            "clients": found.clients,
            "better": found.helped,
            "worse": found.count,
            "by_chance": found.by_chance,
        }


def contenders(folders: Mapping[str, Path]) -> dict[str, Contender]:
    """What can be compared: every run, and training alone where all have the same.

    Raises:
        RunError: the runs have other clients, splits or seeds, or lack the evidence.
    """
    places = {name: Folder(Path(path)) for name, path in folders.items()}
    check_same_data({name: _data_facts(place) for name, place in places.items()})
    found = {
        name: Contender(per_row_scores.read(place)) for name, place in places.items()
    }
    check_same_rows(found)
    return found | _alone(found)


def pair_differences(
    found: Mapping[str, Contender],
    metrics: Sequence[str] | None = None,
    *,
    reference: str | None = None,
) -> list[Difference]:
    """Compare methods with each other, all pairs, corrected together.

    Args:
        found: the methods by name.
        metrics: what to compare; the main one of the runs if None.
        reference: compare all others with this one only.

    Raises:
        RunError: there is no such metric or reference.
    """
    if reference is not None and reference not in found:
        raise RunError(
            f"{reference!r}: is not a run of the comparison; {hint(reference, found)}"
        )
    pairs = combinations(found, 2)
    if reference is not None:
        pairs = [(name, reference) for name in found if name != reference]
    chosen = common_metrics(found, metrics)
    each = [
        _difference(found, *pair, metric) for pair in list(pairs) for metric in chosen
    ]
    corrected = holm([one.p for one in each])
    return [
        one._replace(corrected=float(p)) for one, p in zip(each, corrected, strict=True)
    ]


def common_metrics(
    found: Mapping[str, Contender], asked: Sequence[str] | None = None
) -> list[str]:
    """The metrics asked for, or the main one of those that all runs measured."""
    known = [one.saved.metrics for one in found.values()]
    common = [name for name in known[0] if all(name in of for of in known)]
    if not common:
        raise RunError("measure.metrics: the runs have no metric in common")
    for name in asked or ():
        if name not in common:
            raise RunError(
                f"{name!r}: was not measured in every run; {hint(name, common)}"
            )
    return list(asked) if asked else main_first(common)[:1]


def _difference(
    found: Mapping[str, Contender], name: str, other: str, metric: str
) -> Difference:
    own, rival = found[name], found[other]
    saved, split = own.saved, own.saved.split

    def both(mine: Iterable[Any], theirs: Iterable[Any]) -> list[Any]:
        return [
            {split: {"personal": a[split][own.model], "other": b[split][rival.model]}}
            for a, b in zip(mine, theirs, strict=False)
        ]

    joint = Evidence(
        both(own.saved.evidence.measured, rival.saved.evidence.measured),
        both(own.saved.evidence.by_row, rival.saved.evidence.by_row),
        saved.evidence.counts,
        saved.evidence.metrics,
        saved.evidence.numbers,
    )
    gain = joint.gain(split, metric, "other")
    gaps = own.values(metric).astype(float) - rival.values(metric)
    known = np.isfinite(gain.value)
    p = p_value(gaps[:, known])
    return Difference(name, other, split, metric, saved.ids, gain, p)


def check_same_data(known: Mapping[str, tuple[Any, dict[str, Any]]]) -> None:
    """Refuse runs on other rows, clients or splits than the first of them.

    Args:
        known: by run, its ``data_keys`` and the facts of its data.

    Raises:
        RunError: one line with both runs, the key and its values.
    """
    for name, (keys, facts) in known.items():
        first, (own, mine) = next(iter(known.items()))
        if (own is None) != (keys is None):
            continue  # a configuration names rows, code has them: see check_same_rows
        wrong = tables_differ(own, keys)
        for key in dict.fromkeys([*mine, *facts]):
            if wrong is None and mine.get(key) != facts.get(key):
                wrong = f"{key}: {mine.get(key)} there, {facts.get(key)} here"
        if wrong:
            raise RunError(
                f"{name}: has other data than {first}, so they cannot be compared: "
                f"{wrong}"
            )


def _data_facts(folder: Folder) -> tuple[Any, dict[str, Any]]:
    coded = run_folder.read_made_by(folder) is not None
    keys = None if coded else data_keys(run_folder.read_data_tables(folder))
    return keys, run_folder.read_json(folder.origin).get("data") or {}


def data_keys(config: Config) -> dict[str, Any]:
    """The keys of a configuration that decide which rows are whose."""
    whole = config.model_dump()
    data = {key: of for key, of in whole["data"].items() if key not in PLACES}
    central = whole.get("central") or {}
    return {
        "data": data,
        "central": {key: central.get(key) for key in ("classes", "share")},
        "run": {"seed": run_folder.seeds_of(config)},
        "measure": {"on": whole["measure"]["on"]},
    }


def check_same_rows(found: Mapping[str, Contender]) -> None:
    """Refuse runs that measured other clients, or other numbers of rows."""
    (first, one), *others = found.items()
    for name, other in others:
        facts: list[tuple[str, Any, Any]] = [
            ("split", one.saved.split, other.saved.split),
            ("clients", one.saved.ids, other.saved.ids),
            ("numbers of test rows", one.saved.counts, other.saved.counts),
            ("numbers of seeds", len(one.saved.seeds), len(other.saved.seeds)),
            ("test rows", _numbers(one), _numbers(other)),
        ]
        for what, mine, theirs in facts:
            if mine is None or theirs is None:
                continue
            if not np.array_equal(mine, theirs):
                raise RunError(
                    f"{name}: measured other {what} than {first}, so they cannot be "
                    "compared"
                )


def _numbers(of: Contender) -> np.ndarray | None:
    """Which rows were measured; None where that is not known."""
    return of.saved.evidence.numbers.get(of.saved.split)


def _alone(found: Mapping[str, Contender]) -> dict[str, Contender]:
    """Training alone as a method of its own, if all runs that have it agree."""
    having = [
        one._replace(model="local")
        for one in found.values()
        if "local" in one.saved.evidence.measured[0][one.saved.split]
    ]
    same = all(
        np.array_equal(having[0].values(metric), one.values(metric), equal_nan=True)
        for one in having[1:]
        for metric in common_metrics(found)
    )
    return {ALONE: having[0]} if having and same else {}
