# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A paper's claims, and what is found when each is measured.

A claim is a sentence of the paper and a function that checks it. ``reproduce`` runs
some of them and writes, after each, its numbers as JSON and its figures, so that
nothing is lost if a later one fails; the page is made of all that the folder holds.
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

from fedblend import __version__


class Verdict(StrEnum):
    """What became of a claim."""

    reproduced = "reproduced"
    partly = "partly reproduced"
    differs = "not reproduced"
    open = "not decided"


class Finding(NamedTuple):
    """What was measured for a claim.

    ``ours`` says it in one or two sentences with the deciding figures; ``why`` explains
    where it differs from the paper, in the result or in what was run; ``numbers`` is
    all that was measured, plain values or arrays; ``figures`` are matplotlib's;
    ``table`` has a row of words each, first its head; ``criterion`` says what decides
    the verdict, where it is told apart from ``why``; ``before`` is what was found by
    another criterion or in another setting: ``verdict``, ``criterion`` and ``ours``.
    """

    verdict: Verdict
    ours: str
    numbers: Mapping[str, Any]
    figures: Mapping[str, Any]
    why: str = ""
    table: Sequence[Sequence[str]] = ()
    criterion: str = ""
    before: Mapping[str, str] = MappingProxyType({})


class Claim(NamedTuple):
    """A claim of a paper. ``check(quick)`` measures it, smaller where ``quick``.

    One that takes long is ``resumable``: ``check(quick, folder)`` keeps there what it
    has measured so far, and goes on from it. ``undecided`` says in a sentence why a
    claim that is not reproduced cannot be decided here.
    """

    name: str
    title: str
    paper: str
    check: Callable[..., Finding]
    resumable: bool = False
    undecided: str = ""


def reproduce(
    claims: Iterable[Claim],
    folder: Path,
    *,
    quick: bool = False,
    on_claim: Callable[[Claim], None] | None = None,
) -> list[dict[str, Any]]:
    """Check claims one after another, and write what is found.

    Args:
        claims: which.
        folder: where ``NAME.json`` and the figures of each go, and ``kept`` what
            resumable ones have so far.
        quick: small sizes, to see that everything works; verdicts mean little then.
        on_claim: called before each.

    Returns:
        What was written of each, see ``entry``, and whether it was ``resumed``: its
        seconds are then those of the last part alone, and ``measured_by`` says where
        the other parts were measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for claim in claims:
        if on_claim is not None:
            on_claim(claim)
        begun = time.perf_counter()
        kept = (folder / "kept" / claim.name,) if claim.resumable else ()
        resumed = any(path.exists() for path in kept)
        finding = claim.check(quick, *kept)
        seconds = time.perf_counter() - begun
        names = _save_figures(claim, finding, folder)
        found = {**entry(claim, finding, quick, seconds, names), "resumed": resumed}
        found["measured_by"] = [one for path in kept for one in measured_by(path)]
        path = folder / f"{claim.name}.json"
        earlier = found["before"] or earlier_verdict(path, finding.criterion)
        entries.append({**found, "before": earlier})
        _write(path, entries[-1])
    return entries


def earlier_verdict(path: Path, criterion: str) -> dict[str, Any] | None:
    """What was found by another criterion, to stand beside what is found by this one.

    Args:
        path: of the claim's JSON, which may not be there yet.
        criterion: of the finding that is to be written there.
    """
    if not criterion or not path.exists():
        return None
    known = json.loads(path.read_text())
    if known.get("criterion", "") == criterion:
        return known.get("before")
    known.pop("before", None)
    return known


def measured_by(folder: Path) -> list[dict[str, str]]:
    """The commits and devices of all that is kept in a folder, see ``kept``."""
    known = (json.loads(path.read_text()) for path in folder.rglob("*.json"))
    pairs = {(one["commit"], one["device"]) for one in known if one.get("commit")}
    return [{"commit": one, "device": where} for one, where in sorted(pairs)]


def device() -> str:
    """What computes, in its maker's words."""
    return jax.devices()[0].device_kind


def commit() -> str | None:
    """The commit of the package, with "+changes" where its files differ from it.

    Where no repository holds it, what the environment variable FEDBLEND_COMMIT says.
    """
    here = Path(__file__).parents[1]

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=here, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        # An installed package may lie inside of somebody else's repository.
        git("ls-files", "--error-unmatch", __file__)
        changed = git("status", "--porcelain", "--", ".")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("FEDBLEND_COMMIT")


def entry(
    claim: Claim, finding: Finding, quick: bool, seconds: float, figures: list[str]
) -> dict[str, Any]:
    """A claim and what was found, as plain values."""
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
        "versions": {"fedblend": __version__, "jax": jax.__version__},
        "commit": commit(),
        "figures": figures,
        "numbers": plain(finding.numbers),
    }


def read_entries(folder: Path, claims: Iterable[Claim]) -> list[dict[str, Any]]:
    """What the folder holds of these claims, in their order."""
    paths = (folder / f"{claim.name}.json" for claim in claims)
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def refresh(folder: Path, claims: Iterable[Claim]) -> None:
    """Write the sentences that are the claims' own anew into what the folder holds.

    They are the title, the paper's sentence, and why it is undecided. What was
    measured, and what is said of it, stays.
    """
    for claim in claims:
        for found in read_entries(folder, [claim]):
            told = {**found, "title": claim.title, "paper": claim.paper}
            if claim.undecided or "undecided" in found:
                told["undecided"] = claim.undecided
            if told != found:
                _write(folder / f"{claim.name}.json", told)


def _write(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, allow_nan=False) + "\n")


def _save_figures(claim: Claim, finding: Finding, folder: Path) -> list[str]:
    names = []
    for name, figure in finding.figures.items():
        names.append(f"{claim.name}_{name}.png")
        figure.savefig(folder / names[-1], dpi=110)
    return names


def plain(value: Any) -> Any:
    """Arrays as lists, numbers to six digits, and null for what is not finite."""
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        value = np.asarray(value).tolist()
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
