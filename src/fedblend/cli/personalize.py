# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend personalize``: a model for clients that were not there in training."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedblend.cli import screen
from fedblend.cli.run import Format
from fedblend.cli.show import table

if TYPE_CHECKING:
    from fedblend.experiments.personalize import Gain, Joined


def personalize(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")
    ],
    data: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Rows of the newcomers: .csv, .parquet, .npz, a folder.",
        ),
    ],
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Local steps; the algorithm's own by default."
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(metavar="R", help="Of these steps; the run's own by default."),
    ] = None,
    test: Annotated[
        float, typer.Option(help="Fraction of a newcomer's rows to compare on.")
    ] = 0.2,
    target: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Column or array of the target."),
    ] = None,
    client: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Column or array that names the newcomer."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Which of the run's seeds; the first."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Where the model goes; of several, NAME is added."
        ),
    ] = Path("personal.safetensors"),
    format: Annotated[
        Format, typer.Option(help="json prints the lines and nothing else.")
    ] = Format.table,
) -> None:
    """Give new clients a model each, from the shared model of a run.

    What a newcomer does with the shared model is the algorithm's: docs/new_clients.md.
    The run is not changed. Columns are those of the run, if nothing is said.

    [bold]Examples[/bold]

    fedblend personalize runs/first --data new.csv

    fedblend personalize runs/first --data new.csv --steps 50 --rate 0.05
    """
    from fedblend.cli.run import compile_cache

    compile_cache()
    from fedblend.config.schema.table import RunError
    from fedblend.experiments.personalize import personalize_from

    if not out.parent.is_dir():
        raise RunError(f"{out}: there is no folder {out.parent}")
    joined = personalize_from(
        run,
        data,
        steps=steps,
        rate=rate,
        test=test,
        seed=seed,
        target=target,
        client=client,
    )
    paths = joined.save(out)
    if format is Format.json:
        _print_json(joined, paths)
    else:
        _print_table(joined, paths)


def _print_json(joined: "Joined", paths: list[Path]) -> None:
    from fedblend.experiments.run_folder import as_json

    lines = [
        {**gain._asdict(), "gained": gain.gained, "model": str(path)}
        for gain, path in zip(joined.gains(), paths, strict=True)
    ]
    typer.echo(as_json(lines))


def _print_table(joined: "Joined", paths: list[Path]) -> None:
    gains = joined.gains()
    metric = gains[0].metric
    heads = ("newcomer", "rows", "held out", "shared", "personal", "gain, 95 %")
    made = table(*heads, "gained")
    made.title = f"{metric} on held-out rows, before and after"
    made.title_justify = "left"
    for column in made.columns[1:6]:
        column.justify = "right"
    for gain in gains:
        made.add_row(*_cells(gain))
    console = screen.console()
    console.print(made)
    known = [gain.gained for gain in gains if gain.low == gain.low]
    better, worse = known.count(True), known.count(False)
    console.print(
        f"gained: {better} of {len(known)} that could be compared, {worse} lost, "
        f"{len(known) - better - worse} could be either (95 % intervals)"
    )
    model = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    console.print(f"model: {model}", markup=False, soft_wrap=True)


def _cells(gain: "Gain") -> list[Any]:
    from rich.text import Text

    said = {True: "yes", False: "no", None: "either"}[gain.gained]
    interval = f"{gain.low:+.3f} to {gain.high:+.3f}"
    if gain.low != gain.low:
        said, interval = "-", "-"
    values = ["-" if v != v else f"{v:.4f}" for v in (gain.before, gain.after)]
    counts = [str(gain.train + gain.test), str(gain.test)]
    return [Text(gain.name), *counts, *values, interval, said]
