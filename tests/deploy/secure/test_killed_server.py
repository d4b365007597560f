# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A server that is killed with -9 loses no round, and uses no mask twice.

Server and nodes are one process here, and are killed together, at a chosen write.
"""

import json
import os
import random
import signal
import warnings
from pathlib import Path

import pytest
from federations import CLIENTS, SecureFederation, models, same
from trials import clock

from fedblend.deploy import message as messages

_ = clock
GONE = {("share", 0): {1}, ("round", 0): {6}, ("unmask", 1): {2}, ("round", 1): {0}}
LOG = "answers.jsonl"


def federation(folder: Path, name: str) -> SecureFederation:
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


def outcome(folder: Path, name: str) -> dict:
    """All models, and the bits of every client, of a federation that goes on."""
    made = federation(folder, name)
    server = made.run()
    bits = {"up": server.ledger.up, "down": server.ledger.down, "bases": server.bases}
    return {**models(made, server), **bits}


def killed(folder: Path, name: str, where: str, turn: int, after: bool) -> bool:
    """Whether a process of its own was killed around a write below a folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks
        child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    replace, turns = os.replace, iter(range(turn + 1))

    def killing(source, target):
        mine = where in str(target) and next(turns) == turn
        if mine and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)
        if mine and after:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = killing
    try:
        federation(folder, name).run()
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
        masked.setdefault((address, digest), set()).add(data)
        assert "['masked']" in reply.arrays
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
@pytest.mark.parametrize("name", ["fedavg", "flix"])
def test_a_kill_at_any_write_of_the_server_changes_nothing(
    name, after, tmp_path, undisturbed
):
    expected, turn = undisturbed(name), 0
    while killed(tmp_path / str(turn), name, "/server/", turn, after):
        check(tmp_path / str(turn), name, expected)
        turn += 1
    assert turn >= len(WRITES)


@pytest.mark.slow
def test_a_kill_at_writes_of_nodes_changes_nothing(tmp_path, undisturbed):
    expected, choose = undisturbed("flix"), random.Random(0)
    for number in range(20):
        folder, turn = tmp_path / str(number), choose.randrange(200)
        node = f"/node{choose.randrange(CLIENTS)}/" if number % 2 else "/node"
        killed(folder, "flix", node, turn // (CLIENTS if number % 2 else 1), True)
        check(folder, "flix", expected)
