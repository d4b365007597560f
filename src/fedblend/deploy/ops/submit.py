# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Submitting an experiment to a federation, and seeing it through.

The server's half runs inside of Flower. If it dies, or the link does, Flower does not
start it anew; this does, and it goes on from its books.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedblend.config import toml
from fedblend.config.config import Config, check, difference, dump
from fedblend.deploy.contract import nodes_of
from fedblend.deploy.ops import flwr_processes
from fedblend.deploy.ops.settings import Server
from fedblend.deploy.ops.supervisor import answers
from fedblend.deploy.server.checkpoint import Busy, ServerCheckpoint
from fedblend.deploy.server.run import AGAIN, STOPPED, progress, reason_of_stop
from fedblend.errors import RunError
from fedblend.experiments.run_folder import Folder, as_json, read_json, write_text

RUN = "flower.json"
"""Has the number that Flower gave to the newest run of an experiment."""
LINGERS = 120.0
"""Seconds within which a server ends that has lost its link, or was told to stop."""
LOOK = 1.0
"""Seconds between two looks at the folder of an experiment."""
COMES_BACK = 90.0
"""Seconds within which a link that was there, and died, is there again."""
ASK = 10.0
"""Seconds between two questions to the link: each is a process of Flower's."""


def open_folder(
    folder: Path,
    config: Config,
    settings: Server,
    resume: bool,
    again: Sequence[int] = (),
) -> None:
    """Make the folder of an experiment ready, or check that it is this one's.

    Args:
        folder: of results.
        config: what to run.
        settings: of the federation.
        resume: whether it may hold the experiment already.
        again: clients that have lost their states and are to be enrolled again.
    """
    clients = nodes_of(config).clients
    if clients != len(settings.nodes):
        raise RunError(
            f"data.clients: {clients}, and the federation has {len(settings.nodes)} "
            "nodes"
        )
    if again and (not resume or not set(again) <= set(range(clients))):
        raise RunError(
            f"--enroll-again: {', '.join(map(str, again))}: goes with --resume, for "
            f"clients in 0..{clients - 1}"
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
    if again:
        write_text(folder / "server" / AGAIN, as_json({"clients": list(again)}))


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
    if Folder(folder).summary.exists():
        return
    flwr_processes.connect(settings)
    (folder / STOPPED).unlink(missing_ok=True)
    patience = COMES_BACK if answers(settings) else 0.0

    def number() -> str:
        run = _going_on(settings, folder)
        if run is None:
            _wait_for_books(folder)
            run = flwr_processes.submit(settings, folder, shared_seed=shared_seed)
            write_text(folder / RUN, as_json({"run": run}))
        return run

    for attempt in range(attempts):
        run = _patiently(number, settings, patience, say)
        say(f"Flower's run {run}" + (f", attempt {attempt + 1}" if attempt else ""))
        state, asked = "", time.monotonic()
        while not _ended(state) and not _over(folder):
            on_step(*progress(folder))
            time.sleep(LOOK)
            if time.monotonic() - asked < ASK:
                continue
            try:
                state = flwr_processes.state_of(settings, run)
            except RunError:
                state = "the link does not answer"
            asked = time.monotonic()
        time.sleep(LOOK)
        if _over(folder):
            on_step(*progress(folder))
            return
        say(f"the server ended ({state}); it goes on from its books")
    raise RunError(f"{folder}: the server died {attempts} times")


def stop(settings: Server, folder: Path) -> None:
    """Have an experiment stopped; its books are whole, and it can go on from them.

    Raises:
        RunError: it does not run.
    """
    flwr_processes.connect(settings)
    run = _going_on(settings, folder)
    if run is None:
        raise RunError(f"{folder}: no experiment is running there")
    # Left first: whoever sees the experiment through must not start it anew.
    write_text(folder / STOPPED, f"{folder}: was stopped; --resume goes on\n")
    flwr_processes.call(settings, "stop", run, flwr_processes.CONNECTION)
    _wait_for_books(folder)


def run_number(folder: Path) -> str | None:
    """The number of the newest of Flower's runs for an experiment."""
    return str(read_json(folder / RUN)["run"]) if (folder / RUN).exists() else None


def _patiently(
    question: Callable[[], str],
    settings: Server,
    patience: float,
    say: Callable[[str], None],
) -> str:
    """What the link answers; if it died meanwhile, when it is back."""
    until = time.monotonic() + patience
    while True:
        try:
            return question()
        except RunError as error:
            gone = flwr_processes.UNREACHABLE in str(error) or not answers(settings)
            if not gone or time.monotonic() >= until:
                raise
        say("the link does not answer; it is asked again")
        time.sleep(flwr_processes.AGAIN)


def _going_on(settings: Server, folder: Path) -> str | None:
    """The run that is working on an experiment right now."""
    run = run_number(folder)
    if run is None or _ended(flwr_processes.state_of(settings, run)):
        return None
    return run


def _ended(state: str) -> bool:
    return state.startswith("finished") or state == "unknown"


def _wait_for_books(folder: Path) -> None:
    """A server that has lost its link lives on for a while, with its books open."""

    def closed() -> bool:
        try:
            ServerCheckpoint(folder / "server").close()
        except Busy:
            return False
        return True

    flwr_processes.wait_until(closed, LINGERS, f"{folder}: the end of the last server")


def _over(folder: Path) -> bool:
    """Whether an experiment has its summary; if it stopped, say why."""
    reason = reason_of_stop(folder)
    if reason is not None:
        raise RunError(reason)
    return Folder(folder).summary.exists()
