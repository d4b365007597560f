# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How a federation grows: seconds a round, bytes and memory, by nodes and by clients.

A link and all nodes are processes on loopback, with keys and TLS, started and ended by
this script. They share the processors of one machine, which others may use, too: the
figures are the least of several rounds.

``python benchmarks/federation_size.py echo 4,8,16``: nodes that send every message back
at once, so that only the way there and back is measured, and its slope by nodes.

``python benchmarks/federation_size.py fedavg,apfl 4,8,16``: real nodes, one client
each.

``python benchmarks/federation_size.py fedavg,apfl 16 63``: 63 clients on each of them.

``python benchmarks/federation_size.py work 64,256``: a server and one node with so many
clients in one process, without Flower: the processor that each side takes a client.

``python benchmarks/federation_size.py keys 16``: the keys of nodes, registered by
Flower's CLI and on one connection.
"""

import contextlib
import datetime
import itertools
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedblend.config import toml
from fedblend.config.config import check, dump
from fedblend_federation.client.node import Host, Node, answering
from fedblend_federation.flower import processes
from fedblend_federation.ops import registration
from fedblend_federation.ops.experiments import open_folder, run_experiment
from fedblend_federation.ops.local_cluster import local_cluster, processes_of
from fedblend_federation.ops.provision import provision
from fedblend_federation.ops.settings import NodeSettings, ServerSettings, load_as
from fedblend_federation.ops.supervisor import is_up
from fedblend_federation.server.run import run_server
from fedblend_federation.transport import Reply

ROUNDS, PAYLOAD = 6, 10_000
"""Rounds of an echo, and bytes of each message."""
BAR = 0.2
"""Seconds that a node may add to a round."""

PYPROJECT = """
[project]
name = "echo"
version = "1.0.0"
description = "every message comes back"
license = "Apache-2.0"
dependencies = ["flwr"]
[tool.flwr.app]
publisher = "bench"
[tool.flwr.app.components]
serverapp = "echo.server:app"
clientapp = "echo.client:app"
[tool.flwr.app.config]
out = ""
rounds = 1
size = 1
nodes = 1
link = 0
"""
CLIENT = """
from flwr.clientapp import ClientApp
app = ClientApp()
"""
SERVER = """
import json, os, time
from flwr.serverapp import ServerApp
from fedblend_federation.flower.grid import GridTransport
app = ServerApp()
@app.main()
def main(grid, context):
    config, seconds, carrying = context.run_config, [], GridTransport(grid)
    while len(carrying.addresses()) < config["nodes"]:
        time.sleep(0.2)
    def link():
        stat = open(f"/proc/{config['link']}/stat").read().rpartition(")")[2]
        return sum(map(int, stat.split()[11:13])) / os.sysconf("SC_CLK_TCK")
    used = []
    for _ in range(config["rounds"]):
        before = link()
        sent = {at: os.urandom(config["size"]) for at in carrying.addresses()}
        begun, back = time.perf_counter(), {}
        carrying.send(sent)
        while len(back) < len(sent):
            for reply in carrying.receive():
                if reply.data is None:
                    with open(config["out"] + ".errors", "a") as file:
                        print(f"{reply.address}: {reply.error}", file=file)
                    carrying.send({reply.address: sent[reply.address]})
                else:
                    back[reply.address] = reply.data
            if len(back) < len(sent):
                time.sleep(0.2)
        seconds.append(time.perf_counter() - begun)
        used.append(link() - before)
        assert back == sent
    with open(config["out"], "w") as file:
        json.dump({"seconds": seconds, "link": used}, file)
"""
ECHO = """
import sys
from pathlib import Path
from fedblend_federation.flower.supernode import Carrier
from fedblend_federation.flower.clients import FleetClient
from fedblend_federation.worker import Handler
from fedblend_federation.ops.settings import NodeSettings, load_as
node, home = load_as(NodeSettings, Path(sys.argv[1])), Path(sys.argv[1]).parent
fleet = FleetClient(str(node.server), node.ca, node.key, print)
handler = Handler(lambda message: message)
Carrier(fleet, home / "state", lambda: handler, lambda *of, **more: "", print).run()
"""


CONFIG = """
version = 1
name = "size"
[data]
partition = "nodes"
clients = {clients}
kind = "classes"
classes = 10
shape = [{width}]
test = 0.25
[model]
name = "softmax"
[algorithm]
name = "{name}"
rate = 0.1
steps = 2
batch_size = 10
{more}
[run]
rounds = {rounds}
every = {rounds}
[measure]
local = false
[federation]
deadline = 3000.0
resend = 3000.0
"""
MORE = {"fedavg": "", "apfl": "alpha = 0.5"}
WIDTH, ROWS, TRAINED = 784, 40, 4
"""Inputs, rows of a client, and rounds of an experiment."""
COUNTING = """
import json
from pathlib import Path
from fedblend_federation.flower import grid
from fedblend_federation.server.run import run_in_flower
class Counting(grid.GridTransport):
    counts = {"sent": 0, "received": 0, "messages": 0}
    def send(self, outgoing):
        self.counts["sent"] += sum(map(len, outgoing.values()))
        self.counts["messages"] += len(outgoing)
        super().send(outgoing)
    def receive(self):
        found = super().receive()
        self.counts["received"] += sum(len(one.data or b"") for one in found)
        return found
grid.GridTransport = Counting
def run(folder, transport):
    try:
        run_in_flower(folder, transport)
    finally:
        (folder / "bytes.json").write_text(json.dumps(Counting.counts))
app = grid.server_app(run)
"""
PARTS = {
    "flwr-serverapp": "server",
    "flower-superlink": "link",
    "federation node": "node",
    "-c": "node",
}
"""What a process's command says, and what it is."""
TICKS = os.sysconf("SC_CLK_TCK")


class Watch:
    """Looks at the processes of a federation: memory, processor, connections."""

    def __init__(self, folder: Path, port: int):
        self.folder, self.port, self.over = folder, port, threading.Event()
        self.memory: dict[str, list[int]] = defaultdict(list)
        """The most of every process of a part, in kB."""
        self.connections = 0
        self._peaks: dict[int, tuple[str, int]] = {}
        self._seconds: dict[int, tuple[str, float]] = {}
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def seconds(self) -> dict[str, float]:
        """Of processor so far, by part."""
        self._look()
        found: dict[str, float] = defaultdict(float)
        for part, used in self._seconds.values():
            found[part] += used
        return found

    def peaks(self) -> dict[str, int]:
        """The most memory of one process of each part, in MB."""
        found: dict[str, int] = {}
        for part, peak in self._peaks.values():
            found[part] = max(found.get(part, 0), peak // 1000)
        return found

    def close(self) -> None:
        """Look no longer."""
        self.over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self.over.wait(1.0):
            self._look()

    def _look(self) -> None:
        for number in processes_of(self.folder):
            # Processes end while they are looked at.
            with contextlib.suppress(OSError, IndexError, ValueError):
                place = Path(f"/proc/{number}")
                words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                part = next((PARTS[mark] for mark in PARTS if mark in words), "other")
                used = (place / "stat").read_text().rpartition(")")[2].split()[11:13]
                self._seconds[number] = part, sum(map(int, used)) / TICKS
                peak = (place / "status").read_text().partition("VmHWM:")[2].split()[0]
                self._peaks[number] = part, int(peak)
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        open_ones = [line.split() for line in lines]
        port = f"{self.port:04X}"
        there = [one for one in open_ones if one[1].endswith(port) and one[3] == "01"]
        self.connections = max(self.connections, len(there))


def client_rows(number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    inputs = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"inputs": inputs, "targets": rng.integers(0, 10, ROWS)}


def counting_app(settings: ServerSettings) -> Path:
    """The app of fedblend, with a server that counts the bytes of its messages."""
    source = Path(processes.__file__).with_name("app")
    place = settings.folder / "app"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
    (place / "fedblend_app" / "server_app.py").write_text(COUNTING)
    return place


def seconds_of_rounds(out: Path) -> list[float]:
    """From one counted round to the next, by the server's audit."""
    notes = map(json.loads, (out / "audit.jsonl").read_text().splitlines())
    at = [
        datetime.datetime.fromisoformat(note["time"])
        for note in notes
        if note["event"] in ("round", "sent")
        and note["fields"].get("message", "round") == "round"
    ]
    return [(two - one).total_seconds() for one, two in itertools.pairwise(at)][::2]


def trained(folder: Path, nodes: int, hosted: int, names: list[str]) -> dict:
    """A row of the table for each algorithm; the least seconds of a round of each."""
    processes.app_folder = counting_app
    named = {
        f"node{node}": client_rows(node)
        if hosted == 1
        else [client_rows(node * hosted + number) for number in range(hosted)]
        for node in range(nodes)
    }
    begun, least = time.perf_counter(), {}
    with local_cluster(folder / "lab", named) as made:
        up = time.perf_counter() - begun
        for name in names:
            text = CONFIG.format(
                clients=nodes * hosted,
                width=WIDTH,
                name=name,
                more=MORE[name],
                rounds=TRAINED,
            )
            config = check(toml.parse(text, "benchmark"), "benchmark")
            out = folder / name
            watch, load = (
                Watch(made.folder, made.settings.link.port),
                os.getloadavg()[0],
            )
            before, started = watch.seconds(), time.perf_counter()
            try:
                open_folder(out, config, made.settings, resume=False)
                run_experiment(made.settings, out)
                whole, used = time.perf_counter() - started, watch.seconds()
            finally:
                watch.close()
            took = seconds_of_rounds(out)
            counts = json.loads((out / "bytes.json").read_text())
            least[name] = min(took)
            spent = {part: used[part] - before.get(part, 0) for part in used}
            print(
                f"{name}: {nodes} nodes x {hosted}: seconds a round "
                f"{', '.join(f'{one:.2f}' for one in took)}; whole run {whole:.0f} s, "
                f"up after {up:.0f} s; {counts['messages']} messages, MB "
                f"{counts['sent'] / 1e6:.2f} sent, {counts['received'] / 1e6:.2f} "
                f"received; peak MB {watch.peaks()}; processor s "
                f"{ {part: round(spent[part], 1) for part in spent} }; "
                f"{watch.connections} connections; load before {load:.1f}",
                flush=True,
            )
    return least


class TimedTransport:
    """Hands messages to a node in this process; notes its seconds, and the bytes."""

    def __init__(self, host: Node | Host):
        self.host, self.waiting, self.node, self.sizes = host, [], 0.0, (0, 0)

    def addresses(self) -> list[int]:
        """The one node."""
        return [1]

    def send(self, outgoing: Mapping[int, bytes]) -> None:
        """Have the messages answered at once."""
        for address, data in outgoing.items():
            begun = time.process_time()
            reply = self.host.reply(data)
            self.node += time.process_time() - begun
            self.sizes = (len(data), len(reply))
            self.waiting.append(Reply(address, reply))

    def receive(self) -> list[Reply]:
        """The answers."""
        found, self.waiting = self.waiting, []
        return found


def work(folder: Path, clients: int) -> None:
    """Milliseconds of processor of a round, a client, on both sides."""
    (folder / "rows").mkdir()
    for number in range(clients):
        own = client_rows(number)
        place = folder / "rows" / f"{number}.npz"
        np.savez(place, inputs=own["inputs"], targets=own["targets"])
    (folder / "policy.toml").write_text("")
    (folder / "node.toml").write_text(
        f'version = 1\nserver = "127.0.0.1:8000"\nclients = {list(range(clients))}\n'
        'ca = "ca"\nkey = "key"\nfolder = "state"\npolicy = "policy.toml"\n'
        '[data]\nfile = "rows/{client}.npz"\n'
    )
    host = answering(load_as(NodeSettings, folder / "node.toml"))
    out, carrying = folder / "out", TimedTransport(host)
    out.mkdir()
    text = CONFIG.format(
        clients=clients, width=WIDTH, name="fedavg", more="", rounds=TRAINED
    )
    config = check(toml.parse(text, "benchmark"), "benchmark")
    (out / "config.toml").write_text(dump(config))
    marks: list[tuple[float, float]] = []

    def on_step(round: int, rounds: int) -> None:
        marks.append((time.process_time(), carrying.node))
        sizes.append(carrying.sizes)

    sizes: list[tuple[int, int]] = []
    run_server(out, carrying, on_step=on_step, poll=0.0)
    both, node = (min(np.diff(one)) for one in zip(*marks, strict=True))
    used = (Path("/proc/self/status")).read_text().partition("VmHWM:")[2].split()[0]
    print(
        f"{clients} clients: a round takes the node {node / clients * 1e3:.1f} ms of "
        f"processor a client, the server {(both - node) / clients * 1e3:.1f} ms; "
        f"bundles of {sizes[-1][0]} bytes down, {sizes[-1][1]} up; {int(used) // 1000} "
        "MB of memory together",
        flush=True,
    )


def keys(folder: Path, nodes: int) -> None:
    """Register keys by Flower's CLI, and then on one connection."""
    port = processes.free_port()
    names = [f"node{number}" for number in range(nodes)]
    where = {"host": "127.0.0.1", "port": port, "link_port": port}
    provision(folder, nodes=names, with_keys=True, **where)
    settings = load_as(ServerSettings, folder / "server" / "server.toml")
    processes.connect(settings)
    command, log = processes.link_command(settings), settings.folder / "link.log"
    link = processes.start(command, settings.folder, log)
    try:
        processes.wait_until(lambda: is_up(settings), 120, "the link")
        begun, ids = time.perf_counter(), []
        for node in settings.nodes:
            words = ("register", str(node.key), processes.CONNECTION)
            found = processes.call(settings, "supernode", *words)
            ids.append(str(found["node-id"]))
        by_cli = time.perf_counter() - begun
        with registration.connect(settings) as control:
            for id in ids:
                control.unregister(id)
        begun = time.perf_counter()
        registration.register(settings)
        at_once = time.perf_counter() - begun
    finally:
        processes.stop(link)
    print(
        f"{nodes} keys: {by_cli:.2f} s by Flower's CLI, {at_once:.2f} s on one "
        f"connection: {by_cli / at_once:.0f} times"
    )


def no_rows():
    return {"inputs": np.zeros((1, 1)), "targets": np.zeros(1)}


def echo_command(path: Path) -> list[str]:
    return [sys.executable, "-c", ECHO, str(path)]


def link_process(folder: Path) -> int:
    """The id of the link's process."""
    for number in processes_of(folder):
        words = Path(f"/proc/{number}/cmdline").read_bytes()
        if b"flower-superlink" in words:
            return number
    raise RuntimeError("no link")


def echoes(folder: Path, nodes: int) -> list[float]:
    """Seconds of each round of messages that come back at once."""
    app, out = folder / "app", folder / "seconds.json"
    (app / "echo").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PYPROJECT)
    for name, text in (("__init__", ""), ("client", CLIENT), ("server", SERVER)):
        (app / "echo" / f"{name}.py").write_text(text)
    named = {f"node{number}": no_rows() for number in range(nodes)}
    begun = time.perf_counter()
    processes.node_command = echo_command
    with local_cluster(folder / "lab", named, log=print) as made:
        print(f"{nodes} nodes: up after {time.perf_counter() - begun:.1f} s")
        number = link_process(made.folder)
        config = f'out="{out}" rounds={ROUNDS} size={PAYLOAD} nodes={nodes}'
        config += f" link={number}"
        where = (processes.CONNECTION, "--run-config", config)
        processes.call(made.settings, "run", str(app), *where)
        watch = Watch(made.folder, made.settings.link.port)
        try:
            processes.wait_until(out.exists, 900, "the echoes", every=1.0)
            time.sleep(1.0)
        finally:
            watch.close()
    errors = folder / "seconds.json.errors"
    if errors.exists():
        print(errors.read_text())
    found = json.loads(out.read_text())
    used = np.mean(found["link"]) / nodes
    print(
        f"{used:.3f} s of the link's processor a node and round; peak MB "
        f"{watch.peaks()}; {watch.connections} connections"
    )
    return found["seconds"]


def slope(least: dict[int, float], what: str) -> None:
    if len(least) < 2:
        return
    found = float(np.polyfit(list(least), list(least.values()), 1)[0])
    held = "holds" if found < BAR else "is missed"
    print(f"{what}: {found:.3f} s a node; the bar, {BAR} s, {held}")


def main() -> None:
    kind, counts = sys.argv[1], [int(word) for word in sys.argv[2].split(",")]
    hosted = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    least: dict[str, dict[int, float]] = defaultdict(dict)
    for nodes in counts:
        with tempfile.TemporaryDirectory() as place:
            if kind == "work":
                work(Path(place), nodes)
            elif kind == "keys":
                keys(Path(place) / "lab", nodes)
            elif kind == "echo":
                seconds = echoes(Path(place), nodes)
                least["echo"][nodes] = min(seconds)
                shown = ", ".join(f"{one:.2f}" for one in seconds)
                print(f"echo: {nodes} nodes: {shown}", flush=True)
            else:
                found = trained(Path(place), nodes, hosted, kind.split(","))
                for name, one in found.items():
                    least[name][nodes] = one
    for name, found in least.items():
        slope(found, name)


if __name__ == "__main__":
    main()
