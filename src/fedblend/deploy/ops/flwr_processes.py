# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Flower's programs as we start them: quiet, on loopback, watched.

A link that answers, a node with its warm process, a run that is submitted. All of them
get the environment of ``environment``; their output goes to files, never to a pipe,
which their children would inherit and keep open.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedblend.deploy.ops.flwr_environment import environment
from fedblend.deploy.ops.settings import Node, Server
from fedblend.errors import RunError

CONNECTION = "fedblend"
"""What the link is called in Flower's own configuration."""
UNREACHABLE = "Connection to the SuperLink is unavailable"
"""What Flower's command line says when nobody is there."""
AGAIN = 5.0
"""Seconds before a program that ended is started anew."""


def program(name: str) -> str:
    """The path of one of Flower's programs, beside this Python or on the path."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RunError(f"{name}: is not installed; pip install 'fedblend[flower]'")
    return found


def variables(folder: Path) -> dict[str, str]:
    """The environment of a program of Flower's whose state is in a folder.

    Flower looks for its other programs by name, on the path.
    """
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    return {**os.environ, **environment(folder), "PATH": path}


def start(command: Sequence[str], folder: Path, log: Path) -> subprocess.Popen:
    """Start a program with its own group of processes, its words into a file."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(log, "ab") as words:
        return subprocess.Popen(
            command,
            env=variables(folder),
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            start_new_session=True,
        )


def stop(process: subprocess.Popen, patience: float = 10.0) -> None:
    """End a program and all that it started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def link_command(settings: Server) -> list[str]:
    """The link: TLS, keys of nodes, a database that outlives it."""
    return [
        program("flower-superlink"),
        "--host",
        settings.link.host,
        "--port",
        str(settings.link.port),
        "--ssl-certfile",
        str(settings.certificate),
        "--ssl-keyfile",
        str(settings.key),
        "--ssl-ca-certfile",
        str(settings.ca),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
        "--database",
        str(settings.folder / "link.db"),
    ]


def node_command(settings: Node, port: int, path: Path | None = None) -> list[str]:
    """Flower's half of a node: its key, and where messages are handed in.

    Args:
        settings: of the node.
        port: one that nobody listens on.
        path: of node.toml, if messages may be answered without the warm process.
    """
    words = f'socket="{settings.socket}"'
    if path is not None:
        words += f' settings="{path.absolute()}"'
    return [
        program("flower-supernode"),
        "--superlink",
        str(settings.server),
        "--root-certificates",
        str(settings.ca),
        "--auth-supernode-private-key",
        str(settings.key),
        "--port",
        str(port),
        "--node-config",
        words,
    ]


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]


def connect(settings: Server) -> None:
    """Tell Flower's command line where the link is."""
    home = Path(environment(settings.folder)["FLWR_HOME"])
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "{settings.link}"\nroot-certificates = "{settings.ca}"\n'
    )


def call(settings: Server, *arguments: str) -> dict[str, Any]:
    """What Flower's command line answers; its exit code says nothing.

    Raises:
        RunError: it did not do it, and why.
    """
    done = subprocess.run(
        [program("flwr"), *arguments, "--format", "json"],
        env=variables(settings.folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    words = done.stdout[done.stdout.find("{") :]
    try:
        said = json.loads(words)
    except ValueError:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no answer"]
        raise RunError(f"flwr {arguments[0]}: {last[0][:300]}") from None
    if not said.get("success", True):
        why = str(said.get("error-message", said))
        raise RunError(f"flwr {arguments[0]}: {' '.join(why.split())[:300]}")
    return said


def app_folder(settings: Server) -> Path:
    """A copy of the app that Flower hands to the nodes."""
    place = settings.folder / "app"
    source = Path(__file__).with_name("app")
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
    return place


def submit(settings: Server, folder: Path, *, shared_seed: bool = False) -> str:
    """Start an experiment; the answer is the number of Flower's run."""
    config = f'folder="{folder.absolute()}" shared-seed={str(shared_seed).lower()}'
    said = call(
        settings,
        "run",
        str(app_folder(settings)),
        CONNECTION,
        "--run-config",
        config,
    )
    return str(said["run-id"])


def state_of(settings: Server, run: str) -> str:
    """What Flower says of a run: "running", "finished:completed" and so on.

    A link that has lost its database knows none: "unknown".
    """
    try:
        said = call(settings, "ls", CONNECTION, "--run-id", run)
    except RunError as error:
        if "Run ID not found" not in str(error):
            raise
        said = {}
    found = [one for one in said.get("runs", []) if str(one.get("run-id")) == run]
    return str(found[0].get("status", "unknown")) if found else "unknown"


def wait_until(
    ready: Callable[[], bool], within: float, what: str, every: float = 0.3
) -> None:
    """Wait for something, or say in a line that it did not come."""
    begun = time.monotonic()
    while not ready():
        if time.monotonic() - begun > within:
            raise RunError(f"{what}: not there after {within:g} s")
        time.sleep(every)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """A termination signal ends what is inside like Ctrl-C does."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
