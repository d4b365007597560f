# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Peers in processes of their own that take turns, so that noise hits all alike."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
PYTHON = Path(sys.executable)


class Found(NamedTuple):
    """Seconds a round in every turn, and the peer's own summary."""

    seconds: list[float]
    summary: dict

    @property
    def median(self) -> float:
        """The median over the turns."""
        return statistics.median(self.seconds)

    @property
    def least(self) -> float:
        """The smallest, which a busy machine disturbs least."""
        return min(self.seconds)

    def ratio_to(self, other: "Found") -> float:
        """The median of the ratios turn by turn."""
        return statistics.median(
            mine / theirs
            for mine, theirs in zip(self.seconds, other.seconds, strict=True)
        )


class Peer:
    """A script of this folder, started with ``--hold``; see ``work.measure``.

    ``failure`` is the last line of what it complained of if it did not start, within
    ``patience`` seconds. A ``checkout`` is the folder of another commit, whose script
    and package are used.
    """

    def __init__(
        self,
        name: str,
        python: Path,
        script: str,
        *options: object,
        patience: float = 3600.0,
        checkout: Path = HERE.parent,
    ):
        self.name = name
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(python), str(checkout / "benchmarks" / script), *map(str, options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment(checkout),
        )
        self.failure: str | None = None
        watch = threading.Timer(patience, self._process.kill)
        watch.start()
        try:
            self._read()
        except RuntimeError as error:
            self.failure = str(error)
        finally:
            watch.cancel()

    def turn(self) -> float:
        """Seconds a round of the next block."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._read()["seconds"]

    def finish(self) -> dict:
        """The summary; the process ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        summary = self._read()
        self._process.wait()
        return summary

    def _read(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            killed = "it was killed" if self._process.returncode < 0 else "no word"
            lines = self._errors.read().strip().splitlines() or [killed]
            raise RuntimeError(lines[-1])
        return json.loads(line)


def take_turns(peers: list[Peer], repeats: int) -> list[Found]:
    """Every peer computes a block, then every peer the next, and so on."""
    turns = [[peer.turn() for peer in peers] for _ in range(repeats)]
    return [
        Found(list(seconds), peer.finish())
        for peer, seconds in zip(peers, zip(*turns, strict=True), strict=True)
    ]


def environment(checkout: Path = HERE.parent) -> dict[str, str]:
    """Finds fedblend where it is not installed; takes GPU memory only as needed."""
    paths = [str(checkout / "src"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
