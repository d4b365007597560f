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

from fedblend.errors import RunError
from fedblend_federation.flower import processes
from fedblend_federation.ops import local_cluster, registration
from fedblend_federation.ops.local_cluster import processes_of
from fedblend_federation.ops.registration import Member

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
    monkeypatch.setattr(processes, "link_command", lambda settings: command)
    monkeypatch.setattr(processes, "node_command", lambda *words: command)
    monkeypatch.setattr(local_cluster, "is_up", lambda settings: True)
    monkeypatch.setattr(registration, "register", lambda settings: None)
    online = [Member("alice", (0,), "online")]
    monkeypatch.setattr(registration, "members", lambda settings: online)
    stop = processes.stop
    monkeypatch.setattr(processes, "stop", lambda process: stop(process, 0.2))


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(stand_ins, tmp_path, sign):
    before = signal.getsignal(sign)
    with (
        pytest.raises(KeyboardInterrupt),
        local_cluster.local_cluster(tmp_path / "lab", ROWS),
    ):
        processes.wait_until(
            lambda: len(processes_of(tmp_path)) >= 4, 60, "a link and a node"
        )
        os.kill(os.getpid(), sign)
        time.sleep(5)
    assert processes_of(tmp_path) == []
    assert signal.getsignal(sign) == before


def test_a_program_that_ends_at_once_is_one_line(stand_ins, tmp_path, monkeypatch):
    command = [sys.executable, "-c", "raise SystemExit('no port')"]
    monkeypatch.setattr(processes, "link_command", lambda settings: command)
    monkeypatch.setattr(local_cluster, "is_up", lambda settings: False)
    with (
        pytest.raises(RunError, match=r"process link ended at once: no port"),
        local_cluster.local_cluster(tmp_path / "lab", ROWS),
    ):
        pass


PARENT = """
import sys, time
from pathlib import Path
from fedblend_federation.flower import processes
waiting = [sys.executable, "-c", "import time; time.sleep(600)"]
place = Path(sys.argv[1])
print(processes.start(waiting, place, place / "log").pid, flush=True)
time.sleep(600)
"""


def test_what_a_killed_process_had_started_dies_with_it(tmp_path):
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            # While it becomes another program, its environment is empty for a moment.
            processes.wait_until(
                lambda: child in processes_of(tmp_path), 10, "its start", every=0.05
            )
        finally:
            parent.kill()
    processes.wait_until(
        lambda: child not in processes_of(tmp_path), 10, "its end", every=0.05
    )


def test_logs_do_not_grow_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "MAX_LOG", 1000)
    log = tmp_path / "log"
    with log.open("ab", buffering=0) as output:
        output.write(b"a" * 900)
        processes.rotate(log)
        assert log.stat().st_size == 900
        output.write(b"b" * 900)
        processes.rotate(log)
        output.write(b"c")
    assert log.read_bytes() == b"c"
    assert (tmp_path / "log.1").stat().st_size == 1800


def test_a_demonstration_removes_no_results(tmp_path):
    left = tmp_path / "apfl"
    left.mkdir()
    with pytest.raises(RunError, match="is not empty; --out names another folder"):
        local_cluster.demo(tmp_path, print)
    assert left.exists()


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
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_demonstration_can_be_interrupted(tmp_path, sign):
    """While an experiment runs; all its processes name the temporary folder."""
    temporary, log = tmp_path / "temporary", tmp_path / "log"
    temporary.mkdir()
    with log.open("wb") as words:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "fedblend",
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
        # The link with its executor, and four nodes.
        assert len(_mentioned(str(temporary))) >= 6
        process.send_signal(sign)
        assert process.wait(120) == (-9 if sign == signal.SIGKILL else 130)
    finally:
        process.kill()
    if sign == signal.SIGKILL:
        processes.wait_until(lambda: not processes_of(temporary), 30, "their end")
        return
    assert _mentioned(str(temporary)) == []
    assert processes_of(temporary) == []
    assert list(temporary.iterdir()) == []
    assert "everything it had started is ended" in log.read_text()
