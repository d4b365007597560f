# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Random lies about real terms: shipped nodes, policies of ``init``, real algorithms.

``test_random_lies`` has many lies, about terms of its own. Here somebody between the
shipped server and five nodes changes configurations, models and the order of messages.
"""

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attacker import Attacker, leaks
from configured import experiment
from liars import changed, forge, some_of
from test_secure_experiment import secure
from trials import apart, clock, forged

from fedblend.config import toml
from fedblend.errors import InputError
from fedblend_federation.client.node import node_of
from fedblend_federation.client.state import read_terms
from fedblend_federation.ops.credentials import template
from fedblend_federation.ops.provision import provision
from fedblend_federation.ops.settings import NodeSettings, load_as
from fedblend_federation.secure.flatten import coarse
from fedblend_federation.server.run import run_server
from loopback import LoopbackTransport

_ = clock
NAMES = ["alice", "bob", "carol", "dan", "erin"]
ROWS, TRAIN, LEAST = 40, 30, 4
POLICY = (
    template("policy.toml")
    .replace('algorithms = "updates"', 'algorithms = "any"')
    .replace("discloses = []", 'discloses = ["own_models"]')
    .replace("min_cohort = 3", f"min_cohort = {LEAST}")
    .replace('names = ["loss", "accuracy"]', "names = []")
)
WORK = "rate = 0.3\nsteps = 2\nbatch_size = 10\n"
ONE_STEP = 'rate = 0.3\nsteps = 1\nbatch_size = "all"\n'
FLIX = """alpha = 0.5
personal = { solver = "sgd", rate = 0.1, steps = 5, batch_size = 10, turns = 2 }
"""
DIANA = """[compress]
how = "diana"
masks = "one"
compressor = { name = "rand_k", k = 4 }
"""
ALGORITHMS = {
    "fedavg": f'[algorithm]\nname = "fedavg"\n{WORK}',
    "scaffold": f'[algorithm]\nname = "scaffold"\n{WORK}',
    "apfl": f'[algorithm]\nname = "apfl"\n{WORK}alpha = 0.5\n',
    "flix": f'[algorithm]\nname = "flix"\n{ONE_STEP}{FLIX}',
    "diana": f'[algorithm]\nname = "fedavg"\n{WORK}{DIANA}',
}
CONFIG = """
version = 1
name = "nodes"
[data]
partition = "nodes"
clients = 5
kind = "classes"
classes = 3
shape = [3]
test = 0.25
[model]
MODEL
l2 = 0.01
[run]
rounds = 2
every = 2
seed = 5
[measure]
local = false
[federation]
quorum = 0.5
deadline = 6.0
resend = 30.0
"""


class Federation:
    """Five nodes with folders, rows, keys and the policy of ``init``."""

    def __init__(self, folder: Path, lab: Path):
        self.folder, self.last = folder, 0
        self.nodes = {1000 + c: self._node(c, lab) for c in range(len(NAMES))}

    def _node(self, client: int, lab: Path) -> Any:
        home, rng = self.folder / f"node{client}", np.random.default_rng(client)
        home.mkdir(parents=True)
        targets = rng.integers(0, 3, ROWS)
        inputs = (rng.normal(size=(ROWS, 3)) + targets[:, None]).astype(np.float32)
        np.savez(home / "rows.npz", inputs=inputs, targets=targets)
        (home / "policy.toml").write_text(POLICY)
        keys = lab / "nodes" / NAMES[client]
        (home / "node.toml").write_text(
            f'version = 1\nserver = "127.0.0.1:8000"\nclient = {client}\nca = "ca"\n'
            f'key = "key"\nfolder = "state"\npolicy = "policy.toml"\n'
            f'roster = "{keys}/roster.toml"\nsecure_key = "{keys}/secure.key"\n'
            f'[data]\nfile = "{home / "rows.npz"}"\n'
        )
        return node_of(load_as(NodeSettings, home / "node.toml"))

    def place(self, client: int, experiment: str) -> Path:
        return self.folder / f"node{client}" / "state" / experiment

    def means_of(self, client: int, request: Any) -> Any:
        terms = read_terms(self.place(client, request.experiment))
        return self.nodes[1000 + client].permissions().secure(terms)

    def rows_of(self, client: int, means: Any) -> float:
        del client
        rows = coarse(np.asarray(float(TRAIN)))
        return 1.0 if means.weights == "uniform" else float(rows)

    @property
    def notes(self) -> list[tuple[str, dict[str, Any]]]:
        """The line of the last answer in the audit of the node that was asked."""
        audit = self.folder / f"node{self.last}" / "state" / "audit.jsonl"
        lines = map(json.loads, reversed(audit.read_text().splitlines()))
        return [next(("", x["fields"]) for x in lines if x["event"] == "masked")]


class Reader(Attacker):
    """Reads what these nodes reply."""

    def _place(self, client: int, request: Any) -> Path:
        self.federation.last = client
        return self.federation.place(client, request.experiment)


class Liar(LoopbackTransport):
    """Between the shipped server and its nodes: spoils what goes to some of them."""

    def __init__(self, reader: Reader, rng: random.Random, lying: float):
        super().__init__(reader.federation.nodes)
        self.reader, self.rng, self.lying, self.lies = reader, rng, lying, 0
        self.old: list[tuple[int, bytes]] = []
        self.digests: dict[int, str] = {}

    def send(self, outgoing: Any) -> None:
        rng, seed, lie = self.rng, self.rng.random(), ""
        if rng.random() < self.lying:
            self.lies += 1
            lie = rng.choice(["forge", "forge", "terms", "repeat", "late", "drop"])
        some = some_of(list(outgoing), rng)
        sent = list(outgoing.items())
        rng.shuffle(sent)
        late = rng.sample(self.old, min(2, len(self.old))) if lie == "late" else []
        for address, data in [*sent, *late]:
            if address in some and lie == "drop":
                continue
            if address in some and lie in ("forge", "terms"):
                change = forge if lie == "forge" else other_terms
                data = change(data, random.Random(seed))  # the same for all of them
            for _ in range(2 if lie == "repeat" else 1):
                self.old.append((address, data))
                reply = self.reader.ask(address - 1000, data)
                self.waiting.append((address, self._as_if_all_agreed(reply)))

    def _as_if_all_agreed(self, data: bytes) -> bytes:
        header, metadata, body = apart(data)
        fields = json.loads(metadata["fields"])
        if metadata["kind"] == "share":
            round = int(metadata["round"])
            fields["attempt"] = self.digests.setdefault(round, fields["attempt"])
        return forged(header, {**metadata, "fields": json.dumps(fields)}, body)


def other_terms(data: bytes, rng: random.Random) -> bytes:
    """A message with another configuration, or the same if it has none."""
    header, metadata, body = apart(data)
    fields = json.loads(metadata["fields"])
    if "config" in fields:
        tables = toml.parse(fields["config"], "test")
        name = rng.choice(["algorithm", "algorithm", "model", "run", "federation"])
        tables[name] = changed(tables[name], rng)
        with suppress(TypeError, ValueError):  # what TOML cannot say
            fields["config"] = "".join(
                f"{key} = {toml.literal(value)}\n" for key, value in tables.items()
            )
    return forged(header, {**metadata, "fields": json.dumps(fields)}, body)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab") / "lab"
    provision(folder, host="127.0.0.1", nodes=NAMES, with_keys=True)
    return folder


def trial(folder: Path, lab: Path, name: str, seed: int, lying: float) -> Liar:
    """An experiment through a liar; whether it ends well is the server's matter."""
    reader = Reader(Federation(folder, lab))
    liar = Liar(reader, random.Random(seed), lying)
    network = 'name = "mlp"\nhidden = [4]'  # a server may not know FLIX's linear ones
    model = network if name == "flix" else 'name = "softmax"'
    text = secure(CONFIG.replace("MODEL", model) + ALGORITHMS[name])
    with suppress(InputError):
        run_server(experiment(folder / "run", text), liar, poll=0.0)
    return liar


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in list(ALGORITHMS)[1:]]


@pytest.mark.parametrize("name", ["fedavg", *SLOW])
def test_an_honest_sum_of_real_terms_is_read_by_nobody_but_as_a_whole(
    name, lab, tmp_path
):
    liar = trial(tmp_path, lab, name, 0, 0.0)
    found = liar.reader.sums()
    assert len(found) >= 2 and leaks(found, LEAST) == []
    assert liar.reader.faults == []


@pytest.mark.parametrize(
    ("lies", "names"),
    [(3, ["fedavg"]), pytest.param(24, list(ALGORITHMS), marks=pytest.mark.slow)],
)
def test_no_lie_about_real_terms_opens_a_sum_of_few(lies, names, lab, tmp_path):
    done, sums, found, seed = 0, 0, [], 0
    while done < lies and not found:
        seed += 1
        name = names[seed % len(names)]
        liar = trial(tmp_path / str(seed), lab, name, seed, 0.4)
        read = liar.reader.sums()
        done, sums = done + liar.lies, sums + len(read)
        lines = leaks(read, LEAST) + liar.reader.faults
        found = [f"seed {seed}, {name}: {line}" for line in lines]
    assert found == [] and sums
