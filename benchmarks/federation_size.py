# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How a federation grows: seconds a round, bytes and memory, by nodes and by clients.

A link and all nodes are processes on loopback, with keys and TLS, started and ended by
this script. They share the processors of one machine, which others may use, too: every
figure is the least of several rounds.

``python benchmarks/federation_size.py echo 4,8,16``: nodes that send every message back
at once, so that only the way there and back is measured, and the slope by nodes.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from fedblend.deploy.ops import flwr_processes
from fedblend.deploy.ops.local_cluster import local_cluster

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
"""
CLIENT = """
from flwr.clientapp import ClientApp
app = ClientApp()
"""
SERVER = """
import json, os, time
from flwr.serverapp import ServerApp
from fedblend.deploy.grid_transport import GridTransport
app = ServerApp()
@app.main()
def main(grid, context):
    config, seconds, carrying = context.run_config, [], GridTransport(grid)
    while len(carrying.addresses()) < config["nodes"]:
        time.sleep(0.2)
    for _ in range(config["rounds"]):
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
        assert back == sent
    with open(config["out"], "w") as file:
        json.dump(seconds, file)
"""
ECHO = """
import sys
from pathlib import Path
from fedblend.deploy.carrier import Carrier
from fedblend.deploy.fleet_client import FleetClient
from fedblend.deploy.worker import Handler
from fedblend.deploy.ops.settings import NodeSettings, load_as
node, home = load_as(NodeSettings, Path(sys.argv[1])), Path(sys.argv[1]).parent
fleet = FleetClient(str(node.server), node.ca, node.key, print)
handler = Handler(lambda message: message)
Carrier(fleet, home / "state", lambda: handler, lambda *of, **more: "", print).run()
"""


def no_rows():
    return {"inputs": np.zeros((1, 1)), "targets": np.zeros(1)}


def echo_command(path: Path) -> list[str]:
    return [sys.executable, "-c", ECHO, str(path)]


def echoes(folder: Path, nodes: int) -> list[float]:
    """Seconds of each round of messages that come back at once."""
    app, out = folder / "app", folder / "seconds.json"
    (app / "echo").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PYPROJECT)
    for name, text in (("__init__", ""), ("client", CLIENT), ("server", SERVER)):
        (app / "echo" / f"{name}.py").write_text(text)
    named = {f"node{number}": no_rows() for number in range(nodes)}
    begun = time.perf_counter()
    with local_cluster(folder / "lab", named, command=echo_command, log=print) as made:
        print(f"{nodes} nodes: up after {time.perf_counter() - begun:.1f} s")
        config = f'out="{out}" rounds={ROUNDS} size={PAYLOAD} nodes={nodes}'
        where = (flwr_processes.CONNECTION, "--run-config", config)
        flwr_processes.call(made.settings, "run", str(app), *where)
        flwr_processes.wait_until(out.exists, 900, "the echoes", every=1.0)
        time.sleep(1.0)
    errors = folder / "seconds.json.errors"
    if errors.exists():
        print(errors.read_text())
    return json.loads(out.read_text())


def main() -> None:
    kind, counts = sys.argv[1], [int(word) for word in sys.argv[2].split(",")]
    assert kind == "echo"
    least = {}
    for nodes in counts:
        with tempfile.TemporaryDirectory() as place:
            seconds = echoes(Path(place), nodes)
        least[nodes] = min(seconds)
        print(nodes, "nodes:", ", ".join(f"{s:.2f}" for s in seconds), flush=True)
    if len(least) > 1:
        slope = float(np.polyfit(list(least), list(least.values()), 1)[0])
        held = "holds" if slope < BAR else "is missed"
        print(f"{slope:.3f} s a node; the bar, {BAR} s, {held}")


if __name__ == "__main__":
    main()
