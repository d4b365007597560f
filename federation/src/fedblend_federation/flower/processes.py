# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Flower's programs as fedblend starts them: the SuperLink, SuperNodes, the CLI.

Unless its environment says otherwise, Flower sends telemetry, asks for updates and
installs packages from the network; even its ``--help`` does. The output of a program
goes to a file, never to a pipe, which its children would inherit and keep open. The
link accepts a node's signature for some minutes only, so clocks are compared here, too.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from fedblend.errors import RunError
from fedblend_federation.ops.settings import NodeSettings, ServerSettings

SILENCE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Variables that keep Flower from calling home."""
CONNECTION = "fedblend"
"""The name of the link in Flower's own configuration."""
UNREACHABLE = "Connection to the SuperLink is unavailable"
"""What Flower's CLI prints when the link is not there."""
RESTART_AFTER = 5.0
"""Seconds before a program that ended is started again."""
MAX_LOG = 20_000_000
"""Bytes of a log; the bytes before are in a second file, and those before are gone."""
_BOUND = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Becomes another program, which the kernel kills when its parent ends. Not a function
between fork and exec: a process with JAX must not fork in Python."""


def environment(folder: Path) -> dict[str, str]:
    """The variables for a program of Flower whose state is in that folder."""
    return {**SILENCE, "FLWR_HOME": str(folder / "flwr")}


def program(name: str) -> str:
    """The path of one of Flower's programs, beside this Python or on the path."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RunError(f"{name}: is not installed; pip install 'fedblend[federation]'")
    return found


def variables(folder: Path) -> dict[str, str]:
    """The whole environment of such a program.

    Flower looks for its other programs by name, on the path.
    """
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    return {**os.environ, **environment(folder), "PATH": path}


def start(command: Sequence[str], folder: Path, log: Path) -> subprocess.Popen:
    """Start a program with its own group of processes, its output into a file.

    The kernel kills the program when the thread that started it ends, however it does.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(log, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-ISc", _BOUND, str(os.getpid()), *command],
            env=variables(folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def rotate(log: Path) -> None:
    """Keep one older part of a log that has grown; who writes to it appends."""
    if log.exists() and log.stat().st_size > MAX_LOG:
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)


def stop(process: subprocess.Popen, timeout: float = 10.0) -> None:
    """End a program and all that it started; ``timeout`` is in seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def link_command(settings: ServerSettings) -> list[str]:
    """Flower's SuperLink: TLS, keys of nodes, a database that outlives it."""
    options = {
        "--host": settings.link.host,
        "--port": settings.link.port,
        "--ssl-certfile": settings.certificate,
        "--ssl-keyfile": settings.key,
        "--ssl-ca-certfile": settings.ca,
        "--database": settings.folder / "link.db",
    }
    flags = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
    return [*guard_program("flower-superlink"), *_words(options), *flags]


def guard_program(name: str) -> list[str]:
    """One of Flower's programs, with the guard before the port that it opens."""
    program(name)
    return [sys.executable, "-m", "fedblend_federation.flower.port_guard", name]


def supernode_command(settings: NodeSettings, port: int) -> list[str]:
    """Flower's SuperNode on a free port: its key, and the socket of the worker."""
    options = {
        "--superlink": settings.server,
        "--root-certificates": settings.ca,
        "--auth-supernode-private-key": settings.key,
        "--port": port,
        "--node-config": f'socket="{settings.worker_socket}"',
    }
    return [*guard_program("flower-supernode"), *_words(options)]


def _words(options: Mapping[str, object]) -> list[str]:
    return [str(word) for option in options.items() for word in option]


def node_command(path: Path, part: str = "node") -> list[str]:
    """The process of the node whose node.toml this is: all of it, or its worker."""
    return [sys.executable, "-m", "fedblend", "federation", part, str(path)]


def free_port() -> int:
    """A port of this machine that is free."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]


def connect(settings: ServerSettings) -> None:
    """Write the configuration by which Flower's CLI finds the link."""
    home = Path(environment(settings.folder)["FLWR_HOME"])
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "{settings.link}"\nroot-certificates = "{settings.ca}"\n'
    )


def call(settings: ServerSettings, *arguments: str) -> dict[str, Any]:
    """The JSON that Flower's CLI prints; its exit code says nothing.

    Raises:
        RunError: the command failed, and why.
    """
    done = subprocess.run(
        [program("flwr"), *arguments, "--format", "json"],
        env=variables(settings.folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    try:
        found = json.loads(done.stdout[done.stdout.find("{") :])
    except ValueError:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
        raise RunError(f"flwr {arguments[0]}: {last[0][:300]}") from None
    if not found.get("success", True):
        why = str(found.get("error-message", found))
        raise RunError(f"flwr {arguments[0]}: {' '.join(why.split())[:300]}")
    return found


def app_folder(settings: ServerSettings) -> Path:
    """A copy of the app that Flower sends to the nodes."""
    place = settings.folder / "app"
    source = Path(__file__).with_name("app")
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
    return place


def submit(settings: ServerSettings, folder: Path) -> str:
    """Start an experiment; returns the id of Flower's run."""
    config = f'folder="{folder.absolute()}"'
    app = str(app_folder(settings))
    found = call(settings, "run", app, CONNECTION, "--run-config", config)
    return str(found["run-id"])


def status_of(settings: ServerSettings, run: str) -> str:
    """Flower's status of a run: "running", "finished:completed" and so on.

    "unknown" where the link has lost its database.
    """
    try:
        runs = call(settings, "ls", CONNECTION, "--run-id", run).get("runs", [])
    except RunError as error:
        if "Run ID not found" not in str(error):
            raise
        runs = []
    found = [one for one in runs if str(one.get("run-id")) == run]
    return str(found[0].get("status", "unknown")) if found else "unknown"


def wait_until(
    ready: Callable[[], bool], within: float, what: str, every: float = 0.3
) -> None:
    """Wait for something; a ``RunError`` if it does not come.

    Args:
        ready: whether it is there.
        within: seconds.
        what: names it.
        every: seconds between two calls of ``ready``.
    """
    started = time.monotonic()
    while not ready():
        if time.monotonic() - started > within:
            raise RunError(f"{what}: not there after {within:g} s")
        time.sleep(every)


@contextlib.contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Inside of the block SIGTERM raises KeyboardInterrupt, like Ctrl-C."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


MAX_BEHIND, MAX_AHEAD = 250.0, 4.0
"""Seconds by which a clock may be behind the link's, or ahead of it, without a remark;
Flower refuses signatures beyond 300, and 5."""


def clock_remark(date: str | None) -> str | None:
    """How far this machine's clock is off, if the link would accept no signature.

    Args:
        date: the header ``Date`` of a response, None if it has none.
    """
    try:
        there = parsedate_to_datetime(date or "")
    except ValueError:
        return None
    ahead = time.time() - there.timestamp()
    if -MAX_BEHIND < ahead < MAX_AHEAD:
        return None
    where = "ahead of" if ahead > 0 else "behind"
    return f"this machine's clock is {abs(ahead):.0f} s {where} the link's"
