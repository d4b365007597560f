# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Our messages inside of Flower's, and the end of a server whose link has gone."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedblend.deploy.flower import SMALL, from_record, pause_in, to_record

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""
CHILD = """
import time
from fedblend.deploy.flower import end_with_parent
end_with_parent()
print("watching", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("size", [1, SMALL, SMALL + 1])
def test_a_message_comes_out_as_it_went_in(size):
    message = bytes(range(256)) * (size // 256 + 1)
    record = to_record(message[:size])
    assert from_record(record) == message[:size]
    assert bool(record.array_records) == (size > SMALL)


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"other": ConfigRecord({"message": b"x"})},
        {"fedblend": ConfigRecord({"message": "x"})},
        {"fedblend": ConfigRecord({"other": b"x"})},
        {"fedblend": MetricRecord({"message": 1})},
    ],
)
def test_what_is_no_message_of_ours_is_empty(content):
    assert from_record(RecordDict(content)) == b""


@pytest.mark.parametrize(
    "pause, found", [(0.5, 0.5), (None, None), (float("inf"), None), (-1.0, None)]
)
def test_the_server_tells_nodes_how_long_to_pause(pause, found):
    assert pause_in(to_record(b"x", pause)) == found
    assert from_record(to_record(b"x", pause)) == b"x"


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
