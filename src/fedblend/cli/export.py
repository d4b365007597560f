# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend export``: models of a run as files for production."""

from pathlib import Path
from typing import Annotated

import typer

from fedblend.cli import screen
from fedblend.cli.screen import Imports, SavedRun, Seed, option


def export(
    folder: SavedRun,
    client: Annotated[
        list[str] | None,
        option("A client, by id or name; may be given several times.", "ID"),
    ] = None,
    everybody: Annotated[
        bool, typer.Option("--all", help="The models of all clients.")
    ] = False,
    shared: Annotated[bool, typer.Option("--shared", help="The shared model.")] = False,
    to: Annotated[
        str, option("safetensors, npz, onnx, torch or peft.", "FORMAT")
    ] = "safetensors",
    seed: Seed = None,
    imports: Imports = False,
    out: Annotated[
        Path | None, option("Folder of the files; default: RUN/exports.", "FOLDER")
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
    from fedblend.runs.export.export import export_models
    from fedblend.runs.saved_run import load

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
