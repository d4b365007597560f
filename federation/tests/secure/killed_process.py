# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A server and its nodes in one process, which is killed with -9 at a chosen write.

``python killed_process.py FOLDER ALGORITHM WHERE TURN before|after``.
"""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

from federations import SecureFederation
from trials import Clock

from fedblend_federation import message as messages
from fedblend_federation import transport
from fedblend_federation.server import collection

GONE = {("share", 0): {1}, ("round", 0): {6}, ("unmask", 1): {2}, ("round", 1): {0}}
LOG = "answers.jsonl"


def federation(folder: Path, name: str) -> SecureFederation:
    """Eight nodes, some of which are gone at times; what they answer is logged."""
    made = SecureFederation(folder, name, GONE, rounds=2, quorum=0.5)

    def logged(address, data):
        """What leaves a node, with what it was asked: one line each."""
        reply = messages.decode(data)
        if reply.kind in ("round", "join"):
            line = [address, reply.digest, data.hex()]
            with open(folder / LOG, "a") as log:
                log.write(json.dumps(line) + "\n")
        return [data]

    made.transport.spoil = logged
    folder.mkdir(parents=True, exist_ok=True)
    return made


def run_until_killed(
    folder: Path, name: str, where: str, turn: int, after: bool
) -> None:
    """Run a federation in a process that dies around a write below a folder."""
    replace, turns = os.replace, iter(range(turn + 1))

    def killing(source, target):
        mine = where in str(target) and next(turns, None) == turn
        if mine and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)
        if mine and after:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = killing
    federation(folder, name).run()


def main() -> None:
    """Wait by a clock of its own, as tests do."""
    folder, name, where, turn, when = sys.argv[1:]
    clock = Clock()
    waiting = partial(transport.exchange, clock=clock, sleep=clock.sleep)
    collection.exchange = waiting
    run_until_killed(Path(folder), name, where, int(turn), when == "after")


if __name__ == "__main__":
    main()
