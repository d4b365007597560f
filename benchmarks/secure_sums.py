# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What secure sums cost: masking a million numbers, and a round against a plain one.

Eight nodes train a model of about 1 MB for one step of 20 rows, the least that a round
can be: in one process (loopback), and on Flower's real processes with keys and TLS.
Plain and secure experiments take turns, because other programs may use the machine.

``python benchmarks/secure_sums.py [masks] [loopback] [flower] [--turns N]``: all three
if none is named.
"""

import argparse
import secrets
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

import federation_work
from fedblend.config.config import dump
from fedblend_federation.client.node import answering
from fedblend_federation.ops.experiments import open_folder, run_experiment
from fedblend_federation.ops.local_cluster import local_cluster, write_rows
from fedblend_federation.ops.provision import provision
from fedblend_federation.ops.settings import NodeSettings, load_as
from fedblend_federation.secure.flatten import FixedPoint
from fedblend_federation.secure.session import Attempt, Party, View, public_key, unmask
from fedblend_federation.server.run import run_server
from fedblend_federation.transport import Reply

NODES, ROUNDS, WIDTH, HIDDEN = 8, 6, 784, 300
NUMBERS = 1_000_000
BAR = 2.0
"""The most that a secure round may take, in plain rounds."""


class Loopback:
    """Nodes in this process reply at once."""

    def __init__(self, nodes):
        self.nodes, self.waiting = nodes, []

    def addresses(self):
        """All nodes."""
        return sorted(self.nodes)

    def send(self, outgoing):
        """Have the nodes reply."""
        for address, data in outgoing.items():
            self.waiting.append(Reply(address, self.nodes[address].reply(data)))

    def receive(self):
        """What they replied."""
        found, self.waiting = self.waiting, []
        return found


def config(secure):
    return federation_work.config(NODES, WIDTH, HIDDEN, ROUNDS, secure=secure)


def seconds_of(out):
    """Of each round but the first, which compiles."""
    return federation_work.seconds_of(out)[1:]


def loopback(turns):
    """Rounds in one process."""
    names = [f"node{n}" for n in range(NODES)]
    with tempfile.TemporaryDirectory() as place:
        lab = Path(place) / "lab"
        provision(lab, host="127.0.0.1", nodes=names, with_keys=True)
        for number, name in enumerate(names):
            own = federation_work.rows(number, WIDTH)
            write_rows(lab / "nodes" / name, own, None)
        homes = [lab / "nodes" / name for name in names]
        made = {
            n: answering(load_as(NodeSettings, home / "node.toml"))
            for n, home in enumerate(homes)
        }

        def run(out, secure):
            out.mkdir()
            (out / "config.toml").write_text(dump(config(secure)))
            run_server(out, Loopback(made), poll=0.0)
            return seconds_of(out)

        return in_turns(turns, Path(place), run)


def flower(turns):
    """Rounds on Flower's processes."""
    named = {f"node{n}": federation_work.rows(n, WIDTH) for n in range(NODES)}
    with (
        tempfile.TemporaryDirectory() as place,
        local_cluster(Path(place) / "own", named, log=print) as made,
    ):

        def run(out, secure):
            open_folder(out, config(secure), made.settings, resume=False)
            run_experiment(made.settings, out)
            return seconds_of(out)

        return in_turns(turns, Path(place), run)


def in_turns(turns, place, run):
    found = {"plain": [], "secure": []}
    for turn in range(turns):
        for name in found:
            seconds = run(place / f"{name}{turn}", name == "secure")
            found[name] += seconds
            shown = ", ".join(f"{second:.2f}" for second in seconds)
            print(f"turn {turn + 1}, {name}: {shown} s", flush=True)
    return found


def report(what, found):
    middle = {name: statistics.median(seconds) for name, seconds in found.items()}
    ratio = middle["secure"] / middle["plain"]
    print(
        f"{what}, {NODES} nodes, 1 MB: plain {middle['plain']:.2f} s, secure "
        f"{middle['secure']:.2f} s (medians of {len(found['plain'])} rounds), "
        f"{ratio:.2f} times; at most {BAR:g}: {'yes' if ratio <= BAR else 'no'}"
    )


def masks():
    """Seconds of each step for one node, and of the server's."""
    print("nodes  neighbors  share  mask  open  server, all there  a third gone")
    for nodes in (8, 40, 200):
        private = {c: X25519PrivateKey.generate() for c in range(nodes)}
        keys = {c: public_key(key) for c, key in private.items()}
        attempt = Attempt("bench", 0, 0, keys, FixedPoint(64, 65536.0, nodes), "")
        parties = {
            c: Party(attempt, c, key, secrets.token_bytes(32))
            for c, key in private.items()
        }
        graph = attempt.graph
        begun = time.perf_counter()
        shared = {c: party.share() for c, party in parties.items()}
        share = (time.perf_counter() - begun) / nodes
        view = View({c: party.nonce for c, party in parties.items()}, "", 1.0)
        answer = np.zeros(NUMBERS, np.uint64)
        begun = time.perf_counter()
        for client in range(3):
            parties[client].mask(answer, view)
        mask = (time.perf_counter() - begun) / 3
        # The sum of masked zeros; only the time to open it is of interest.
        server = []
        for answered in (list(range(nodes)), list(range(nodes - nodes // 3))):
            begun, opened = time.perf_counter(), {}
            for client in answered:
                boxes = {
                    c: shared[c].boxes[
                        graph.neighbors(c, graph.holders[c]).index(client)
                    ]
                    for c in graph.neighbors(client, shared)
                }
                opened[client] = parties[client].open(view, answered, boxes)
            step = (time.perf_counter() - begun) / len(answered)
            begun = time.perf_counter()
            seeds = {c: one.seeds for c, one in shared.items()}
            digest = view.digest(attempt.digest)
            unmask(answer, graph, digest, seeds, answered, opened)
            server.append(time.perf_counter() - begun)
        neighbors = len(graph.holders[0]) - 1
        print(
            f"{nodes:5}  {neighbors:9}  {share:.3f}  {mask:.3f}  {step:.3f}  "
            f"{server[0]:.2f}  {server[1]:.2f}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description="What secure sums cost.")
    parser.add_argument("what", nargs="*", help="masks, loopback, flower")
    parser.add_argument("--turns", type=int, default=2)
    given = parser.parse_args()
    chosen = given.what or ["masks", "loopback", "flower"]
    if "masks" in chosen:
        masks()
    for name, run in (("loopback", loopback), ("flower", flower)):
        if name in chosen:
            report(name, run(given.turns))


if __name__ == "__main__":
    main()
