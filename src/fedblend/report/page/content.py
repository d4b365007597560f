# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a page holds, as plain values; everything comes from run folders."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.errors import RunError
from fedblend.report import verdict as words
from fedblend.report.clients import STATUS, one_client, plain_clients, take_clients
from fedblend.report.page.auto_page import (
    auto_client_content,
    auto_content,
    read_auto,
)
from fedblend.report.page.run_values import (
    Plain,
    RunFiles,
    describe_run,
    read_run,
    refuse_damage,
    run_folders,
    run_results,
)
from fedblend.report.series import MOST_POINTS, number
from fedblend.runs.paired import contenders, pair_differences

MOST_CELLS = 900_000
"""Cells of all tables of clients on a page; further columns are left out."""
MOST_CURVE_POINTS = 6_000
"""Points of a curve times runs, so that a long sweep stays small."""
MOST_TESTS = 300_000
"""Clients times pairs of runs that are tested while a page is made."""


def page_content(paths: Sequence[Path]) -> Plain:
    """The content of a page about runs, which are in these folders."""
    auto = read_auto(paths[0]) if len(paths) == 1 else None
    if auto is not None:
        return auto_content(auto)
    runs = [read_run(path) for path in run_folders(paths)]
    labels = _labels(runs)
    if not runs:
        raise RunError("no run to report: name the folder of at least one")
    abouts = list(map(describe_run, runs, labels))
    heads = list(map(_headline, runs))
    points = min(MOST_POINTS, max(MOST_CURVE_POINTS // len(runs), 50))
    room = MOST_CELLS // len(runs)
    plain = [
        run_results(*one, points, room) for one in zip(runs, abouts, heads, strict=True)
    ]
    pairs, untested = _differences(runs, labels)
    if len(runs) == 1:
        with refuse_damage(runs[0]):
            tone, lines = words.sentences(runs[0].summary, runs[0].clients)
    else:
        tone, lines = _compare_heads(dict(zip(labels, heads, strict=True)), pairs)
    if untested:
        tone, lines = "open", [*lines, f"Differences are not tested: {untested}."]
    return {
        "title": runs[0].config.get("name", "run") if len(runs) == 1 else "Comparison",
        "tone": tone,
        "verdict": lines,
        "status": STATUS,
        "differences": pairs,
        "untested": untested,
        "runs": plain,
    }


def _differences(
    runs: Sequence[RunFiles], labels: Sequence[str]
) -> tuple[list[Plain], str | None]:
    """All pairs of runs and training alone, tested; or why there is no test."""
    count = len(runs) * (len(runs) + 1) // 2
    if len(runs) < 2 or any(run.summary is None for run in runs):
        return [], None
    if (
        count * max(len(run.clients.ids) if run.clients else 0 for run in runs)
        > MOST_TESTS
    ):
        return [], "these are too many runs and clients to test on a page"
    folders = {label: run.folder.path for label, run in zip(labels, runs, strict=True)}
    try:
        tested = pair_differences(contenders(folders))
    except RunError as error:
        return [], str(error)
    return [
        {key: _plain(value) for key, value in one.row().items()} for one in tested
    ], None


def _plain(value: Any) -> Any:
    return number(value) if isinstance(value, float) else value


def _labels(runs: Sequence[RunFiles]) -> list[str]:
    """A name for each run that no other has."""
    names = [str(run.config.get("name", run.folder.path.name)) for run in runs]
    if len(set(names)) < len(names):
        names = [run.folder.path.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.folder.path) for run in runs]
    return names


def _headline(run: RunFiles) -> words.Headline | None:
    with refuse_damage(run):
        return None if run.summary is None else words.headline(run.summary)


def _compare_heads(
    heads: Mapping[str, words.Headline | None], pairs: list[Plain]
) -> tuple[str, list[str]]:
    known = {label: head for label, head in heads.items() if head}
    if len({(head.split, head.metric) for head in known.values()}) != 1:
        return "open", ["These runs do not measure the same thing."]
    return words.several_sentences(known, pairs)


def client_content(path: Path, client: str) -> Plain:
    """The content of the page for one client: nothing of the other clients.

    Means over clients are left out as well: those of two clients tell the other's.

    Args:
        path: the folder of a finished run, or of ``fedblend auto``: then the page says
            what the verdict means for this client.
        client: its id or name.
    """
    auto = read_auto(path)
    if auto is not None:
        return auto_client_content(auto, client)
    run = read_run(path)
    if run.summary is None or run.clients is None:
        raise RunError(f"{path}: this run is not finished; --resume continues it")
    place = one_client(run.clients, client, str(path))
    own = take_clients(run.clients, np.array([place]))
    client_id = str(own.ids[0])
    with refuse_damage(run):
        tone, lines = words.client_sentences(own)
    about = describe_run(run, str(run.config.get("name", "")))
    return {
        "title": own.names[0] if own.names[0] != client_id else f"Client {client_id}",
        "tone": tone,
        "verdict": lines,
        "status": STATUS,
        "only": True,
        "runs": [about | {"clients": plain_clients(own, MOST_CELLS, ())}],
    }
