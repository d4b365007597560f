# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Killing what a federation on Flower is made of, at random moments, and stopping it.

Whatever is killed with -9, the experiment finishes, and every model is bit for bit that
of the undisturbed one. Minutes each: run with ``-m slow``.
"""

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from configured import apfl_on_nodes

from fedblend.config import toml
from fedblend.config.config import check
from fedblend.errors import RunError
from fedblend.simulation.serialize import unpack
from fedblend_federation.client.state import add_checksum
from fedblend_federation.flower import processes
from fedblend_federation.ops import registration
from fedblend_federation.ops.experiments import open_folder, run_experiment
from fedblend_federation.ops.local_cluster import processes_of
from fedblend_federation.ops.provision import provision
from fedblend_federation.ops.settings import ServerSettings, load_as
from fedblend_federation.server.checkpoint import read_progress

pytestmark = pytest.mark.slow

NAMES = ("ada", "ben", "cyn")
ROUNDS = 6
RESTART = 5.0
"""Seconds after which a service that ended is started again, as by our units."""
CARRIER = {
    "server app": "flwr-serverapp",
    "link": "flower-superlink",
    "node": "federation node",
}
SUPERNODE = {
    "supernode": "flower-supernode",
    "client app": "flwr-clientapp",
    "worker": "federation worker",
}
"""What the command of a process says: with our carrier, and on Flower's own path."""
CONFIG = (
    apfl_on_nodes("killed", len(NAMES), ROUNDS)
    + """[federation]
deadline = 900.0
resend = 45.0
"""
)


class Federation:
    """A link and nodes as their services run them, which restart what dies."""

    def __init__(self, folder: Path, supernodes: bool):
        self.folder = folder
        port = processes.free_port()
        names = list(NAMES)
        where = {"host": "127.0.0.1", "port": port, "link_port": port}
        provision(folder, nodes=names, with_keys=True, **where)
        rng = np.random.default_rng(0)
        for name in names:
            home = folder / "nodes" / name
            targets = rng.integers(0, 3, 60)
            inputs = (rng.normal(size=(60, 6)) + targets[:, None]).astype(np.float32)
            np.savez(home / "rows.npz", inputs=inputs, targets=targets)
            # The same batches in all federations.
            (home / "state").mkdir(exist_ok=True, mode=0o700)
            (home / "state" / "batches.key").write_bytes(
                add_checksum(hashlib.sha256(name.encode()).digest())
            )
            settings = home / "node.toml"
            text = settings.read_text().replace("rows.csv", "rows.npz")
            flag = f"supernode = {str(supernodes).lower()}\n[data]"
            settings.write_text(text.replace("[data]", flag))
        self.settings = load_as(ServerSettings, folder / "server" / "server.toml")
        self.supernodes, self.over = supernodes, threading.Event()
        self.running: dict[tuple[str, Path], subprocess.Popen] = {}

    def start(self) -> None:
        self._serve("server", self.folder / "server" / "server.toml")
        registered = self.folder / "server.out"
        processes.wait_until(
            lambda: "may connect" in registered.read_text(), 300, "the link"
        )
        for name in NAMES:
            path = self.folder / "nodes" / name / "node.toml"
            for role in ("worker", "node") if self.supernodes else ("node",):
                self._serve(role, path)
        processes.wait_until(self.complete, 300, "the nodes", every=2.0)

    def complete(self) -> bool:
        try:
            there = [member.status for member in registration.members(self.settings)]
        except RunError:  # the link is on its way back
            return False
        return there == ["online"] * len(NAMES)

    def _serve(self, role: str, path: Path) -> None:
        """Run a service, and start it again when it ends, as systemd does."""
        out = self.folder / ("server.out" if role == "server" else f"{path.parent}.out")
        out.touch()
        home = path.parent / ("flower" if role == "node" else "state")

        def keep() -> None:
            while not self.over.is_set():
                with open(out, "ab") as words:
                    self.running[role, path] = service = subprocess.Popen(
                        [sys.executable, "-m", "fedblend", "federation", role, path],
                        stdout=words,
                        stderr=words,
                        stdin=subprocess.DEVNULL,
                        env={**processes.variables(home), "PYTHONUNBUFFERED": "1"},
                    )
                service.wait()
                self.over.wait(RESTART)

        threading.Thread(target=keep, daemon=True).start()

    def command(self, *words: object) -> str:
        """What ``fedblend federation ...`` prints on the server's machine."""
        settings = self.folder / "server" / "server.toml"
        program = [sys.executable, "-m", "fedblend", "federation"]
        command = [*program, *map(str, words), "--server", str(settings)]
        return subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout

    def stop(self) -> None:
        self.over.set()
        for service in self.running.values():
            service.terminate()
        for service in self.running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                service.wait(40)
        for number in processes_of(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)

    def kill_one(self, words: str, choose: random.Random) -> bool:
        """Kill a living process whose command says this; whether there was one."""
        alive = []
        for number in processes_of(self.folder):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{number}/cmdline").read_bytes()
                if words in command.replace(b"\0", b" ").decode(errors="replace"):
                    alive.append(number)
        if not alive:
            return False
        os.kill(choose.choice(alive), signal.SIGKILL)
        return True

    def experiment(
        self, out: Path, disturb=lambda: None, resume: bool = False
    ) -> dict[str, bytes]:
        """Run it; every model at the end, as bytes."""
        config = check(toml.parse(CONFIG, "test"), "test")
        open_folder(out, config, self.settings, resume=resume)
        disturbing = threading.Thread(target=disturb, daemon=True)
        disturbing.start()
        run_experiment(self.settings, out)
        disturbing.join(60)
        name = toml_id(out)
        paths = {"shared": out / "model.safetensors"}
        for node in NAMES:
            state = self.folder / "nodes" / node / "state" / name
            paths[node] = state / "personal.safetensors"
        return {
            node: b"".join(a.tobytes() for a in unpack(path.read_bytes())[0].values())
            for node, path in paths.items()
        }


def toml_id(out: Path) -> str:
    import json

    return json.loads((out / "server" / "experiment.json").read_text())["experiment"]


def started(place: Path, supernodes: bool) -> Iterator[Federation]:
    made = Federation(place / "lab", supernodes)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    yield from started(tmp_path_factory.mktemp("killed"), supernodes=False)


@pytest.fixture(scope="module")
def with_supernodes(tmp_path_factory):
    yield from started(tmp_path_factory.mktemp("supernodes"), supernodes=True)


@pytest.fixture(scope="module")
def undisturbed(federation, tmp_path_factory):
    return federation.experiment(tmp_path_factory.mktemp("undisturbed") / "out")


def outcome_of_a_kill(made: Federation, words: str, seed: str, out: Path):
    """Every model at the end of an experiment in which a process was killed."""
    processes.wait_until(made.complete, 300, "the nodes", every=2.0)
    choose = random.Random(seed)
    killed = []

    def disturb() -> None:
        # Not before the experiment computes; its last round is still to come.
        until = time.monotonic() + 300
        first = choose.randrange(ROUNDS - 1)
        while read_progress(out / "server")[0] < first and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(choose.uniform(0, 1))
        while not killed and time.monotonic() < until:
            if made.kill_one(words, choose):
                killed.append(words)
            time.sleep(0.05)

    found = made.experiment(out, disturb)
    assert killed == [words]
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("target", CARRIER)
def test_a_kill_changes_nothing(target, seed, federation, undisturbed, tmp_path):
    words, out = CARRIER[target], tmp_path / "out"
    found = outcome_of_a_kill(federation, words, f"{target} {seed}", out)
    assert found == undisturbed


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("target", SUPERNODE)
def test_nor_does_one_on_flowers_own_path(
    target, seed, with_supernodes, undisturbed, tmp_path
):
    words, out = SUPERNODE[target], tmp_path / "out"
    found = outcome_of_a_kill(with_supernodes, words, f"{target} {seed}", out)
    assert found == undisturbed


@pytest.mark.parametrize("seed", range(2))
def test_stopped_in_mid_run_it_goes_on(seed, federation, undisturbed, tmp_path):
    out, choose, said = tmp_path / "out", random.Random(f"stop {seed}"), []

    def disturb() -> None:
        processes.wait_until(
            lambda: read_progress(out / "server")[0] >= 1, 300, "round 1"
        )
        time.sleep(choose.uniform(0, 0.5))  # a round takes about one second
        said.append(federation.command("stop", out))

    with pytest.raises(RunError, match=r"was stopped; --resume goes on"):
        federation.experiment(out, disturb)
    processes.wait_until(lambda: bool(said), 150, "the end of it")
    assert f"of {ROUNDS}; --resume goes on" in said[0]
    assert 1 <= read_progress(out / "server")[0] < ROUNDS
    assert federation.experiment(out, resume=True) == undisturbed
