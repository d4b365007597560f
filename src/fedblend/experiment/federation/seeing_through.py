# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Submitting an experiment to a federation, and seeing it through.

The server's half runs inside of Flower. If it dies, or the link does, Flower does not
start it anew; this does, and it goes on from its books.
"""

import time
from collections.abc import Callable
from pathlib import Path

from fedblend.experiment import toml
from fedblend.experiment.config import Config, check, difference, dump
from fedblend.experiment.federation import processes
from fedblend.experiment.federation.agreement import nodes_of
from fedblend.experiment.federation.leading import STOPPED, progress
from fedblend.experiment.federation.settings import Server
from fedblend.experiment.outputs import Folder, write_text
from fedblend.experiment.section import RunError

LOOK = 1.0
"""Seconds between two looks at a run."""


def open_folder(folder: Path, config: Config, settings: Server, resume: bool) -> None:
    """Make the folder of an experiment ready, or check that it is this one's."""
    clients = nodes_of(config).clients
    if clients != len(settings.nodes):
        raise RunError(
            f"data.clients: {clients}, and the federation has {len(settings.nodes)} "
            "nodes"
        )
    place = Folder(folder)
    if not place.config.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_text(place.config, dump(config))
        return
    if not resume:
        raise RunError(
            f"{folder}: holds an experiment already; --resume goes on with it, --out "
            "names another folder"
        )
    other = difference(check(toml.read(place.config), str(place.config)), config)
    if other:
        raise RunError(f"{folder}: holds an experiment of another config: {other}")


def run_experiment(
    settings: Server,
    folder: Path,
    *,
    on_step: Callable[[int, int], None] = lambda round, rounds: None,
    say: Callable[[str], None] = lambda line: None,
    shared_seed: bool = False,
    attempts: int = 20,
) -> None:
    """Submit an experiment and see it through; a server that dies is started anew.

    Raises:
        RunError: it stopped by itself, and why; or died too often.
    """
    processes.connect(settings)
    (folder / STOPPED).unlink(missing_ok=True)
    for attempt in range(attempts):
        run = processes.submit(settings, folder, shared_seed=shared_seed)
        say(f"Flower's run {run}" + (f", attempt {attempt + 1}" if attempt else ""))
        state = ""
        while not state.startswith("finished") and not _over(folder):
            on_step(*progress(folder))
            time.sleep(LOOK)
            try:
                state = processes.state_of(settings, run)
            except RunError:
                state = "the link does not answer"
        time.sleep(LOOK)
        if _over(folder):
            on_step(*progress(folder))
            return
        say(f"the server ended ({state}); it goes on from its books")
    raise RunError(f"{folder}: the server died {attempts} times")


def _over(folder: Path) -> bool:
    """Whether an experiment has its summary; if it stopped, say why."""
    if (folder / STOPPED).exists():
        raise RunError((folder / STOPPED).read_text().strip())
    return Folder(folder).summary.exists()
