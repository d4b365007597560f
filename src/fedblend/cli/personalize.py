# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend personalize``: models for clients that took no part in training."""

import operator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedblend.cli import screen
from fedblend.cli.screen import Format, Imports, OutputFormat, Seed, option

if TYPE_CHECKING:
    from fedblend.report.measures import ModelScores


def personalize(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")
    ],
    data: Annotated[
        Path,
        option("Rows of the new clients: .csv, .parquet, .npz or a folder.", "FILE"),
    ],
    steps: Annotated[
        int | None,
        option(
            "Steps on a new client's model; default: as in docs/new_clients.md.",
            "N",
            min=0,
        ),
    ] = None,
    rate: Annotated[
        float | None, option("Learning rate of these steps; default: the run's.", "R")
    ] = None,
    test: Annotated[
        float,
        option("Fraction of each client's rows that is held out to compare models."),
    ] = 0.2,
    target: Annotated[
        str | None, option("Column or array of the target.", "NAME")
    ] = None,
    client: Annotated[
        str | None, option("Column or array that names the client.", "NAME")
    ] = None,
    seed: Seed = None,
    out: Annotated[
        Path,
        option(
            "File of the model; for several clients, each adds its name to it.", "FILE"
        ),
    ] = Path("personal.safetensors"),
    imports: Imports = False,
    format: OutputFormat = Format.table,
) -> None:
    """Give each new client a model, from the shared model of a run.

    The algorithm decides how a new client uses the shared model: docs/new_clients.md.
    The run is not changed. Columns have the same names as in the run by default.

    [bold]Examples[/bold]

    fedblend personalize runs/first --data new.csv

    fedblend personalize runs/first --data new.csv --steps 50 --rate 0.05
    """
    screen.compile_cache()
    from fedblend.errors import RunError
    from fedblend.runs.personalize import personalize_from

    if not out.parent.is_dir():
        raise RunError(f"{out}: there is no folder {out.parent}")
    found = personalize_from(
        run,
        data,
        steps=steps,
        rate=rate,
        test=test,
        seed=seed,
        target=target,
        client=client,
        imports=imports,
    )
    paths, gains = found.save(out), found.gains()
    if format is Format.json:
        models = [{"model": str(path)} for path in paths]
        screen.say_json(list(map(operator.or_, gains, models)))
        return
    _print(found.compare(), gains)
    model = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    screen.say(f"model: {model}")


def _print(compared: "ModelScores | None", gains: list[dict[str, Any]]) -> None:
    from rich.text import Text

    from fedblend.report.verdict import who_gains
    from fedblend.stats.gains import gain_summary

    metric = "accuracy" if compared is None else compared.metric
    heads = ("client", "rows", "held out", "shared", "personal", "gain, 95 %")
    made = screen.table(*heads, "gained", right=1)
    made.columns[-1].justify = "left"
    made.title = f"{metric} on held-out rows, before and after"
    made.title_justify = "left"
    for line in gains:
        cells = ["-"] * 4
        if line.get("gain_over_shared", "") != "":
            values = [f"{line[f'{of}_{metric}']:.4f}" for of in ("shared", "personal")]
            low = float(line["gain_low"] or "-inf")
            high = float(line["gain_high"] or "inf")
            told = "yes" if low > 0 else {"yes": "no"}.get(line["harmed"], "either")
            cells = [*values, f"{low:+.3f} to {high:+.3f}", told]
        counts = [str(line["train"] + line["test"]), str(line["test"])]
        made.add_row(Text(line["name"]), *counts, *cells)
    screen.console().print(made)
    counted = None if compared is None else gain_summary(compared.gain)
    if counted is None or not counted.clients:
        screen.say("There is no shared model, or there are no rows, to compare on.")
    else:
        screen.say(who_gains(counted))
