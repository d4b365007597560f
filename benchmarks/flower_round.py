# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a round on Flower costs with fedblend, beside bare Flower with the same bytes.

Four nodes on loopback with keys and TLS, one link, a model of about 1 MB. Bare Flower
sends as many bytes to every node and back, with the same waiting; fedblend trains,
keeps states on disk and writes its books. ``python benchmarks/flower_round.py``
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from fedblend.config import toml
from fedblend.config.config import check
from fedblend.deploy.ops import flwr_processes
from fedblend.deploy.ops.local_cluster import local_cluster
from fedblend.deploy.ops.submit import open_folder, run_experiment
from fedblend.experiments.run_folder import Folder, read_rows

NODES, ROUNDS, WIDTH, HIDDEN = 4, 8, 784, 300
BYTES = 4 * (WIDTH * HIDDEN + HIDDEN + HIDDEN * 10 + 10)

CONFIG = f"""
version = 1
name = "round"
[data]
partition = "nodes"
clients = {NODES}
kind = "classes"
classes = 10
shape = [{WIDTH}]
[model]
name = "mlp"
hidden = [{HIDDEN}]
[algorithm]
name = "fedavg"
rate = 0.1
steps = 1
batch_size = 20
[run]
rounds = {ROUNDS}
every = 1
[measure]
local = false
"""

PYPROJECT = """
[project]
name = "bare"
version = "1.0.0"
description = "as many bytes there and back"
license = "Apache-2.0"
dependencies = ["flwr"]
[tool.flwr.app]
publisher = "bench"
[tool.flwr.app.components]
serverapp = "bare.server:app"
clientapp = "bare.client:app"
[tool.flwr.app.config]
out = ""
rounds = 1
size = 1
nodes = 1
"""

CLIENT = """
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
import os
app = ClientApp()
@app.query()
def echo(message, context):
    size = len(message.content.array_records["a"]["b"].data)
    array = Array(dtype="uint8", shape=(size,), stype="raw", data=os.urandom(size))
    return Message(RecordDict({"a": ArrayRecord({"b": array})}), reply_to=message)
"""

SERVER = """
import json, os, time
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    config, seconds = context.run_config, []
    while len(list(grid.get_node_ids())) < config["nodes"]:
        time.sleep(0.2)
    for _ in range(config["rounds"]):
        begun = time.perf_counter()
        size = config["size"]
        data = os.urandom(size)
        messages = [
            Message(
                RecordDict({"a": ArrayRecord({"b": Array(
                    dtype="uint8", shape=(size,), stype="raw", data=data)})}),
                node, "query",
            )
            for node in grid.get_node_ids()
        ]
        waiting = set(grid.push_messages(messages))
        while waiting:
            for reply in grid.pull_messages(list(waiting)):
                waiting.discard(reply.metadata.reply_to_message_id)
            if waiting:
                time.sleep(0.2)
        seconds.append(time.perf_counter() - begun)
    with open(config["out"], "w") as file:
        json.dump(seconds, file)
"""


def rows(seed):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(200, WIDTH)).astype(np.float32)
    return {"inputs": inputs, "targets": rng.integers(0, 10, 200)}


def bare(made, folder):
    """Seconds of each round of bare Flower."""
    (folder / "bare").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    for name, text in (("__init__", ""), ("client", CLIENT), ("server", SERVER)):
        (folder / "bare" / f"{name}.py").write_text(text)
    out = folder / "seconds.json"
    config = f'out="{out}" rounds={ROUNDS} size={BYTES} nodes={NODES}'
    arguments = ("run", str(folder), flwr_processes.CONNECTION, "--run-config", config)
    flwr_processes.call(made.settings, *arguments)
    flwr_processes.wait_until(out.exists, 900, "bare Flower", every=1.0)
    time.sleep(1.0)
    return json.loads(out.read_text())


def ours(made, out):
    """Seconds of each round of fedblend, measuring left out."""
    config = check(toml.parse(CONFIG, "benchmark"), "benchmark")
    open_folder(out, config, made.settings, resume=False)
    run_experiment(made.settings, out)
    return [row["seconds"] for row in read_rows(Folder(out)) if row["rounds"]]


def main():
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        named = {f"node{number}": rows(number) for number in range(NODES)}
        with local_cluster(folder / "lab", named, log=print) as made:
            turns = [
                (bare(made, folder / f"bare{turn}"), ours(made, folder / f"out{turn}"))
                for turn in range(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
            ]
    # The first round compiles, or starts what is started once.
    plain = [s for one, _ in turns for s in one[1:]]
    with_us = [s for _, one in turns for s in one[1:]]
    first = [one[0] for _, one in turns]
    print(f"{NODES} nodes, {BYTES / 1e6:.2f} MB each way, {len(plain)} rounds each")
    for name, seconds in (("bare Flower", plain), ("fedblend", with_us)):
        middle = statistics.median(seconds)
        print(f"{name}: {middle:.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")
    print(f"fedblend's first rounds: {', '.join(f'{s:.2f} s' for s in first)}")
    more = statistics.median(with_us) - statistics.median(plain)
    print(f"more than bare Flower: {more:+.2f} s a round")


if __name__ == "__main__":
    main()
