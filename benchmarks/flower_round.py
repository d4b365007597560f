# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a round costs on Flower: bare, with fedblend's carrier, and with Flower's app.

Four nodes on loopback with keys and TLS. Bare Flower sends as many bytes to every node
and back with its own ``send_and_receive``; fedblend trains, keeps states on disk and
writes its checkpoint. Two federations are up at the same time, one with SuperNodes and
one with carriers, and the three take turns, because other programs may use the machine.

``python benchmarks/flower_round.py [TURNS] [--large]``: the model is tiny, or about
1 MB.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import federation_work
from fedblend_federation.flower import processes
from fedblend_federation.ops.experiments import open_folder, run_experiment
from fedblend_federation.ops.local_cluster import local_cluster

NODES, ROUNDS = 4, 8
SIZES = {"tiny": (8, 4), "large": (784, 300)}
"""Inputs and hidden units of the model."""
BAR = 0.6
"""Of bare Flower's round, the most that ours may take with the carrier."""

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
        replies = list(grid.send_and_receive(messages))
        assert len(replies) == config["nodes"]
        assert not any(reply.has_error() for reply in replies)
        seconds.append(time.perf_counter() - begun)
    with open(config["out"], "w") as file:
        json.dump(seconds, file)
"""


def bare(made, folder, size):
    """Seconds of each round of bare Flower."""
    (folder / "bare").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    for name, text in (("__init__", ""), ("client", CLIENT), ("server", SERVER)):
        (folder / "bare" / f"{name}.py").write_text(text)
    out = folder / "seconds.json"
    width, hidden = SIZES[size]
    sent = 4 * (width * hidden + hidden + hidden * 10 + 10)
    config = f'out="{out}" rounds={ROUNDS} size={sent} nodes={NODES}'
    arguments = ("run", str(folder), processes.CONNECTION, "--run-config", config)
    processes.call(made.settings, *arguments)
    processes.wait_until(out.exists, 900, "bare Flower", every=1.0)
    time.sleep(1.0)
    return json.loads(out.read_text())


def ours(made, out, size):
    """Seconds of each round of fedblend, measuring left out."""
    config = federation_work.config(NODES, *SIZES[size], ROUNDS)
    open_folder(out, config, made.settings, resume=False)
    run_experiment(made.settings, out)
    return federation_work.seconds_of(out)


def main():
    arguments = [word for word in sys.argv[1:] if word != "--large"]
    turns = int(arguments[0]) if arguments else 2
    size = "large" if "--large" in sys.argv else "tiny"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        width = SIZES[size][0]
        named = {f"node{n}": federation_work.rows(n, width) for n in range(NODES)}
        found = {"bare Flower": [], "carrier": [], "Flower's app": []}
        with (
            local_cluster(folder / "own", named, log=print) as own,
            local_cluster(folder / "flwr", named, supernodes=True, log=print) as flwr,
        ):
            for turn in range(turns):
                for name, seconds in (
                    ("bare Flower", bare(flwr, folder / f"bare{turn}", size)),
                    ("carrier", ours(own, folder / f"own{turn}", size)),
                    ("Flower's app", ours(flwr, folder / f"app{turn}", size)),
                ):
                    # The first round compiles, or starts what is started once.
                    found[name] += seconds[1:]
                    shown = ", ".join(f"{second:.2f}" for second in seconds)
                    print(f"turn {turn + 1}, {name}: {shown} s", flush=True)
    report(size, found)


def report(size, found):
    """Medians, and what they are of bare Flower's."""
    middle = {name: statistics.median(seconds) for name, seconds in found.items()}
    print(f"{NODES} nodes, {size} model, {len(found['carrier'])} rounds each")
    for name, seconds in found.items():
        share = middle[name] / middle["bare Flower"]
        print(
            f"{name}: median {middle[name]:.2f} s ({min(seconds):.2f} to "
            f"{max(seconds):.2f}), {share:.2f} of bare Flower"
        )
    held = middle["carrier"] <= BAR * middle["bare Flower"]
    print(f"at most {BAR} of bare Flower with the carrier: {'yes' if held else 'no'}")


if __name__ == "__main__":
    main()
