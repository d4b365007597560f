# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The socket of a worker: in deep folders, too, and for nobody else."""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from fedblend_federation import worker


@pytest.fixture
def served(tmp_path):
    """A process, or here a thread, behind a socket whose path is a long one."""
    path = tmp_path / ("deep" * 20) / ("folder" * 10) / "socket"
    ready = threading.Event()
    threading.Thread(
        target=worker.serve,
        args=(path, lambda: worker.Handler(bytes.upper, 100)),
        kwargs={"ready": ready.set},
        daemon=True,
    ).start()
    assert ready.wait(5)
    return path


def test_a_worker_replies(served):
    assert len(str(served)) > 150
    assert [worker.request(served, word) for word in (b"one", b"two")] == [
        b"ONE",
        b"TWO",
    ]


def test_one_line_for_what_cannot_be_asked(served, tmp_path):
    with pytest.raises(worker.SocketError, match=r"closed|reset|Broken pipe"):
        worker.request(served, b"x" * 101)
    assert worker.request(served, b"still there") == b"STILL THERE"
    with pytest.raises(worker.SocketError, match=r"nobody: No such file"):
        worker.request(tmp_path / "nobody", b"x")
    served.chmod(0o666)
    with pytest.raises(worker.SocketError, match=r"only its owner"):
        worker.request(served, b"x")


SERVES = """
import os, sys
from pathlib import Path
from fedblend_federation import worker
path, user, group = Path(sys.argv[1]), *map(int, sys.argv[2:])
os.setgroups([group]), os.setgid(user), os.setuid(user)
rows = path.parent.parent / "state" / "rows"
reply = lambda message: message + rows.read_bytes()
worker.serve(path, lambda: worker.Handler(reply, 100), group=group,
           ready=lambda: print("ready", flush=True))
"""
ASKS = """
import os, sys
from pathlib import Path
from fedblend_federation import worker
path, user, group = Path(sys.argv[1]), *map(int, sys.argv[2:])
os.setgroups([]), os.setgid(group), os.setuid(user)
try:
    print((path.parent.parent / "state" / "rows").read_text())
except PermissionError:
    print("no rows")
try:
    print(worker.request(path, b"my ").decode())
except worker.SocketError as error:
    print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes other users")
def test_another_user_sends_messages_and_reads_no_rows():
    own, flower, stranger = 71001, 71002, 71003
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        home = Path(folder)
        home.chmod(0o711)
        for name in ("state", "worker"):
            (home / name).mkdir(mode=0o700)
        (home / "state" / "rows").write_text("secret")
        for place in (home / "state", home / "state" / "rows", home / "worker"):
            os.chown(place, own, own)
        path = home / "worker" / "socket"

        def asked(user: int) -> list[str]:
            words = [sys.executable, "-c", ASKS, path, str(user), str(user)]
            return subprocess.check_output(words, text=True).splitlines()

        words = [sys.executable, "-c", SERVES, path, str(own), str(flower)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                assert process.stdout.readline() == "ready\n"
                assert asked(flower) == ["no rows", "my secret"]
                assert asked(stranger) == ["no rows", f"{path}: Permission denied"]
            finally:
                process.kill()
