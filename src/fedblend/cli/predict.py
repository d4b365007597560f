# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend predict``: predictions for the rows of a table."""

from pathlib import Path
from typing import Annotated

import typer

from fedblend.cli import screen
from fedblend.cli.screen import Seed, option


def predict(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Folder of a run, or an exported .safetensors, .npz or .onnx file.",
        ),
    ],
    table: Annotated[
        Path, typer.Argument(metavar="TABLE", help="Rows: .csv, .parquet or .npz.")
    ],
    client: Annotated[
        str | None,
        option("Whose model predicts all rows, by id or name; of a run.", "ID"),
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Predict all rows by the shared model.")
    ] = False,
    seed: Seed = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="A column for each class, too.")
    ] = False,
    imports: Annotated[
        bool,
        typer.Option(
            "--imports", help="Import the code that a run or file names as its model."
        ),
    ] = False,
    out: Annotated[
        Path | None, option("A .csv file; default: print the table.", "FILE")
    ] = None,
) -> None:
    """Predict the rows of a raw table; preprocessing is part of the model.

    In a run, the column that named the clients in training selects the model of each
    row; without it, the shared model predicts.

    [bold]Examples[/bold]

    fedblend predict runs/first new.csv --out predictions.csv

    fedblend predict runs/first new.csv --client "hospital 3" --probabilities

    fedblend predict runs/first/exports/shared.onnx new.csv
    """
    from fedblend.errors import RunError
    from fedblend.runs.predict import predict_file
    from fedblend.runs.run_folder import csv_text, write_text
    from fedblend.runs.saved_run import load

    if out is not None and not out.parent.is_dir():
        raise RunError(f"--out: there is no folder {out.parent}")
    if model.is_dir():
        run = load(model, imports=imports)
        found = run.predictions(table, client, shared=shared, seed=seed)
    elif client is not None or shared or seed is not None:
        raise RunError(
            f"{model}: is one model; --client, --shared and --seed need a run"
        )
    else:
        found = predict_file(model, table, imports=imports)
    columns = found.columns(probabilities)
    text = csv_text(columns, zip(*columns.values(), strict=True))
    if out is None:
        typer.echo(text, nl=False)
        return
    write_text(out, text)
    screen.say(f"predictions: {out} ({len(found.labels)} rows)")
