# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A server that is killed with -9 loses no round, and uses no mask twice.

Server and nodes are one process here, and are killed together, at a chosen write.
"""

import json
import os
import random
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import killed_process
import pytest
from federations import CLIENTS, models, same
from killed_process import LOG, federation, run_until_killed
from trials import clock

from fedblend_federation import message as messages

_ = clock
FORKS = ("fedavg",)
"""What a forked process can compute. It has none of the threads of JAX, to which JAX
hands longer computations: others get a process of their own, which compiles anew."""


def outcome(folder: Path, name: str) -> dict:
    """All models, and the bits of every client, of a federation that goes on."""
    made = federation(folder, name)
    server = made.run()
    bits = {"up": server.ledger.up, "down": server.ledger.down, "bases": server.bases}
    return {**models(made, server), **bits}


def killed(folder: Path, name: str, where: str, turn: int, after: bool) -> bool:
    """Whether a process of its own was killed around a write below a folder."""
    if name not in FORKS:
        when = "after" if after else "before"
        words = [str(folder), name, where, str(turn), when]
        program = [sys.executable, killed_process.__file__, *words]
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(program, env={**os.environ, **path}, timeout=600)
        assert done.returncode in (0, -signal.SIGKILL)
        return done.returncode != 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks
        child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    try:
        run_until_killed(folder, name, where, turn, after)
    finally:
        os._exit(0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """By algorithm; everything is compiled before processes are forked."""
    found: dict[str, dict] = {}

    def run(name: str) -> dict:
        if name not in found:
            found[name] = outcome(tmp_path_factory.mktemp("undisturbed"), name)
        return found[name]

    return run


def check(folder: Path, name: str, expected: dict) -> None:
    assert same(outcome(folder, name), expected)
    masked: dict[tuple, set] = {}
    for line in (folder / LOG).read_text().splitlines():
        address, digest, data = json.loads(line)
        reply = messages.decode(bytes.fromhex(data))
        # What else a reply has is a hash of the node's audit, which has grown.
        numbers = reply.arrays["['masked']"].tobytes()
        masked.setdefault((address, digest), set()).add(numbers)
    assert masked and all(len(sent) == 1 for sent in masked.values())


WRITES = range(18)
"""Of the server in two rounds: progress of two sums, checkpoints of five steps."""


@pytest.mark.parametrize("turn", [2, 6, pytest.param(8, id="open")])
def test_a_kill_in_the_middle_of_a_sum_changes_nothing(turn, tmp_path, undisturbed):
    expected = undisturbed("fedavg")
    assert killed(tmp_path, "fedavg", "/server/", turn, after=True)
    check(tmp_path, "fedavg", expected)


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_a_kill_at_any_write_of_the_server_changes_nothing(
    after, tmp_path, undisturbed
):
    expected, turn = undisturbed("fedavg"), 0
    while killed(tmp_path / str(turn), "fedavg", "/server/", turn, after):
        check(tmp_path / str(turn), "fedavg", expected)
        turn += 1
    assert turn >= len(WRITES)


@pytest.mark.slow
@pytest.mark.parametrize("turn", [0, 1, 2, 3, 5, 8, 11, 14])
def test_nor_with_a_sum_at_enrollment(turn, tmp_path, undisturbed):
    """FLIX: before the first round the server sums what clients send on joining."""
    expected, after = undisturbed("flix"), turn % 2 == 0
    assert killed(tmp_path, "flix", "/server/", turn, after)
    check(tmp_path, "flix", expected)


@pytest.mark.slow
def test_a_kill_at_writes_of_nodes_changes_nothing(tmp_path, undisturbed):
    expected, choose, deaths = undisturbed("flix"), random.Random(0), 0
    for number in range(8):
        folder, turn = tmp_path / str(number), choose.randrange(100)
        node = f"/node{choose.randrange(CLIENTS)}/" if number % 2 else "/node"
        place = turn // (CLIENTS if number % 2 else 1)
        deaths += killed(folder, "flix", node, place, True)
        check(folder, "flix", expected)
    assert deaths >= 4
