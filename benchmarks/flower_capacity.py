# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What federations of several sizes take on this machine: seconds, processor, memory.

All nodes are on loopback with keys and TLS, so they share the processors that in a real
federation everybody has for itself. ``python benchmarks/flower_capacity.py 2,4 0.1,1``
takes 2 and 4 nodes with models of 0.1 and 1 MB, prints a table and ends by itself.
"""

import contextlib
import datetime
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path

import federation_work
from fedblend_federation.ops.experiments import open_folder, run_experiment
from fedblend_federation.ops.local_cluster import local_cluster, processes_of

WIDTH, ROUNDS = 784, 4
PARTS = {
    "flwr-serverapp": "server",
    "flower-superlink": "link",
    "flower-supernode": "node",
    "flwr-clientapp": "client app",
    "federation door": "warm process",
}
"""What a process's command says, and what it is."""
TICKS = os.sysconf("SC_CLK_TCK")


class Watching:
    """Looks at the processes of a federation until it is told to end."""

    def __init__(self, folder: Path):
        self.folder, self.over = folder, threading.Event()
        self.memory: dict[str, int] = defaultdict(int)
        """Most that one process of each part had at once, in kB."""
        self._seconds: dict[int, float] = {}
        self._before = self._look()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def seconds(self) -> float:
        """Of processor since it began, of all that were seen."""
        self.over.set()
        self._thread.join()
        return sum(self._seconds.values()) - self._before

    def _watch(self) -> None:
        while not self.over.wait(0.2):
            self._look()

    def _look(self) -> float:
        for number in processes_of(self.folder):
            # Processes end while they are looked at.
            with contextlib.suppress(OSError, IndexError, ValueError):
                place = Path(f"/proc/{number}")
                used = (place / "stat").read_text().rpartition(")")[2].split()[11:13]
                self._seconds[number] = sum(map(int, used)) / TICKS
                words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                peak = (place / "status").read_text().partition("VmHWM:")[2].split()[0]
                for mark, part in PARTS.items():
                    if mark in words:
                        self.memory[part] = max(self.memory[part], int(peak))
        return sum(self._seconds.values())


def times(out: Path) -> list[float]:
    """Seconds from one counted round to the next, from the server's audit."""
    notes = map(json.loads, (out / "audit.jsonl").read_text().splitlines())
    counted = [
        datetime.datetime.fromisoformat(note["time"])
        for note in notes
        if note["event"] == "counted"
    ]
    between = itertools.pairwise(counted)
    return [(after - before).total_seconds() for before, after in between]


def measured(made, folder: Path, nodes: int, size: float) -> str:
    """A row of the table."""
    hidden = round(size * 1e6 / 4 / (WIDTH + 11))
    config = federation_work.config(
        nodes, WIDTH, hidden, ROUNDS, every=ROUNDS, deadline=3000.0, resend=3000.0
    )
    load, watching = os.getloadavg()[0], Watching(made.folder)
    try:
        open_folder(folder, config, made.settings, resume=False)
        run_experiment(made.settings, folder)
    finally:
        used = watching.seconds()
    took = times(folder)
    memory = " | ".join(f"{watching.memory[p] / 1e6:.2f}" for p in PARTS.values())
    return (
        f"| {nodes} | {size:g} | {statistics.median(took):.1f} ({min(took):.1f} to "
        f"{max(took):.1f}) | {used:.0f} | {memory} | {load:.1f} |"
    )


def main() -> None:
    asked = [word.split(",") for word in sys.argv[1:3]]
    counts, sizes = asked if len(asked) == 2 else (["2", "4"], ["0.1", "1"])
    parts = " | ".join(f"{part}, GB" for part in PARTS.values())
    print(f"| nodes | MB | seconds a round | processor, s | {parts} | load before |")
    print("|" + "---|" * (5 + len(PARTS)))
    for nodes in map(int, counts):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            named = {
                f"node{number}": federation_work.rows(number, WIDTH, 40)
                for number in range(nodes)
            }
            with local_cluster(folder / "lab", named, supernodes=True) as made:
                for size in map(float, sizes):
                    out = folder / f"out{size:g}"
                    print(measured(made, out, nodes, size), flush=True)


if __name__ == "__main__":
    main()
