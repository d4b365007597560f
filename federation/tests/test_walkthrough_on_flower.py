# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/federation.md to the first result, with the programs that the
units run, on real Flower.

A minute or two. ``pytest -n 0 -m slow federation/tests/test_walkthrough*``
"""

import contextlib
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from walkthrough import ROUNDS, NewUser, commands

from fedblend.runs.run_folder import Folder, read_summary
from fedblend_federation.flower import processes
from fedblend_federation.ops.local_cluster import processes_of

pytestmark = pytest.mark.slow
WITHIN = 300.0
"""Seconds within which everything must be up, also on a busy machine."""


def _lines(unit: Path, key: str) -> list[str]:
    lines = unit.read_text().splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{key}=")]


def _start(unit: Path) -> subprocess.Popen:
    """Start what a unit of systemd starts, as this user."""
    (command,), (folder,) = _lines(unit, "ExecStart"), _lines(unit, "WorkingDirectory")
    variables = dict(line.split("=", 1) for line in _lines(unit, "Environment"))
    with unit.with_suffix(".log").open("ab") as output:
        return subprocess.Popen(
            shlex.split(command),
            cwd=folder,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


@contextlib.contextmanager
def _services(user: NewUser) -> Iterator[None]:
    running = []
    try:
        for name in ("server", "alice", "bob", "carol"):
            units = sorted(user.home(name).glob("*.service"), reverse=True)
            running += [_start(unit) for unit in units]  # a worker before its node
        yield
    finally:
        for process in running:
            processes.stop(process)
        for name in ("server", "alice", "bob", "carol"):
            for number in processes_of(user.home(name) / "state"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, 9)


def test_from_nothing_to_a_first_result(tmp_path):
    user = NewUser(tmp_path, processes.free_port())
    *setup, run = commands()
    for command in setup:
        done = user.run(command)
        assert done is None or (done.returncode, done.stderr) == (0, ""), command
    server = user.home("server")
    with _services(user):

        def all_online() -> bool:
            words = ("status", "--server", str(server / "server.toml"))
            shown = user.fedblend(tmp_path, "federation", *words)
            return shown.stdout.count(": online") == 3

        processes.wait_until(all_online, WITHIN, "the nodes", every=2.0)
        done = user.run(run)
        assert done is not None
        assert done.returncode == 0, done.stderr
        found = user.fedblend(tmp_path, "federation", "doctor", str(server))
    assert "personal" in done.stdout
    summary = read_summary(Folder(server / "runs" / "trial"))
    assert summary["runs"][0]["round"] == ROUNDS
    faults = [line for line in found.stdout.splitlines() if line.startswith("fault")]
    # No proxy is before the link here; that is all that is wrong.
    assert all(f"https://127.0.0.1:{user.port}/" in line for line in faults), faults
