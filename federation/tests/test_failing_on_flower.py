# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Real Flower, ten nodes, and three of them fail in every round, each in its own way.

Many minutes: run with ``-m slow``.
"""

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from configured import POLICY, apfl_on_nodes
from replay import absences, models, replayed

from fedblend.config import toml
from fedblend.config.config import check
from fedblend.errors import RunError
from fedblend_federation.ops.experiments import open_folder, run_experiment
from fedblend_federation.ops.local_cluster import local_cluster, processes_of
from fedblend_federation.server.checkpoint import read_progress

pytestmark = pytest.mark.slow
NAMES = tuple(f"node{number}" for number in range(10))
ROUNDS, STOPPED = 5, (2,)
"""In rounds ``STOPPED`` one of the three does not move: they take a whole deadline."""
CONFIG = (
    apfl_on_nodes("failing", len(NAMES), ROUNDS)
    + """[federation]
deadline = 240.0
resend = 80.0
quorum = {quorum}
"""
)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    rng = np.random.default_rng(3)
    rows = {}
    for name in NAMES:
        targets = rng.integers(0, 3, 40)
        inputs = (rng.normal(size=(40, 6)) + targets[:, None]).astype(np.float32)
        rows[name] = {"inputs": inputs, "targets": targets}
    folder = tmp_path_factory.mktemp("failing") / "lab"
    with local_cluster(folder, rows, policy=POLICY) as made:
        yield made


@contextlib.contextmanager
def refuses(home: Path):
    """The policy takes no such method."""
    policy, other = home / "policy.toml", home / "other.toml"
    other.write_text(POLICY.replace('algorithms = "any"', 'algorithms = ["fedavg"]'))
    other.rename(policy)
    yield
    other.write_text(POLICY)
    other.rename(policy)


@contextlib.contextmanager
def forgets(home: Path):
    """The newest experiment is not on its disk."""
    found = [path.parent for path in home.glob("state/*/terms.json")]
    place = max(found, key=lambda path: path.stat().st_mtime_ns)
    away = place.rename(home / "forgotten")
    yield
    away.rename(place)


@contextlib.contextmanager
def does_not_move(home: Path):
    """None of its processes runs."""
    stopped = processes_of(home)
    for sign in (signal.SIGSTOP, signal.SIGCONT):
        for number in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, sign)
        if sign == signal.SIGSTOP:
            yield


def chosen(number: int) -> list[int]:
    """Who fails in a round."""
    return random.Random(number).sample(range(len(NAMES)), 3) if number else []


def spoil(made, out: Path, until: threading.Event, ways: dict[int, tuple]) -> None:
    """While a round is under way, its three nodes fail."""
    number, failing = -1, contextlib.ExitStack()
    while not until.is_set():
        if read_progress(out / "server")[0] != number:
            number = read_progress(out / "server")[0]
            failing.close()
            for client, way in zip(chosen(number), ways.get(number, ()), strict=False):
                failing.enter_context(way(made.folder / "nodes" / NAMES[client]))
        time.sleep(0.05)
    failing.close()


def run(made, out: Path, quorum: float, ways: dict[int, tuple], resume=False) -> None:
    config = check(toml.parse(CONFIG.format(quorum=quorum), "test"), "test")
    open_folder(out, config, made.settings, resume=resume)
    until = threading.Event()
    spoiling = threading.Thread(target=spoil, args=(made, out, until, ways))
    spoiling.start()
    try:
        run_experiment(made.settings, out)
    finally:
        until.set()
        spoiling.join()


def homes(made) -> list[Path]:
    return [made.folder / "nodes" / name for name in NAMES]


def test_three_of_ten_fail_in_every_round(federation, tmp_path):
    ways = {
        number: (refuses, forgets, does_not_move if number in STOPPED else refuses)
        for number in range(1, ROUNDS)
    }
    out = tmp_path / "out"
    run(federation, out, 0.5, ways)
    away = absences(out)
    assert {number: set(who) for number, who in away.items()} == {
        number: set(chosen(number)) for number in range(ROUNDS)
    }
    there = homes(federation)
    assert models(out, there) == replayed(out, there, away, tmp_path / "again")


def test_below_the_quorum_it_stops_and_goes_on_later(federation, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(RunError, match="7 of 10 clients replied, the quorum is 8"):
        run(federation, out, 0.8, {2: (refuses,) * 3})
    assert read_progress(out / "server") == (2, ROUNDS)
    run(federation, out, 0.8, {}, resume=True)
    assert absences(out) == {number: {} for number in range(ROUNDS)}
    there = homes(federation)
    assert models(out, there) == replayed(out, there, {}, tmp_path / "again")
