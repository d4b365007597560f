# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend personalize``: models for clients that took no part in training."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedblend.cli import screen
from fedblend.cli.screen import Format, Imports, OutputFormat, Seed, option

if TYPE_CHECKING:
    from fedblend.runs.personalize import ClientGain


def personalize(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")
    ],
    data: Annotated[
        Path,
        option("Rows of the new clients: .csv, .parquet, .npz or a folder.", "FILE"),
    ],
    steps: Annotated[
        int | None, option("Local steps; default: as the algorithm says.", "N", min=0)
    ] = None,
    rate: Annotated[
        float | None, option("Rate of these steps; default: that of the run.", "R")
    ] = None,
    test: Annotated[
        float, option("Fraction of each client's rows to compare models on.")
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
        option("File of the model; each of several clients adds its name.", "FILE"),
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
    if format is Format.table:
        _print(gains, paths)
        return

    from fedblend.runs.run_folder import json_text

    lines = [
        {**gain._asdict(), "gained": gain.better, "model": str(path)}
        for gain, path in zip(gains, paths, strict=True)
    ]
    typer.echo(json_text(lines))


def _print(gains: list["ClientGain"], paths: list[Path]) -> None:
    heads = ("client", "rows", "held out", "shared", "personal", "gain, 95 %")
    made = screen.table(*heads, "gained", right=1)
    made.columns[-1].justify = "left"
    made.title = f"{gains[0].metric} on held-out rows, before and after"
    made.title_justify = "left"
    for gain in gains:
        made.add_row(*_cells(gain))
    screen.console().print(made)
    known = [gain.better for gain in gains if gain.low == gain.low]
    better, worse = known.count(True), known.count(False)
    model = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    told = (
        f"{better} of {len(known)} that could be compared, {worse} lost, "
        f"{len(known) - better - worse} could be either (95 % intervals)"
    )
    if all(gain.before != gain.before for gain in gains):
        told = "there is no shared model, or there are no rows, to compare on"
    screen.say(f"gained: {told}", f"model: {model}")


def _cells(gain: "ClientGain") -> list[Any]:
    from rich.text import Text

    verdict = {True: "yes", False: "no", None: "either"}[gain.better]
    interval = f"{gain.low:+.3f} to {gain.high:+.3f}"
    if gain.low != gain.low:
        verdict, interval = "-", "-"
    values = ["-" if v != v else f"{v:.4f}" for v in (gain.before, gain.after)]
    counts = [str(gain.train + gain.test), str(gain.test)]
    return [Text(gain.name), *counts, *values, interval, verdict]
