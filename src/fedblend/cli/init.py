# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend init`` and ``fedblend demo``: the first minute."""

from pathlib import Path
from typing import Annotated

import typer

from fedblend.cli import screen

TEMPLATE = """\
# A run of fedblend. Start it with: fedblend run {file}
version = 1
name = "{name}"              # results go to runs/{name}

[data]
source = "digits"           # fedblend list datasets; or file = "my.csv" with target,
                            # client (a column that names the client) and inputs
partition = "classes_per_client"  # or iid, contiguous, class_pairs, dirichlet, shards,
clients = 40                      # by_key (clients of the data itself), file
classes = 2                 # of every client
validation = 0.0            # fraction of every client's rows held out to tune
test = 0.2                  # ... held out to test, or "official"
# unseen = 0.1              # fraction of clients that only join at the end
seed = 0                    # of the partition

[model]
name = "softmax"            # fedblend list models
l2 = 0.0                    # strength/2 |params|^2 is added to the loss

[algorithm]
name = "finetune"           # fedblend list algorithms
rate = 0.1                  # plain SGD; or
# optimizer = {{ name = "adam", rate = 0.01 }}   # sgd, momentum, adam, adamw, yogi, ...
# schedule = {{ name = "cosine", unit = "round", over = 100 }}
steps = 10                  # local steps of a round (a list gives each client its own);
# epochs = 1                # or passes over the client's rows
batch_size = 20             # or "all"
finetune = {{ rate = 0.1, epochs = 2, batch_size = 20 }}   # finetune's own local steps

[run]
rounds = 100
cohort = 20                 # clients of a round; all of them if left out
seed = 0                    # or several, side by side: [0, 1, 2]
every = 10                  # rounds between two measurements and checkpoints
# store = "disk"            # client states: auto, device, host, disk
# dropout = 0.1             # probability that a chosen client is not heard
# reduction = "median"      # or mean, trimmed_mean
# precision = "float64"

[measure]
splits = ["train", "test"]
local = true                # also train every client alone, to its best round, to
                            # compare with (a number: for so many rounds)
# on = 1000                 # measure a fixed sample of clients
# metrics = ["loss", "accuracy", "recall@3"]
"""


def init(
    file: Annotated[Path, typer.Argument(help="Where to write it.")] = Path(
        "first.toml"
    ),
) -> None:
    """Write a commented configuration that can be run as it is.

    [bold]Example[/bold]

    fedblend init first.toml && fedblend run first.toml
    """
    from fedblend.config.schema.table import RunError

    if file.exists():
        raise RunError(f"{file}: exists already and is not overwritten")
    text = TEMPLATE.format(file=file, name=file.stem.replace('"', "") or "first")
    with file.open("x") as target:
        target.write(text)
    typer.echo(f"wrote {file}; run it with: fedblend run {file}")


def demo(
    out: Annotated[Path, typer.Option(help="Folder of results.")] = Path("runs/demo"),
) -> None:
    """Compare training alone, FedAvg, fine-tuning, FLIX and APFL on digits.

    [bold]Example[/bold]

    fedblend demo --out runs/demo
    """
    from fedblend.cli.run import compile_cache

    compile_cache()
    from fedblend.experiments.demo import demo as show_demo

    try:
        show_demo(out, screen.console())
    except KeyboardInterrupt:
        screen.note("interrupted")
        raise typer.Exit(screen.INTERRUPTED) from None
