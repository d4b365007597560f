# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend export`` and ``fedblend predict``: the models of a finished run."""

from pathlib import Path
from typing import Annotated

import typer

from fedblend.cli import screen
from fedblend.cli.screen import Imports, Seed, option


def export(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Folder of a finished run, or a .safetensors file of a model.",
        ),
    ],
    client: Annotated[
        list[str] | None,
        option("Client whose model to export, by id or name; repeat for more.", "ID"),
    ] = None,
    everybody: Annotated[
        bool, typer.Option("--all", help="Export the models of all clients.")
    ] = False,
    shared: Annotated[
        bool, typer.Option("--shared", help="Export the shared model.")
    ] = False,
    to: Annotated[
        str, option("Format: safetensors, onnx, torch or peft.", "FORMAT")
    ] = "safetensors",
    seed: Seed = None,
    imports: Imports = False,
    out: Annotated[
        Path | None,
        option(
            "Folder for the files; default: RUN/exports, or the folder of the file.",
            "FOLDER",
        ),
    ] = None,
) -> None:
    """Write models of a run as files, with a model card beside each.

    Preprocessing is part of the files, except of those for PyTorch: docs/export.md.

    [bold]Examples[/bold]

    fedblend export runs/first --shared

    fedblend export runs/first --client "hospital 3" --to onnx

    fedblend export runs/first --all --to torch --out models
    """
    from fedblend.errors import RunError
    from fedblend.runs.export.export import export_file, export_models
    from fedblend.runs.saved_run import load

    if folder.is_file():
        if client or everybody or shared or seed is not None:
            raise RunError(f"{folder}: is one model; only --to and --out fit it")
        path = export_file(folder, out or folder.parent, to, imports=imports)
        screen.say(f"model: {path}")
        return
    if not (client or everybody or shared):
        raise RunError("export: say whose model: --client ID, --all or --shared")
    if client and everybody:
        raise RunError("export: --client and --all exclude each other")
    run = load(folder, imports=imports)
    clients = range(len(run.names)) if everybody else client or ()
    paths = export_models(
        run,
        out or folder / "exports",
        to=to,
        clients=list(clients),
        shared=shared,
        seed=seed,
    )
    if len(paths) == 1:
        screen.say(f"model: {paths[0]}", f"model card: {paths[0]}.md")
    else:
        screen.say(f"models: {len(paths)}, each with its card, in {paths[0].parent}")


def predict(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Folder of a run, or an exported .safetensors or .onnx file.",
        ),
    ],
    table: Annotated[
        Path, typer.Argument(metavar="TABLE", help="Rows: .csv, .parquet or .npz.")
    ],
    client: Annotated[
        str | None,
        option(
            "Client, by id or name, whose model predicts all rows; only with the "
            "folder "
            "of a run.",
            "ID",
        ),
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Predict all rows with the shared model.")
    ] = False,
    seed: Seed = None,
    probabilities: Annotated[
        bool,
        typer.Option(
            "--probabilities", help="Add a column with the probability of each class."
        ),
    ] = False,
    imports: Annotated[
        bool,
        typer.Option(
            "--imports", help="Import the code that a run or file names as its model."
        ),
    ] = False,
    out: Annotated[
        Path | None, option("CSV file of the predictions; default: print them.", "FILE")
    ] = None,
) -> None:
    """Predict the rows of a raw table; preprocessing is part of the model.

    In a run, the column that named the clients in training selects the model of each
    row; without it, the shared model predicts. Of times until an event, the risk and
    the probability of survival at three horizons are predicted.

    [bold]Examples[/bold]

    fedblend predict runs/first new.csv --out predictions.csv

    fedblend predict runs/first new.csv --client "hospital 3" --probabilities

    fedblend predict runs/first/exports/shared.onnx new.csv
    """
    from fedblend.errors import RunError
    from fedblend.runs.predict import predict_file
    from fedblend.runs.run_folder import csv_text, write_text
    from fedblend.runs.saved_run import load
    from fedblend.runs.survival_models import MODELS, SurvivalModels

    if out is not None and not out.parent.is_dir():
        raise RunError(f"--out: there is no folder {out.parent}")
    survival = (model / MODELS).is_file()
    if model.is_dir():
        run = SurvivalModels(model) if survival else load(model, imports=imports)
        found = run.predictions(table, client, shared=shared, seed=seed)
    elif client is not None or shared or seed is not None:
        raise RunError(
            f"{model}: is one model; --client, --shared and --seed need a run"
        )
    else:
        found = predict_file(model, table, imports=imports)
    columns = found.columns(probabilities or survival)
    text = csv_text(columns, zip(*columns.values(), strict=True))
    if out is None:
        typer.echo(text, nl=False)
        return
    write_text(out, text)
    screen.say(f"predictions: {out} ({len(found.labels)} rows)")
