# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A federation on one machine leaves nothing behind, whatever ends it."""

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from fedblend.deploy.ops import flwr_processes, local_cluster, registration
from fedblend.deploy.ops.local_cluster import processes_of
from fedblend.deploy.ops.registration import Member
from fedblend.errors import RunError

ROWS = {"alice": {"inputs": np.zeros((2, 3)), "targets": np.zeros(2)}}
# Like Flower's link: a child with a session of its own, and neither obeys at once.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
waiting = [sys.executable, "-c", "import time; time.sleep(600)"]
if sys.argv[1] == "parent":
    subprocess.Popen(waiting, start_new_session=True)
time.sleep(600)
"""


@pytest.fixture
def stand_ins(monkeypatch):
    """Programs that only wait, in place of Flower's."""
    command = [sys.executable, "-c", STUBBORN, "parent"]
    monkeypatch.setattr(flwr_processes, "link_command", lambda settings: command)
    monkeypatch.setattr(flwr_processes, "node_command", lambda *words: command)
    monkeypatch.setattr(local_cluster, "is_up", lambda settings: True)
    monkeypatch.setattr(registration, "register", lambda settings: None)
    online = [Member("alice", 0, "online")]
    monkeypatch.setattr(registration, "members", lambda settings: online)
    stop = flwr_processes.stop
    monkeypatch.setattr(flwr_processes, "stop", lambda process: stop(process, 0.2))


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(stand_ins, tmp_path, sign):
    before = signal.getsignal(sign)
    with (
        pytest.raises(KeyboardInterrupt),
        local_cluster.local_cluster(tmp_path / "lab", ROWS),
    ):
        time.sleep(0.5)
        assert len(processes_of(tmp_path)) >= 4
        os.kill(os.getpid(), sign)
        time.sleep(5)
    assert processes_of(tmp_path) == []
    assert signal.getsignal(sign) == before


def test_a_program_that_ends_at_once_is_one_line(stand_ins, tmp_path, monkeypatch):
    command = [sys.executable, "-c", "raise SystemExit('no port')"]
    monkeypatch.setattr(flwr_processes, "link_command", lambda settings: command)
    monkeypatch.setattr(local_cluster, "is_up", lambda settings: False)
    with (
        pytest.raises(RunError, match=r"link: ended at once: no port"),
        local_cluster.local_cluster(tmp_path / "lab", ROWS),
    ):
        pass


def _mentioned(text: str) -> list[str]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    words = file.read().decode(errors="replace")
            except OSError:
                continue
            found += [words] if text in words else []
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_the_demonstration_can_be_interrupted(tmp_path, sign):
    """While an experiment runs; all its processes name the temporary folder."""
    temporary, log = tmp_path / "temporary", tmp_path / "log"
    temporary.mkdir()
    with log.open("wb") as words:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "fedblend.cli",
                "federation",
                "demo",
                "--out",
                "out",
            ],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(temporary)},
            stdout=words,
            stderr=words,
            preexec_fn=lambda: os.nice(5),
        )
    try:
        for _ in range(600):
            if re.search("Flower's run|error", log.read_text()):
                break
            time.sleep(1)
        assert len(_mentioned(str(temporary))) >= 9
        process.send_signal(sign)
        assert process.wait(120) == 130
    finally:
        process.kill()
    assert _mentioned(str(temporary)) == []
    assert processes_of(temporary) == []
    assert list(temporary.iterdir()) == []
    assert "everything it had started is ended" in log.read_text()
