# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What every client gains by one run over another, and how sure that is.

Runs on the same clients with the same splits are paired twice: each client is measured
in both, and on the same test rows. A client's difference and its 95 % interval are as
in ``gains``, from its rows alone; the mean over clients has an interval over clients
and seeds.

The p-value of a mean inverts that interval: it is the level at which the interval just
reaches zero. So p < 0.05 where the 95 % interval excludes zero, and table and figure
never disagree. With one seed it is the paired t-test over clients. Clients are units
because a claim about a method is one about further clients; seeds add their own spread,
which a test over clients alone would not see. The signed-rank test asks for the median
and not for the mean that tables show, and sign flips of a few clients cannot reach 5 %
after a correction, however large the difference.

Many comparisons: Holm's step-down bounds the chance of a single false claim among all
of them at 5 %, whatever their dependence; runs that share clients are dependent.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.config.config import Config, tables_differ
from fedblend.errors import RunError, hint
from fedblend.report.measures import in_order
from fedblend.runs import per_row_scores, run_folder
from fedblend.runs.per_row_scores import Saved
from fedblend.runs.run_folder import Folder
from fedblend.stats.gains import Evidence, Gain, gain_summary

ALONE = "training alone"
"""The name of the models that clients train alone, where all runs have the same."""
LEVEL = 0.05
"""The chance of a false claim that is accepted, of all comparisons together."""
PLACES = ("file", "path")
"""Where data lies, which is no difference if its content is the same."""
_STEPS = 80
_LEAST = -700.0
"""The smallest logarithm of a p-value."""


class Contender(NamedTuple):
    """One method of a comparison: its models on the rows of a split."""

    saved: Saved
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


def differences(
    folders: Mapping[str, Path],
    metrics: Sequence[str] | None = None,
    *,
    reference: str | None = None,
) -> list[Difference]:
    """Compare finished runs with each other, all pairs, corrected together.

    Args:
        folders: the folder of each run, by the name it is to have.
        metrics: what to compare; the main one of the runs if None.
        reference: compare all others with this one only.

    Raises:
        RunError: the runs have other clients, splits or seeds, or lack the evidence.
    """
    return compared(contenders(folders), metrics, reference=reference)


def contenders(folders: Mapping[str, Path]) -> dict[str, Contender]:
    """What can be compared: every run, and training alone where all have the same."""
    check_same_data(folders)
    found = {
        name: Contender(per_row_scores.read(Folder(Path(path))))
        for name, path in folders.items()
    }
    check_same_rows(found)
    return found | _alone(found)


def compared(
    found: Mapping[str, Contender],
    metrics: Sequence[str] | None = None,
    *,
    reference: str | None = None,
) -> list[Difference]:
    """``differences`` of what was read."""
    if reference is not None and reference not in found:
        raise RunError(
            f"{reference!r}: is no run of the comparison; {hint(reference, found)}"
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
    return list(asked) if asked else in_order(common)[:1]


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


def p_value(gaps: np.ndarray) -> float:
    """Of the mean of differences, [seeds, clients]; see the module's text.

    NaN for a single client, and where all differ by the very same amount: no spread, no
    test.

    >>> round(p_value(np.array([[1.0, 2.0, 3.0]])), 4)
    0.0742
    """
    from scipy.special import stdtr, stdtrit

    seeds, clients = gaps.shape
    if gaps.size and not gaps.any():
        return 1.0
    if clients < 2:
        return float("nan")
    mean = abs(float(gaps.mean()))
    sources = [(clients - 1, gaps.mean(axis=0).std(ddof=1) / np.sqrt(clients))]
    if seeds > 1:
        sources.append((seeds - 1, gaps.mean(axis=1).std(ddof=1) / np.sqrt(seeds)))
    # Rounding leaves a spread where there is none.
    sources = [(free, e) for free, e in sources if e > 1e-12 * mean]
    if not sources:
        return float("nan")
    if len(sources) == 1:
        freedom, error = sources[0]
        return float(2 * stdtr(freedom, -mean / error))

    def half(log: float) -> float:
        """Half the width of the interval at a level."""
        tail = np.exp(log) / 2
        return float(np.hypot(*(e * stdtrit(free, tail) for free, e in sources)))

    low, high = _LEAST, 0.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if half(middle) > mean else (low, middle)
    return float(np.exp(high))


def holm(p: Sequence[float] | np.ndarray) -> np.ndarray:
    """Holm's correction; what could not be tested is NaN and does not count.

    >>> holm([0.01, 0.04, 0.03]).round(3)
    array([0.03, 0.06, 0.06])
    """
    values = np.asarray(p, float)
    known = np.flatnonzero(~np.isnan(values))
    order = known[np.argsort(values[known], kind="stable")]
    steps = values[order] * np.arange(len(order), 0, -1)
    corrected = np.full(values.shape, np.nan)
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return corrected


def check_same_data(folders: Mapping[str, Path]) -> None:
    """Refuse runs on other rows, clients or splits than the first of them.

    Raises:
        RunError: one line with both folders, the key and its values.
    """
    (first, path), *others = folders.items()
    config, facts = _known(Path(path))
    for name, other in others:
        there, theirs = _known(Path(other))
        wrong = tables_differ(config, there)
        for key in dict.fromkeys([*facts, *theirs]):
            if wrong is None and facts.get(key) != theirs.get(key):
                wrong = f"{key}: {facts.get(key)} there, {theirs.get(key)} here"
        if wrong:
            raise RunError(
                f"{name}: has other data than {first}, so they cannot be compared: "
                f"{wrong}"
            )


def _known(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys that decide which rows are whose, and the facts of the data."""
    folder = Folder(path)
    config = run_folder.read_data_tables(folder)
    facts = run_folder.read_json(folder.origin).get("data") or {}
    return data_keys(config), facts


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
        for what, mine, theirs in (
            ("split", one.saved.split, other.saved.split),
            ("clients", one.saved.ids, other.saved.ids),
            ("numbers of test rows", one.saved.counts, other.saved.counts),
        ):
            if not np.array_equal(mine, theirs):
                raise RunError(
                    f"{name}: measured other {what} than {first}, so they cannot be "
                    "compared"
                )


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
