# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The end of a server whose link has gone."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""
CHILD = """
import time
from fedblend_federation.flower.grid import end_with_parent
end_with_parent()
print("watching", flush=True)
time.sleep(600)
"""


def test_a_server_ends_with_what_started_it():
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = Path("/proc", parent.stdout.readline().strip())
        assert child.exists()
        parent.kill()
    until = time.monotonic() + 20
    while child.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not child.exists()
