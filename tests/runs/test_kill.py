# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Runs killed with SIGKILL at random moments, gone on with, end up the same."""

import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest

from fedblend.config.config import load
from fedblend.runs import run_folder
from fedblend.runs.run import run_config
from fedblend.runs.run_folder import Folder
from fedblend.simulation.serialize import unpack


def command(config, out, compiled):
    words = ["run", str(config), "--out", str(out), "--resume", "--format", "json"]
    cache = {
        "JAX_COMPILATION_CACHE_DIR": compiled,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "fedblend", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | cache,
    )


def finish(config, out):
    """Only who is killed needs a process: here a run begins, or goes on, and ends."""
    run_config(load(config), out, resume=True)


def kill_after(delay, config, out, compiled):
    """Kill a run so long after its next checkpoint; False if it had ended."""
    before = last_change(out)
    process = command(config, out, compiled)
    while process.poll() is None and last_change(out) == before:
        time.sleep(0.002)
    time.sleep(delay)
    alive = process.poll() is None
    process.kill()
    process.wait()
    return alive


def last_change(out):
    return max(
        (path.stat().st_mtime_ns for path in out.glob("*checkpoint")), default=None
    )


def comparable(out):
    """All that was computed, without times and the name of the files on disk."""
    arrays, words = unpack((out / "checkpoint").read_bytes())
    arrays.pop("['store']['run']", None)
    rows = run_folder.read_rows(Folder(out))
    return (
        {name: array.tobytes() for name, array in arrays.items()},
        {k: v for k, v in words.items() if k != "records"},
        [{k: v for k, v in row.items() if k != "seconds"} for row in rows],
        (out / "clients.csv").read_bytes(),
        (out / "model.safetensors").read_bytes(),
    )


def rows(path):
    """Rows of one's own: what reads the digits takes processes a second to import."""
    draw = np.random.default_rng(0)
    inputs, clients = draw.normal(size=(72, 5)), np.repeat(np.arange(6), 12)
    np.savez(path, inputs=inputs, targets=np.arange(72) % 3, clients=clients)
    return {"file": str(path), "partition": "by_key", "test": 0.25}


def check(store, kills, local, tiny, write, tmp_path, compiled):
    tiny["data"] = rows(tmp_path / "rows.npz")
    tiny["algorithm"]["name"] = "scaffold"
    tiny["run"] |= {"rounds": 60, "every": 1, "store": store, "dropout": 0.2}
    tiny["measure"] = {"local": local, "splits": ["test"], "metrics": ["loss"]}
    config = write(tiny)
    finish(config, tmp_path / "whole")
    chance = random.Random(store)
    out = tmp_path / "killed"
    killed = sum(
        kill_after(chance.uniform(0, 0.5), config, out, compiled) for _ in range(kills)
    )
    finish(config, out)
    assert killed >= kills // 2
    assert comparable(out) == comparable(tmp_path / "whole")
    assert len(run_folder.read_rows(Folder(out))) == 61


@pytest.mark.slow
def test_killed_in_both_stages(tiny, write, tmp_path, compiled):
    check("disk", 2, 30, tiny, write, tmp_path, compiled)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["device", "host", "disk"])
def test_killed_many_times_also_while_it_tries_how_long_to_train_alone(
    store, tiny, write, tmp_path, compiled
):
    check(store, 8, True, tiny, write, tmp_path, compiled)
