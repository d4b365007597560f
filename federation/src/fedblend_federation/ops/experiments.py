# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Submit an experiment to a federation, supervise it to its end, and read its status.

The server runs inside of Flower. If it or the link dies, Flower does not restart it;
this module does, and the server continues from its checkpoint. The status comes from
the folder of the experiment alone: no server is asked.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedblend.config.config import Config, difference, dump, load
from fedblend.errors import RunError
from fedblend.report.measures import list_metrics, main_splits
from fedblend.runs import run_folder
from fedblend.runs.run_folder import Folder, json_text, read_json, write_text
from fedblend_federation.contract import contract_of
from fedblend_federation.flower import processes
from fedblend_federation.ops.audit import entries, entries_since
from fedblend_federation.ops.registration import link_nodes
from fedblend_federation.ops.settings import ServerSettings, client_at
from fedblend_federation.ops.supervisor import is_up
from fedblend_federation.server.checkpoint import (
    Busy,
    ServerCheckpoint,
    read_progress,
    write_nodes,
)
from fedblend_federation.server.run import (
    ENROLL_AGAIN,
    STOP_TEXT,
    STOPPED,
    reason_of_stop,
)

AUDIT = "audit.jsonl"
COUNTS = ("received", "dropped", "rejected")
TROUBLES = ("denied", "refused", "rejected", "began without")
"""Events of a server's audit that people should know of while it runs."""


def status_lines(path: Path) -> list[str]:
    """How far the experiment in a folder is, line by line.

    The audit's line of the round that was counted last, which nodes were denied,
    refused or rejected since, and why, and the newest measures of each model.

    Raises:
        RunError: there is none.
    """
    folder = Folder(path)
    if not folder.config.exists():
        raise RunError(f"{path}: is not the folder of an experiment (no config.toml)")
    config, (round, _) = load(folder.config), read_progress(path / "server")
    rows = run_folder.read_rows(folder) if folder.metrics.exists() else []
    reason, finished = reason_of_stop(path), folder.summary.exists()
    state = "running, or waiting to go on" if reason is None else f"stopped: {reason}"
    last, since = _since_last_round(path / AUDIT)
    counts = ", ".join(f"{sum(row[name] for row in rows)} {name}" for name in COUNTS)
    return [
        f"experiment {config.name}: round {round} of {config.run.rounds}, "
        f"{'finished' if finished else state}",
        f"replies until the newest measurement: {counts}",
        *([last] if last else []),
        *({} if finished else dict.fromkeys(troubles(since))),
        *(_measures(rows[-1]) if rows else []),
    ]


def audit_of(path: Path, client: int | None = None) -> Path:
    """The audit of an experiment's folder, of a node.toml, or the file itself.

    ``client`` is one of those that the node hosts.
    """
    if path.is_dir():
        return path / AUDIT
    if path.suffix == ".toml":
        return client_at(path, client).folder / AUDIT
    return path


def audit_lines(path: Path) -> list[str]:
    """An audit in readable lines, the newest last."""
    return [_readable(entry) for entry in entries(path)]


def _readable(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "(a line that is not as it was written)"
    fields = ", ".join(f"{k} {v}" for k, v in entry["fields"].items() if v != "")
    at = str(entry["time"]).replace("T", " ")[:19]
    return f"{at}  {entry['event']}" + (f": {fields}" if fields else "")


def troubles(found: Iterable[dict[str, Any]]) -> Iterator[str]:
    """What went wrong with nodes, by the lines of a server's audit: who, what, why."""
    for entry in found:
        event, fields = entry["event"], entry["fields"]
        if event not in TROUBLES:
            continue
        who = fields.get("node") or f"client {fields.get('client')}"
        if event == "began without":
            who = f"clients {fields.get('clients')}"
            yield f"the experiment began without {who}: they did not join"
        else:
            yield f"{who} {_SAID[event]}: {fields.get('reason')}"


_SAID = {
    "denied": "may not join",
    "refused": "refuses",
    "rejected": "sent what does not count",
}


def _since_last_round(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """The line of the round that was counted last, and the entries after it."""
    last, since = "", []
    for entry in entries(path) if path.exists() else ():
        if entry is None:
            continue
        since.append(entry)
        if entry["event"] == "round":
            last, since = _readable(entry), []
    return last, since


def _measures(row: dict[str, Any]) -> list[str]:
    """The first split and metric, each model's mean and worst client."""
    lines = []
    for split in main_splits([row])[:1]:
        metric = list_metrics([row], split)[0]
        for model, measured in row["measures"][split].items():
            if metric in measured:
                values = measured[metric]
                lines.append(
                    f"round {row['round']}, {split} {metric} of {model} models: "
                    f"{values['mean']:.3f}, the worst node {values['worst']:.3f} "
                    f"({values['clients']} nodes)"
                )
    return lines


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
        clients_again = json_text({"clients": list(enroll_again)})
        write_text(folder / "server" / ENROLL_AGAIN, clients_again)


def run_experiment(
    settings: ServerSettings,
    folder: Path,
    *,
    log: Callable[[str], None] = lambda line: None,
    attempts: int = 20,
) -> None:
    """Submit an experiment and wait for its end; a server that dies is restarted.

    ``log`` gets a line for every round, and for what nodes refuse.

    Raises:
        RunError: it stopped by itself, and why; or died too often.
    """
    if Folder(folder).summary.exists():
        return
    processes.connect(settings)
    (folder / STOPPED).unlink(missing_ok=True)
    patience = LINK_RETURNS if is_up(settings) else 0.0
    show_troubles, last = _follow(folder / AUDIT, log), -1

    def submit() -> str:
        run = _running(settings, folder)
        if run is None:
            _wait_for_server(folder)
            write_nodes(folder / "server", link_nodes(settings))
            run = processes.submit(settings, folder)
            write_text(folder / RUN, json_text({"run": run}))
        return run

    def is_over() -> bool:
        nonlocal last
        show_troubles()
        over, (round, rounds) = _is_finished(folder), read_progress(folder / "server")
        if round != last:
            last = round
            log(f"round {round} of {rounds}")
        return over

    for attempt in range(attempts):
        run = _retry_request(submit, settings, patience, log)
        log(f"Flower's run {run}" + (f", attempt {attempt + 1}" if attempt else ""))
        status, asked = "", time.monotonic()
        while not _has_ended(status) and not is_over():
            time.sleep(INTERVAL)
            if time.monotonic() - asked < STATUS_INTERVAL:
                continue
            try:
                status = processes.status_of(settings, run)
            except RunError:
                status = "the link does not respond"
            asked = time.monotonic()
        time.sleep(INTERVAL)
        if is_over():
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
    processes.connect(settings)
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
            processes.call(settings, "stop", run, processes.CONNECTION)
        except RunError:
            # It may have ended by itself meanwhile.
            if _running(settings, folder) is not None:
                raise
    _wait_for_server(folder)


def run_id(folder: Path) -> str | None:
    """The id of Flower's newest run of an experiment."""
    return str(read_json(folder / RUN)["run"]) if (folder / RUN).exists() else None


def _retry_request(
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
            gone = processes.UNREACHABLE in str(error) or not is_up(settings)
            if not gone or time.monotonic() >= until:
                raise
        log("the link does not respond; trying again")
        time.sleep(processes.RESTART_AFTER)


def _running(settings: ServerSettings, folder: Path) -> str | None:
    """The id of the run that is working on an experiment right now."""
    run = run_id(folder)
    if run is None or _has_ended(processes.status_of(settings, run)):
        return None
    return run


def _has_ended(status: str) -> bool:
    return status.startswith("finished") or status == "unknown"


def _wait_for_server(folder: Path, within: float = SERVER_ENDS) -> None:
    """Wait until no server has the folder open; one without a link lives on a while."""

    def is_closed() -> bool:
        try:
            ServerCheckpoint(folder / "server").close()
        except Busy:
            return False
        return True

    what = f"{folder}: the end of the last server"
    processes.wait_until(is_closed, within, what)


def _is_finished(folder: Path) -> bool:
    """Whether an experiment has its summary; a ``RunError`` if it stopped before."""
    reason = reason_of_stop(folder)
    if reason is not None:
        raise RunError(reason)
    return Folder(folder).summary.exists()
