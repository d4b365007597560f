# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend advise``: which way of Mixed FL to use, tried and measured."""

from pathlib import Path
from typing import Annotated

import typer

from fedblend.cli import screen
from fedblend.cli.run import compile_cache
from fedblend.cli.show import table


def advise(
    file: Annotated[Path, typer.Argument(help="The TOML file, with [central].")],
    rounds: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Of each trial; those of the file."),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the file."),
    ] = None,
) -> None:
    """Say whether to use parallel, one_way or two_way for a loss at the server.

    Each is tried at five multiples of the rate, and run with ten seeds at its best.
    What decides is the mixture of both losses on training rows; where ways are
    alike, the cheaper one is taken.

    [bold]Example[/bold]

    fedblend advise mixed.toml --rounds 50
    """
    compile_cache()
    from fedblend.config.config import ConfigError, load
    from fedblend.experiments.advise import FACTORS
    from fedblend.experiments.advise import advise as advised
    from fedblend.report.terminal import human_bits

    config = load(file, sets or [])
    try:
        found = advised(config, rounds)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    made = table("how", "rate x", "mixed loss", "clients'", "server's", "down a round")
    for how, trial in found.trials.items():
        if trial.failed:
            made.add_row(how, "", "none", "", "", "")
            continue
        losses = (trial.loss.mean(), trial.federated, trial.central)
        cells = (f"{loss:.4f}" for loss in losses)
        made.add_row(how, f"{trial.factor:g}", *cells, human_bits(trial.bits_down))
    console = screen.console()
    console.print(made)
    for how, trial in found.trials.items():
        if trial.failed:
            console.print(f"{how}: {trial.failed}", markup=False)
        elif trial.factor in (FACTORS[0], FACTORS[-1]):
            console.print(
                f"{how}: the best rate is {trial.factor:g} times the file's, an end of "
                "those tried; another algorithm.rate may be better",
                markup=False,
            )
    console.print(
        f"disagreement: G^2 up to {found.gap:.4g}, B^2 up to {found.ratio:.4g}; noise "
        f"at the start: a client's sigma^2 {float(found.noise.clients):.4g}, the "
        f"server's {float(found.noise.central):.4g}",
        markup=False,
    )
    factor = found.trials[found.how].factor
    rate = "" if factor == 1 else f" at {factor:g} times the rate"
    console.print(f'use central.how = "{found.how}"{rate}: {found.why}.', markup=False)
