# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend advise``: which Mixed FL method to use, tried and measured."""

from typing import Annotated

from fedblend.cli import screen
from fedblend.cli.screen import ConfigFile, Settings, option


def advise(
    file: ConfigFile,
    rounds: Annotated[
        int | None, option("Rounds of each trial; default: as in the file.", "N", min=1)
    ] = None,
    sets: Settings = None,
) -> None:
    """Advise parallel, one_way or two_way for a loss at the server.

    For a file with the table [central]. Each Mixed FL method is tried at five multiples
    of the rate, then run with ten seeds at its best one. The mixture of both losses on
    training rows decides; among methods that are equally good the cheapest is advised.

    [bold]Example[/bold]

    fedblend advise mixed.toml --rounds 50
    """
    config = screen.load(file, sets)
    from fedblend.report.terminal import human_bits
    from fedblend.runs.advise import FACTORS
    from fedblend.runs.advise import advise as advised

    with screen.errors_of(file):
        found = advised(config, rounds)
    heads = ("how", "rate x", "mixed loss", "clients'", "server's", "down a round")
    made, lines = screen.table(*heads), []
    for how, trial in found.trials.items():
        if trial.failed:
            made.add_row(how, "", "none", "", "", "")
            lines.append(f"{how}: {trial.failed}")
            continue
        losses = (trial.loss.mean(), trial.federated, trial.central)
        cells = (f"{loss:.4f}" for loss in losses)
        made.add_row(how, f"{trial.factor:g}", *cells, human_bits(trial.bits_down))
        if trial.factor in (FACTORS[0], FACTORS[-1]):
            lines.append(
                f"{how}: the best rate is {trial.factor:g} times the file's, the first "
                "or last of those tried; another algorithm.rate may be better"
            )
    factor = found.trials[found.how].factor
    rate = "" if factor == 1 else f" at {factor:g} times the rate"
    screen.console().print(made)
    screen.say(
        *lines,
        f'use central.how = "{found.how}"{rate}: {found.why}.',
    )
