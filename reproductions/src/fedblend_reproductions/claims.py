# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Claims of a paper, and the results of measuring them.

A claim is a sentence of the paper and a function that checks it. ``reproduce`` runs
some claims and writes, after each, its numbers as JSON and its figures, so that
nothing is lost if a later claim fails; the page shows all results in the folder.
"""

import json
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

import fedblend

CACHED = "cached"
"""The folder in which resumable claims cache their parts."""


class Verdict(StrEnum):
    """Whether a claim was reproduced."""

    reproduced = "reproduced"
    partly = "partly reproduced"
    differs = "not reproduced"
    open = "not decided"


class Finding(NamedTuple):
    """The result of measuring a claim.

    Attributes:
        verdict: by the criterion.
        ours: one or two sentences with the deciding numbers.
        numbers: all measurements, plain values or arrays.
        figures: matplotlib figures by name.
        why: the setting, and why the result differs from the paper, if known.
        table: rows of words, the head first.
        criterion: what decides the verdict, where ``why`` does not say it.
        before: an earlier result by another criterion or in another setting, with the
            keys ``verdict``, ``criterion`` and ``ours``.
    """

    verdict: Verdict
    ours: str
    numbers: Mapping[str, Any]
    figures: Mapping[str, Any]
    why: str = ""
    table: Sequence[Sequence[str]] = ()
    criterion: str = ""
    before: Mapping[str, str] = MappingProxyType({})


Numbers = Mapping[str, Any]
"""``Finding.numbers`` as plain values, as JSON stores them."""


class Claim(NamedTuple):
    """A claim of a paper.

    Attributes:
        name: "F1" for the first claim of FLIX.
        title: a few words.
        paper: the paper's sentence.
        check: ``check(quick)`` measures the claim, at small sizes if ``quick``; a
            resumable claim is ``check(quick, folder)`` and caches its parts there.
        headline: the result in one short sentence with its number.
        paper_number: the paper's number beside that of the headline, if it has one.
        resumable: whether an interrupted check resumes from its cached parts.
        undecided: why the claim, if not reproduced, cannot be decided here.
    """

    name: str
    title: str
    paper: str
    check: Callable[..., Finding]
    headline: Callable[[Numbers], str]
    paper_number: str = ""
    resumable: bool = False
    undecided: str = ""


def lead(gap: float, other: str) -> str:
    """A difference of two accuracies in words.

    >>> lead(-0.002, "FedAvg")
    '0.20 points behind FedAvg'
    """
    return f"{100 * abs(gap):.2f} points {'behind' if gap < 0 else 'ahead of'} {other}"


def least_lead(gap: float, other: str) -> str:
    """The smallest of several differences in words, see ``lead``."""
    return f"{'up to' if gap < 0 else 'at least'} {lead(gap, other)}"


def span(values: Iterable[float], form: str) -> str:
    """The smallest and the largest of some values.

    >>> span([0.5, 0.25, 1.0], ".1f")
    '0.2 to 1.0'
    """
    values = list(values)
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def reproduce(
    claims: Iterable[Claim],
    folder: Path,
    *,
    quick: bool = False,
    on_claim: Callable[[Claim], None] | None = None,
) -> list[dict[str, Any]]:
    """Check claims one after another, and write each result.

    Args:
        claims: to check.
        folder: for ``NAME.json`` and figures, and ``cached`` for parts of resumable
            claims.
        quick: small sizes, to see that everything works; verdicts mean little then.
        on_claim: called before each claim.

    Returns:
        The results as written, see ``entry``. Where a claim ``resumed``, its seconds
        are those of the last run alone, and ``measured_by`` says where its cached
        parts were measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for claim in claims:
        if on_claim is not None:
            on_claim(claim)
        begun = time.perf_counter()
        parts = folder / CACHED / claim.name
        resumed = claim.resumable and parts.exists()
        finding = claim.check(quick, parts) if claim.resumable else claim.check(quick)
        seconds = time.perf_counter() - begun
        names = _save_figures(claim, finding, folder)
        found = {**entry(claim, finding, quick, seconds, names), "resumed": resumed}
        found["measured_by"] = measured_by(parts) if claim.resumable else []
        path = folder / f"{claim.name}.json"
        earlier = found["before"] or earlier_verdict(path, finding.criterion)
        entries.append({**found, "before": earlier})
        _write(path, entries[-1])
    return entries


def earlier_verdict(path: Path, criterion: str) -> dict[str, Any] | None:
    """The stored result by another criterion, if any.

    Args:
        path: of the claim's JSON, which may not exist yet.
        criterion: of the result that is about to be written there.
    """
    if not criterion or not path.exists():
        return None
    stored = json.loads(path.read_text())
    if stored.get("criterion", "") == criterion:
        return stored.get("before")
    stored.pop("before", None)
    return stored


def measured_by(folder: Path) -> list[dict[str, str]]:
    """The commits and devices of all cached parts in a folder."""
    parts = (json.loads(path.read_text()) for path in folder.rglob("*.json"))
    pairs = {(part["commit"], part["device"]) for part in parts if part.get("commit")}
    return [{"commit": one, "device": where} for one, where in sorted(pairs)]


def device() -> str:
    """The first device of JAX, in its maker's words."""
    return jax.devices()[0].device_kind


def commit() -> str | None:
    """The commit of both packages, with "+changes" where their files differ from it.

    Without a repository, the environment variable FEDBLEND_COMMIT.
    """
    packages = [Path(__file__).parent, Path(fedblend.__file__).parent]

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words],
            cwd=packages[0],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    try:
        # An installed package may lie in a repository that does not track it.
        git("ls-files", "--error-unmatch", __file__)
        root = Path(git("rev-parse", "--show-toplevel"))
        tracked = [str(path) for path in packages if path.is_relative_to(root)]
        changed = git("status", "--porcelain", "--", *tracked)
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("FEDBLEND_COMMIT")


def entry(
    claim: Claim, finding: Finding, quick: bool, seconds: float, figures: list[str]
) -> dict[str, Any]:
    """A claim and its result as plain values."""
    return {
        "claim": claim.name,
        "title": claim.title,
        "paper": claim.paper,
        "ours": finding.ours,
        "verdict": str(finding.verdict),
        "criterion": finding.criterion,
        "before": dict(finding.before),
        "why": finding.why,
        "undecided": claim.undecided,
        "table": plain(finding.table),
        "quick": quick,
        "seconds": round(seconds, 1),
        "device": device(),
        "versions": {"fedblend": fedblend.__version__, "jax": jax.__version__},
        "commit": commit(),
        "figures": figures,
        "numbers": plain(finding.numbers),
    }


def read_entries(folder: Path, claims: Iterable[Claim]) -> list[dict[str, Any]]:
    """The stored results of these claims, in their order."""
    paths = (folder / f"{claim.name}.json" for claim in claims)
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def refresh(folder: Path, claims: Iterable[Claim]) -> None:
    """Update the claims' own sentences in stored results.

    These are the title, the paper's sentence, and why a claim is undecided. All
    measurements, and the sentences about them, stay.
    """
    for claim in claims:
        for stored in read_entries(folder, [claim]):
            updated = {**stored, "title": claim.title, "paper": claim.paper}
            if claim.undecided or "undecided" in stored:
                updated["undecided"] = claim.undecided
            if updated != stored:
                _write(folder / f"{claim.name}.json", updated)


def _write(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, allow_nan=False) + "\n")


def _save_figures(claim: Claim, finding: Finding, folder: Path) -> list[str]:
    names = []
    for name, figure in finding.figures.items():
        names.append(f"{claim.name}_{name}.png")
        figure.savefig(folder / names[-1], dpi=110)
    return names


def plain(value: Any) -> Any:
    """Arrays as lists, floats to six digits, and null for what is not finite."""
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        value = np.asarray(value).tolist()
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
