# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Real Flower, and a node that replies with nonsense: named, counted, left out.

Minutes: run with ``-m slow``.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from configured import POLICY, apfl_on_nodes, write_rows
from lying_worker import SPOILT
from replay import absences, models, replayed

from fedblend.config import toml
from fedblend.config.config import check
from fedblend.runs import run_folder
from fedblend_federation import worker
from fedblend_federation.flower import processes
from fedblend_federation.ops.experiments import open_folder, run_experiment
from fedblend_federation.ops.local_cluster import local_cluster, processes_of

pytestmark = pytest.mark.slow
NAMES, LIAR = ("alice", "bob", "carol"), 1
ROUNDS = max(SPOILT) + 2
CONFIG = (
    apfl_on_nodes("lied to", len(NAMES), ROUNDS)
    + """[federation]
deadline = 90.0
quorum = 0.6
longest_update = 50.0
"""
)


@contextlib.contextmanager
def lying(home: Path, settings):
    """In place of the worker of a node, one that lies."""
    for number in processes_of(home):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
            if b"worker" in words:
                os.kill(number, signal.SIGKILL)
    here = Path(__file__).parent
    known = os.environ.get("PYTHONPATH", "")
    socket = settings.worker_socket
    socket.unlink()
    process = subprocess.Popen(
        [sys.executable, here / "lying_worker.py", home / "node.toml"],
        env={**os.environ, "PYTHONPATH": f"{here.parent}:{known}"},
    )
    try:
        processes.wait_until(lambda: replies_at(socket), 120, "the liar")
        yield
    finally:
        process.kill()
        process.wait()


def replies_at(socket: Path) -> bool:
    with contextlib.suppress(worker.SocketError):
        return bool(worker.request(socket, b"", 30.0))
    return False


def test_what_is_wrong_is_named_and_left_out(tmp_path):
    place = write_rows(tmp_path)
    rows = {
        name: dict(np.load(place / f"rows{client}.npz"))
        for client, name in enumerate(NAMES)
    }
    out, homes = tmp_path / "out", [tmp_path / "lab" / "nodes" / n for n in NAMES]
    config = check(toml.parse(CONFIG, "test"), "test")
    with (
        local_cluster(tmp_path / "lab", rows, policy=POLICY, supernodes=True) as made,
        lying(homes[LIAR], made.node(NAMES[LIAR])),
    ):
        open_folder(out, config, made.settings, resume=False)
        run_experiment(made.settings, out)
    away = absences(out)
    assert {number: set(who) for number, who in away.items()} == {
        number: {LIAR} if number in SPOILT else set() for number in range(ROUNDS)
    }
    lines = (out / "audit.jsonl").read_text().splitlines()
    notes = [json.loads(line) for line in lines]
    for _, event, reason in SPOILT.values():
        noted = [str(note["fields"]) for note in notes if note["event"] == event]
        named = [one for one in noted if reason in one]
        assert named, reason
        assert all(re.search(rf"client\W+{LIAR}\b", one) for one in named)
    (summary,) = run_folder.read_summary(run_folder.Folder(out))["runs"]
    rejected = sum(event == "rejected" for _, event, _ in SPOILT.values())
    assert (summary["rejected"], summary["dropped"]) == (rejected, 1)
    assert models(out, homes) == replayed(out, homes, away, tmp_path / "again")
