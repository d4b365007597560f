# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The evidence of a run, in its folder: what single test rows say of a client's models.

Two runs on the same clients and splits measure their models on the same rows, and the
rows of a client come in the same order. So their folders are enough to compare the runs
row by row, see ``differences``. The file has the rows of one split: test rows, or those
of the first split that was measured.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedblend.core import Batch, PyTree
from fedblend.errors import RunError
from fedblend.metrics import Metric
from fedblend.runs.run_folder import Folder
from fedblend.simulation.serialize import (
    WireError,
    pack_named,
    unpack,
    write_atomically,
)
from fedblend.stats.gains import Evidence, Measured

FORMAT = "fedblend evidence 1"
SPLITS = ("test", "validation", "train")
"""The splits, the first that was measured is the one that is stored."""
RIGHT_OR_WRONG = (0.0, 1.0)
FACTS = ("higher_is_better", "bounded", "counts_rows", "always_defined")
"""What comparing two models needs to know of a metric."""


class SavedScores(NamedTuple):
    """The evidence of a run, as it is in the folder.

    ``evidence`` has an entry for each of ``seeds``, of the one split; its metrics tell
    which direction is better and cannot be computed. ``ids`` are the measured clients.
    """

    split: str
    seeds: list[int]
    ids: np.ndarray
    evidence: Evidence

    @property
    def counts(self) -> np.ndarray:
        """The clients' rows in the split."""
        return np.asarray(self.evidence.counts[self.split])

    @property
    def metrics(self) -> list[str]:
        """What was measured."""
        return list(self.evidence.metrics)


def write(
    folder: Folder, evidence: Evidence, ids: np.ndarray, seeds: Sequence[int]
) -> None:
    """Write the evidence of a completed run, whole; nothing if nothing was measured."""
    measured = evidence.measured[0] if evidence.measured else {}
    split = next((name for name in SPLITS if name in measured), None)
    if split is None:
        return
    counts = np.asarray(evidence.counts[split], np.int64)
    arrays: dict[str, np.ndarray] = {"ids": np.asarray(ids, np.int64), "counts": counts}
    for seed, of in zip(seeds, evidence.measured, strict=True):
        arrays |= {f"value/{seed}/{name}": of for name, of in _flat(of[split])}
    inside = np.arange(counts.max(initial=0)) < counts[:, None]
    for seed, of in zip(seeds, evidence.by_row, strict=False):
        for name, rows in _flat(of.get(split, {})):
            arrays[f"rows/{seed}/{name}"] = _small(rows[:, : inside.shape[1]][inside])
    if split in evidence.numbers:
        numbers = evidence.numbers[split][: len(seeds), :, : inside.shape[1]]
        arrays["numbers"] = numbers[:, inside].astype(np.int32)
    facts = {
        name: {fact: getattr(metric, fact) for fact in FACTS}
        for name, metric in evidence.metrics.items()
    }
    about = {"split": split, "seeds": list(seeds), "metrics": facts}
    words = {"format": FORMAT, "about": json.dumps(about)}
    write_atomically(folder.evidence, pack_named(arrays, words))


def read(folder: Folder) -> SavedScores:
    """The evidence in the folder of a run.

    Raises:
        RunError: there is none, or it is damaged.
    """
    path = folder.evidence
    if not path.is_file():
        raise RunError(
            f"{folder.path}: has no {path.name}, which is written at the end of a run; "
            "the run is not finished, measured nothing, or an older fedblend made it"
        )
    try:
        arrays, words = unpack(path.read_bytes())
        about = json.loads(words["about"])
        return _build(arrays, about["split"], about["seeds"], about["metrics"])
    except (WireError, ValueError, LookupError, TypeError) as error:
        raise RunError(f"{path}: is damaged: {error}") from None


def _build(
    arrays: Mapping[str, np.ndarray],
    split: str,
    seeds: list[int],
    metrics: Mapping[str, Mapping[str, Any]],
) -> SavedScores:
    ids, counts = arrays["ids"], arrays["counts"]
    inside = np.arange(counts.max(initial=0)) < counts[:, None]
    values: list[Measured] = [{split: {}} for _ in seeds]
    rows: list[Measured] = [{split: {}} for _ in seeds]
    for name, array in arrays.items():
        kind, _, rest = name.partition("/")
        if not rest:
            continue
        seed, model, metric = rest.split("/", 2)
        into, place = (values if kind == "value" else rows), seeds.index(int(seed))
        if kind == "rows":
            padded = np.full(inside.shape, np.nan)
            padded[inside] = array
            array = padded
        into[place][split].setdefault(model, {})[metric] = array
    known = {name: Metric(_not_computed, **facts) for name, facts in metrics.items()}
    by_row = rows if all(one[split] for one in rows) else []
    numbers = {}
    if "numbers" in arrays:
        numbers[split] = np.zeros((len(arrays["numbers"]), *inside.shape), np.int64)
        numbers[split][:, inside] = arrays["numbers"]
    found = Evidence(values, by_row, {split: counts}, known, numbers)
    return SavedScores(split, seeds, ids, found)


def _not_computed(model: PyTree, batch: Batch) -> Any:
    raise TypeError(
        "metric: a saved run has the values of metrics, not the functions that "
        "compute them"
    )


def _flat(models: Mapping[str, Mapping[str, np.ndarray]]):
    """``("personal/accuracy", array)`` and so on."""
    for model, metrics in models.items():
        for metric, values in metrics.items():
            yield f"{model}/{metric}", np.asarray(values)


def _small(rows: np.ndarray) -> np.ndarray:
    """Right or wrong as bytes; anything else in single precision."""
    if np.isin(rows, RIGHT_OR_WRONG).all():
        return rows.astype(np.uint8)
    return rows.astype(np.float32)
