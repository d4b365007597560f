# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Runs killed with SIGKILL at random moments, gone on with, end up the same."""

import os
import random
import subprocess
import sys
import time

import pytest

from fedblend.experiment import outputs
from fedblend.experiment.outputs import Folder
from fedblend.runtime.wire import unpack


def command(config, out, cache):
    words = ["run", str(config), "--out", str(out), "--resume", "--format", "json"]
    return subprocess.Popen(
        [sys.executable, "-m", "fedblend.cli", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
    )


def finish(config, out, cache):
    process = command(config, out, cache)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said


def kill_after(delay, config, out, cache):
    """Kill a run so long after its next checkpoint; False if it had ended."""
    before = last_change(out)
    process = command(config, out, cache)
    while process.poll() is None and last_change(out) == before:
        time.sleep(0.002)
    time.sleep(delay)
    alive = process.poll() is None
    process.kill()
    process.communicate()
    return alive


def last_change(out):
    return max(
        (path.stat().st_mtime_ns for path in out.glob("*checkpoint")), default=None
    )


def comparable(out):
    """All that was computed, without times and the name of the files on disk."""
    arrays, words = unpack((out / "checkpoint").read_bytes())
    arrays.pop("['store']['run']", None)
    rows = outputs.read_rows(Folder(out))
    return (
        {name: array.tobytes() for name, array in arrays.items()},
        {k: v for k, v in words.items() if k != "records"},
        [{k: v for k, v in row.items() if k != "seconds"} for row in rows],
        (out / "clients.csv").read_bytes(),
        (out / "model.safetensors").read_bytes(),
    )


def check(store, kills, tiny, write, tmp_path):
    tiny["algorithm"]["name"] = "scaffold"
    tiny["run"] |= {"rounds": 60, "every": 1, "store": store, "dropout": 0.2}
    tiny["measure"] = {"local": True, "splits": ["test"]}
    config, cache = write(tiny), tmp_path / "cache"
    finish(config, tmp_path / "whole", cache)
    chance = random.Random(store)
    out = tmp_path / "killed"
    killed = sum(
        kill_after(chance.uniform(0, 0.5), config, out, cache) for _ in range(kills)
    )
    finish(config, out, cache)
    assert killed >= kills // 2
    assert comparable(out) == comparable(tmp_path / "whole")
    assert len(outputs.read_rows(Folder(out))) == 61


def test_killed_in_both_stages(tiny, write, tmp_path):
    check("disk", 2, tiny, write, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["device", "host", "disk"])
def test_killed_many_times(store, tiny, write, tmp_path):
    check(store, 8, tiny, write, tmp_path)
