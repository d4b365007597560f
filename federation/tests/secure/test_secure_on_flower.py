# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Secure sums on Flower's real processes: eight nodes, keys and TLS, on loopback.

Every model is that of the same encoding summed without masks in one process, to the
bit, also where a node is killed with -9 after it has answered and before it has opened
the sum: whether it comes back or not. Minutes: run with ``-m slow``.
"""

import json
import os
import signal
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from configured import ALGORITHMS, LINEAR, NETWORK, OPEN, WORK, experiment, few, newest
from federations import DroppingTransport, UnmaskedCollector
from trials import Clock

from fedblend.config import toml
from fedblend.config.config import check
from fedblend.simulation.serialize import unpack
from fedblend_federation import transport as transports
from fedblend_federation.client import state as states
from fedblend_federation.client.node import answering
from fedblend_federation.flower import processes
from fedblend_federation.ops import experiments
from fedblend_federation.ops.local_cluster import (
    local_cluster,
    processes_of,
    write_rows,
)
from fedblend_federation.ops.provision import provision
from fedblend_federation.ops.settings import NodeSettings, load_as
from fedblend_federation.secure.flatten import coarse
from fedblend_federation.server import collection, coordinator, settings
from fedblend_federation.server.run import run_server

pytestmark = pytest.mark.slow

NODES, ROUNDS, VICTIM = 8, 5, "node5"
NAMES = [f"node{number}" for number in range(NODES)]
POLICY = few(OPEN + "[metrics]\nnames = []\n")
DIANA = (
    '[compress]\nhow = "diana"\nmasks = "one"\n'
    'compressor = { name = "rand_k", k = 9 }\n'
)
STARTED: list[subprocess.Popen] = []
"""Nodes that were started again."""
METHODS = {
    "fedavg": ("fedavg", LINEAR, "", 5),
    "apfl": ("apfl", LINEAR, "", 5),
    "flix, diana": ("flix", NETWORK, DIANA, 5),
    "fedavg of fewer": ("fedavg", LINEAR, "", 6),
}
"""Nodes open no sum of the same model over almost the same cohort: another seed."""


def config_of(method: str, secure: bool, quorum: float = 0.7) -> str:
    name, model, more, seed = METHODS[method]
    work = WORK.replace("steps = 3", "steps = 1") if name == "flix" else WORK
    return f"""
version = 1
name = "secure"
[data]
partition = "nodes"
clients = {NODES}
kind = "classes"
classes = 3
shape = [6]
test = 0.25
seed = 2
[federation]
deadline = 900.0
resend = 300.0
quorum = {quorum}
secure = {str(secure).lower()}
[model]
{model}l2 = 0.01
[algorithm]
name = "{name}"
{work}{ALGORITHMS[name]}
{more}[run]
rounds = {ROUNDS}
every = {ROUNDS}
seed = {seed}
[measure]
local = false
"""


def rows_of(client: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(client)
    targets = rng.integers(0, 3, 20 + 3 * client)
    inputs = rng.normal(size=(len(targets), 6)) + targets[:, None]
    return {"inputs": inputs.astype(np.float32), "targets": targets}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    rows = {name: rows_of(client) for client, name in enumerate(NAMES)}
    folder = tmp_path_factory.mktemp("flower") / "lab"
    with local_cluster(folder, rows, policy=POLICY) as made:
        yield made
    assert processes_of(folder) == []
    for process in STARTED:
        process.wait(30)


def models(out: Path, homes: list[Path]) -> dict[str, bytes]:
    """The shared model and that of every node, as bytes."""
    paths = [out / "model.safetensors", *map(newest, homes)]
    names = ["shared", *(home.name for home in homes)]
    return {
        name: b"".join(a.tobytes() for a in unpack(path.read_bytes())[0].values())
        for name, path in zip(names, paths, strict=True)
    }


def on_flower(made, out: Path, method: str, quorum=0.7):
    text = config_of(method, secure=True, quorum=quorum)
    config = check(toml.parse(text, "test"), "test")
    experiments.open_folder(out, config, made.settings, resume=False)
    experiments.run_experiment(made.settings, out)
    return models(out, [made.home(name) for name in NAMES])


def without_masks(method: str, place: Path, gone=None) -> dict[str, bytes]:
    """The same experiment in this process, whose server encodes and sees everything.

    ``gone`` says who does not get which request.
    """
    place = place / "plain"
    lab = place / "lab"
    provision(lab, host="127.0.0.1", nodes=NAMES, with_keys=True)
    homes = [lab / "nodes" / name for name in NAMES]
    for client, home in enumerate(homes):
        write_rows(home, rows_of(client), POLICY)
    nodes = {
        1000 + c: answering(load_as(NodeSettings, home / "node.toml"))
        for c, home in enumerate(homes)
    }
    transport = DroppingTransport(nodes, gone or {})
    out = experiment(place / "out", config_of(method, secure=False))
    with pytest.MonkeyPatch.context() as patch:
        own = type("Own", (UnmaskedCollector,), {"as_sent": "diana" in method})
        patch.setattr(coordinator, "collector_of", own)
        weights = settings._limit_weights
        weighed = lambda claimed, *more: weights(coarse(claimed), *more)  # noqa: E731
        patch.setattr(settings, "_limit_weights", weighed)
        clock = Clock()  # nobody waits for those who are gone
        waiting = partial(transports.exchange, clock=clock, sleep=clock.sleep)
        patch.setattr(collection, "exchange", waiting)
        run_server(out, transport, poll=0.0)
    return models(out, homes)


def counted(out: Path) -> list[int]:
    """How many answers each round has, by the server's audit."""
    notes = map(json.loads, (out / "audit.jsonl").read_text().splitlines())
    return [one["fields"]["counted"] for one in notes if one["event"] == "round"]


@pytest.mark.parametrize("method", ["fedavg", "apfl", "flix, diana"])
def test_secure_sums_on_flower_are_exact(method, federation, tmp_path):
    found = on_flower(federation, tmp_path / "out", method)
    assert counted(tmp_path / "out") == [NODES] * ROUNDS
    assert found == without_masks(method, tmp_path)


class Kill:
    """Kills a node in mid-sum, and starts it again if it may return."""

    def __init__(self, made, returns: bool):
        self.made, self.returns, self.round, self.started = made, returns, None, False
        self.state = made.home(VICTIM) / "state"
        self.old = {path.name for path in self.state.iterdir()}
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()

    def _wait(self) -> None:
        """Until the node has answered in a round but the first, and has not opened."""
        until = time.monotonic() + 600
        while self.round is None and time.monotonic() < until:
            for place in self.state.iterdir():
                if place.name in self.old or not place.is_dir():
                    continue
                masked, opened = (
                    max(states.rounds(place, kind), default=-2)
                    for kind in ("masked", "opened")
                )
                if masked >= 2 and opened < masked:
                    for number in processes_of(self.made.home(VICTIM)):
                        os.kill(number, signal.SIGKILL)
                    self.round = masked
            time.sleep(0.002)
        if self.round is not None and self.returns:
            self._start()
            # A child ends with the thread that started it.
            threading.Event().wait()

    def _start(self) -> None:
        path = self.made.home(VICTIM) / "node.toml"
        folder = self.made.node(VICTIM).folder
        command = processes.node_command(path)
        STARTED.append(processes.start(command, folder, folder / "node.log"))
        self.started = True


def test_a_node_killed_in_mid_sum_comes_back(federation, tmp_path):
    kill = Kill(federation, returns=True)
    found = on_flower(federation, tmp_path / "out", "apfl", quorum=1.0)
    assert kill.round is not None and kill.started
    assert counted(tmp_path / "out") == [NODES] * ROUNDS
    assert found == without_masks("apfl", tmp_path)


def test_one_that_stays_away_is_recovered(federation, tmp_path):
    """Its answer counts in the round of the kill, if it arrived, and in none later."""
    kill = Kill(federation, returns=False)
    found = on_flower(federation, tmp_path / "out", "fedavg of fewer")
    assert kill.round is not None
    numbers = counted(tmp_path / "out")
    lost = [number for number, count in enumerate(numbers) if count < NODES]
    assert lost and lost[0] in (kill.round, kill.round + 1)
    assert lost == list(range(lost[0], ROUNDS)) and set(numbers[lost[0] :]) == {7}
    gone = {("round", number): {NAMES.index(VICTIM)} for number in lost}
    expected = without_masks("fedavg of fewer", tmp_path, gone)
    assert found["shared"] == expected["shared"]
