# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Submitting an experiment to a federation, and supervising it to its end.

The server runs inside of Flower. If it dies, or the link does, Flower does not restart
it; this module does, and the server goes on from its checkpoint.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from fedblend.config.config import Config, difference, dump, load
from fedblend.errors import RunError
from fedblend.runs.run_folder import Folder, as_json, read_json, write_text
from fedblend_federation.contract import contract_of
from fedblend_federation.ops import flwr_processes
from fedblend_federation.ops.audit import entries_since
from fedblend_federation.ops.registration import registered
from fedblend_federation.ops.settings import ServerSettings
from fedblend_federation.ops.status import AUDIT, troubles
from fedblend_federation.ops.supervisor import is_up
from fedblend_federation.server.checkpoint import Busy, ServerCheckpoint
from fedblend_federation.server.experiment import read_progress, write_nodes
from fedblend_federation.server.run import (
    ENROLL_AGAIN,
    STOP_TEXT,
    STOPPED,
    reason_of_stop,
)

RUN = "flower.json"
"""Has the id of Flower's newest run of an experiment."""
SERVER_ENDS = 120.0
"""Seconds within which a server ends that has lost its link, or was stopped."""
TELLS_NODES = 40.0
"""Seconds within which a server that was asked to stop has told its nodes, and ends."""
INTERVAL = 1.0
"""Seconds between two reads of the progress."""
LINK_RETURNS = 90.0
"""Seconds within which a link that was up, and died, is up again."""
STATUS_INTERVAL = 10.0
"""Seconds between two questions to the link: each starts a process of Flower's."""


def open_folder(
    folder: Path,
    config: Config,
    settings: ServerSettings,
    resume: bool,
    enroll_again: Sequence[int] = (),
) -> None:
    """Prepare the folder of an experiment, or check that it holds this one.

    Args:
        folder: of results.
        config: what to run.
        settings: of the federation.
        resume: whether it may hold the experiment already.
        enroll_again: clients that have lost their states.
    """
    clients = contract_of(config).clients
    if clients != settings.clients:
        nodes = len(settings.nodes)
        some = "nodes" if nodes == settings.clients else f"clients on {nodes} nodes"
        raise RunError(
            f"data.clients: {clients}, and the federation has {settings.clients} {some}"
        )
    if enroll_again and not (resume and set(enroll_again) <= set(range(clients))):
        raise RunError(
            f"--enroll-again: {', '.join(map(str, enroll_again))}: goes with --resume, "
            f"for clients in 0..{clients - 1}"
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
    other = difference(load(place.config), config)
    if other:
        raise RunError(f"{folder}: holds an experiment of another config: {other}")
    if enroll_again:
        clients_again = as_json({"clients": list(enroll_again)})
        write_text(folder / "server" / ENROLL_AGAIN, clients_again)


def run_experiment(
    settings: ServerSettings,
    folder: Path,
    *,
    on_step: Callable[[int, int], None] = lambda round, rounds: None,
    log: Callable[[str], None] = lambda line: None,
    attempts: int = 20,
) -> None:
    """Submit an experiment and wait for its end; a server that dies is restarted.

    Raises:
        RunError: it stopped by itself, and why; or died too often.
    """
    if Folder(folder).summary.exists():
        return
    flwr_processes.connect(settings)
    (folder / STOPPED).unlink(missing_ok=True)
    patience = LINK_RETURNS if is_up(settings) else 0.0
    show_troubles = _follow(folder / AUDIT, log)

    def submitted() -> str:
        run = _running(settings, folder)
        if run is None:
            _wait_for_server(folder)
            write_nodes(folder / "server", registered(settings))
            run = flwr_processes.submit(settings, folder)
            write_text(folder / RUN, as_json({"run": run}))
        return run

    def finished() -> bool:
        show_troubles()
        return _finished(folder)

    for attempt in range(attempts):
        run = _with_link(submitted, settings, patience, log)
        log(f"Flower's run {run}" + (f", attempt {attempt + 1}" if attempt else ""))
        status, asked = "", time.monotonic()
        while not _has_ended(status) and not finished():
            on_step(*read_progress(folder / "server"))
            time.sleep(INTERVAL)
            if time.monotonic() - asked < STATUS_INTERVAL:
                continue
            try:
                status = flwr_processes.status_of(settings, run)
            except RunError:
                status = "the link does not respond"
            asked = time.monotonic()
        time.sleep(INTERVAL)
        if finished():
            on_step(*read_progress(folder / "server"))
            return
        log(f"the server ended ({status}); it goes on from its checkpoint")
    raise RunError(f"{folder}: the server died {attempts} times")


def _follow(audit: Path, log: Callable[[str], None]) -> Callable[[], None]:
    """A function that logs what nodes refuse, each line once, from now on."""
    seen = set[str]()
    _, offset = entries_since(audit, 0)

    def show() -> None:
        nonlocal offset
        found, offset = entries_since(audit, offset)
        for line in troubles(found):
            if line not in seen:
                log(line)
            seen.add(line)

    return show


def stop(settings: ServerSettings, folder: Path) -> None:
    """Stop an experiment; its checkpoint is whole, and it can go on from there.

    Raises:
        RunError: it is not running.
    """
    flwr_processes.connect(settings)
    run = _running(settings, folder)
    if run is None:
        raise RunError(f"{folder}: no experiment is running there")
    # The server sees this file, tells the nodes, and ends; and a process that waits for
    # the experiment does not restart it.
    write_text(folder / STOPPED, STOP_TEXT.format(folder) + "\n")
    with suppress(RunError):
        _wait_for_server(folder, TELLS_NODES)
    if _running(settings, folder) is not None:
        try:
            flwr_processes.call(settings, "stop", run, flwr_processes.CONNECTION)
        except RunError:
            # It may have ended by itself meanwhile.
            if _running(settings, folder) is not None:
                raise
    _wait_for_server(folder)


def run_id(folder: Path) -> str | None:
    """The id of Flower's newest run of an experiment."""
    return str(read_json(folder / RUN)["run"]) if (folder / RUN).exists() else None


def _with_link(
    request: Callable[[], str],
    settings: ServerSettings,
    patience: float,
    log: Callable[[str], None],
) -> str:
    """The result of a request to the link; if the link died meanwhile, tried again."""
    until = time.monotonic() + patience
    while True:
        try:
            return request()
        except RunError as error:
            gone = flwr_processes.UNREACHABLE in str(error) or not is_up(settings)
            if not gone or time.monotonic() >= until:
                raise
        log("the link does not respond; trying again")
        time.sleep(flwr_processes.RESTART_AFTER)


def _running(settings: ServerSettings, folder: Path) -> str | None:
    """The id of the run that is working on an experiment right now."""
    run = run_id(folder)
    if run is None or _has_ended(flwr_processes.status_of(settings, run)):
        return None
    return run


def _has_ended(status: str) -> bool:
    return status.startswith("finished") or status == "unknown"


def _wait_for_server(folder: Path, within: float = SERVER_ENDS) -> None:
    """Wait until no server has the folder open; one without a link lives on a while."""

    def closed() -> bool:
        try:
            ServerCheckpoint(folder / "server").close()
        except Busy:
            return False
        return True

    what = f"{folder}: the end of the last server"
    flwr_processes.wait_until(closed, within, what)


def _finished(folder: Path) -> bool:
    """Whether an experiment has its summary; a ``RunError`` if it stopped before."""
    reason = reason_of_stop(folder)
    if reason is not None:
        raise RunError(reason)
    return Folder(folder).summary.exists()
