# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What really travels between hosts, beside the bits that are counted.

The proxy writes down the size of every call. Between experiments of two and of six
rounds lie four rounds and nothing else. Minutes; needs root, ip and nginx.
``pytest -n 0 -m slow -s federation/tests/test_bytes_on_flower.py`` prints the tables.
"""

import json
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from configured import POLICY, write_rows
from hosts import SERVER, Hosts, hosts, possible
from replay import models, replayed

from fedblend.runs import run_folder
from fedblend_federation import message as messages

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not possible(), reason="no network namespaces here"),
]
NAMES = ("alice", "bob")
FEW, MANY = 2, 6
MODELS = {"small": 'name = "softmax"', "large": 'name = "mlp"\nhidden = [20000]'}
DOWN = ("pull-messages", "pull-object", "confirm-message-received")
UP = ("push-messages", "push-object")
NOTHING = 200
"""Bytes: the reply to a node that asks for messages is longer if there is one."""
CONFIG = """
version = 1
name = "bytes"
[data]
partition = "nodes"
clients = 2
kind = "classes"
classes = 3
shape = [6]
test = 0.25
[model]
{model}
[algorithm]
name = "fedavg"
rate = 0.1
steps = 1
batch_size = 8
[run]
rounds = {rounds}
every = {rounds}
[measure]
local = false
[federation]
deadline = 300.0
resend = 300.0
"""


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    place = write_rows(tmp_path_factory.mktemp("rows"))
    rows = {
        name: dict(np.load(place / f"rows{client}.npz"))
        for client, name in enumerate(NAMES)
    }
    with hosts(tmp_path_factory.mktemp("bytes") / "lab", rows, POLICY) as made:
        yield made


def experiment(made: Hosts, out: Path, model: str, rounds: int) -> None:
    file = out.with_suffix(".toml")
    file.write_text(CONFIG.format(model=MODELS[model], rounds=rounds))
    settings = made.folder / "server" / "server.toml"
    where = ["--server", settings, "--out", out]
    subprocess.run(made.fedblend(SERVER, "run", file, *where), check=True)


def travelled(made: Hosts, calls: list) -> Counter:
    """Bytes and calls of the first node that carried messages, by way."""
    found: Counter = Counter()
    for who, what, request, answer in calls:
        name = what.rpartition("/")[2]
        if who != made.address(NAMES[0]):
            continue
        if name == "pull-messages" and answer < NOTHING:
            found["idle calls"] += 1
            found["idle bytes"] += request + answer
            continue
        for way, names in (("down", DOWN), ("up", UP)):
            if name in names:
                found[way] += request + answer
                found[f"{way} calls"] += 1
    return found


def counted(out: Path) -> dict[str, float]:
    """Bytes of a client by the communication log."""
    (summary,) = run_folder.read_summary(run_folder.Folder(out))["runs"]
    return {way: summary["bits"][way] / 8 / len(NAMES) for way in ("up", "down")}


@pytest.mark.parametrize("model", MODELS)
def test_what_travels_is_what_is_counted(model, federation, tmp_path):
    seen, logs, cables = [], [], []
    for rounds in (FEW, MANY):
        before = len(federation.calls()), sum(federation.traffic(NAMES[0]))
        experiment(federation, tmp_path / str(rounds), model, rounds)
        calls = federation.calls()[before[0] :]
        seen.append(travelled(federation, calls))
        cables.append(sum(federation.traffic(NAMES[0])) - before[1])
        logs.append(counted(tmp_path / str(rounds)))
    more = MANY - FEW
    for way in ("down", "up"):
        real = (seen[1][way] - seen[0][way]) / more
        said = (logs[1][way] - logs[0][way]) / more
        number = (seen[1][f"{way} calls"] - seen[0][f"{way} calls"]) / more
        print(
            f"\n{model}, {way}: {real:.0f} bytes a message in {number:g} calls", end=""
        )
        print(f", {said:.0f} counted: {real - said:.0f} more", end="")
        if model == "large":
            assert said < real <= 1.02 * said + 4096
    idle = seen[1]["idle bytes"] / seen[1]["idle calls"]
    wire = (cables[1] - cables[0]) / more
    print(f"\n{model}: {wire:.0f} bytes a round on the cable; {idle:.0f} an idle call")


@pytest.mark.parametrize("model", MODELS)
def test_messages_hold_what_is_documented(model, federation, tmp_path):
    """Every kind of message: its fields, its arrays and its size."""
    out = tmp_path / "out"
    experiment(federation, out, model, FEW)
    homes, record = [federation.home(name) for name in NAMES], []
    assert models(out, homes) == replayed(out, homes, {}, tmp_path / "again", record)
    lines = {}
    for request, reply in record:
        for way, data in (("to", request), ("from", reply)):
            message = messages.decode(data)
            arrays = sum(array.nbytes for array in message.arrays.values())
            fields = {k: len(json.dumps(v)) for k, v in message.fields.items()}
            lines[message.kind, way] = (
                f"{message.kind} {way} a node: {len(data)} bytes, {arrays} of numbers, "
                f"fields {fields}, arrays {sorted(message.arrays)}"
            )
            assert len(data) <= arrays + 4096
    print(*lines.values(), sep="\n")
    assert len(lines) == 8
