# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend judge``: which methods are better than a baseline, from their scores."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedblend.cli import screen
from fedblend.cli.screen import Format, OutputFormat, option

if TYPE_CHECKING:
    from fedblend.runs.judge_scores import Judgement


def judge(
    scores: Annotated[
        list[Path],
        typer.Argument(
            metavar="SCORES...", help="Files with scores: .csv, .tsv, .json or .h5."
        ),
    ],
    baseline: Annotated[
        str | None,
        option("Method to compare with; default: the one named baseline.", "METHOD"),
    ] = None,
    searched: Annotated[
        int | None,
        option("Number of candidates tried; default: those in the files.", "N", min=1),
    ] = None,
    higher_is_better: Annotated[
        bool | None,
        typer.Option(
            "--higher-is-better/--lower-is-better",
            help="Which scores are better; default: as the known metric has it.",
        ),
    ] = None,
    method: Annotated[str | None, option("Column with the method.", "COLUMN")] = None,
    client: Annotated[str | None, option("Column with the client.", "COLUMN")] = None,
    seed: Annotated[str | None, option("Column with the seed.", "COLUMN")] = None,
    score: Annotated[
        str | None,
        option("Column with the score; of .json and .h5 files, a metric.", "COLUMN"),
    ] = None,
    overlap: Annotated[
        float,
        option(
            "Test rows divided by training rows, if seeds split one table anew.",
            min=0.0,
        ),
    ] = 0.0,
    format: OutputFormat = Format.table,
) -> None:
    """Compare scores of any library with a baseline, and say what is clear of chance.

    Scores are paired by client and seed. Gains have intervals; p-values are corrected
    for all candidates that were searched. Reads tables with the columns method, client,
    seed and score, NVFlare's results.tsv, Flower's histories as METHOD-SEED.json, and
    PFLlib's DATASET_METHOD_GOAL_SEED.h5.

    [bold]Examples[/bold]

    fedblend judge scores.csv --baseline fedavg --higher-is-better

    fedblend judge results.tsv --higher-is-better --searched 40

    fedblend judge fedavg-*.json ours-*.json --baseline fedavg --score accuracy
    """
    from fedblend.runs.judge_scores import judge as judge_scores

    found = judge_scores(
        scores,
        baseline=baseline,
        searched=searched,
        higher_is_better=higher_is_better,
        method=method,
        client=client,
        seed=seed,
        score=score,
        overlap=overlap,
    )
    if format is Format.json:
        screen.say_json(found.plain())
        return
    _show(found)


def _show(found: "Judgement") -> None:
    heads = ("method", "score", "gain", "95 % interval", "p", "corrected")
    from rich.markup import escape

    shown = screen.table(*heads, "clients", "helped", "harmed", right=1)
    for one in found.candidates:
        texts = (f"{one.score:.4g}", f"{one.gain:+.3g}")
        ends = f"{one.low:.3g} to {one.high:.3g}"
        chances = (f"{one.p:.2g}", f"{one.corrected:.2g}")
        counts = (one.clients, len(one.helped), len(one.harmed))
        name = escape(one.method)
        name = f"[bold]{name}[/bold]" if one.clear else name
        shown.add_row(name, *texts, ends, *chances, *map(str, counts))
    screen.console().print(shown)
    screen.say(*found.verdict)
