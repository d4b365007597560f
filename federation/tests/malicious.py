# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A server that wants a node's rows, and what it can compute from the answers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedblend import keys
from fedblend.batches import random_rows
from fedblend.config import toml
from fedblend_federation import message as messages
from fedblend_federation.client.node import node_of
from fedblend_federation.client.state import add_checksum
from fedblend_federation.message import ENROLLED, UNKNOWN, Message
from fedblend_federation.ops.credentials import template
from fedblend_federation.ops.settings import NodeSettings, load_as
from fedblend_federation.policy.policy import Refusal

CLIENT, ROWS, WIDTH = 0, 64, 4
COLUMNS = ["age", "dose", "weight", "height"]
SECRET = bytes(range(32))
"""Of the node, so that a test has the same batches every time."""
HONEST: dict[str, dict[str, Any]] = {
    "data": {
        "partition": "nodes",
        "clients": 2,
        "kind": "classes",
        "labels": ["ill", "well"],
        "columns": COLUMNS,
        "test": 0.375,
    },
    "model": {"name": "softmax"},
    "algorithm": {"name": "fedavg", "rate": 0.1, "steps": 4, "batch_size": 8},
    "run": {"rounds": 100},
    "measure": {"local": False},
}
"""40 training rows, 24 test rows."""


BARE = template("policy.toml").replace("noise = 0.2 ", "noise = 0.0 ")
"""The policy that ``init`` writes, without noise for rows."""


def make_rows(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, 2, ROWS)
    return (rng.normal(size=(ROWS, WIDTH)) + targets[:, None]).round(6), targets


def write_node(home: Path, seed: int = 0, policy: str | None = None) -> NodeSettings:
    """A node with a table of its own, under the policy that ``init`` writes."""
    home.mkdir(parents=True)
    inputs, targets = make_rows(seed)
    lines = [
        ",".join([*map(str, row), ("ill", "well")[target]])
        for row, target in zip(inputs.tolist(), targets, strict=True)
    ]
    (home / "rows.csv").write_text("\n".join([",".join([*COLUMNS, "state"]), *lines]))
    (home / "policy.toml").write_text(
        template("policy.toml") if policy is None else policy
    )
    (home / "node.toml").write_text(
        f'version = 1\nserver = "127.0.0.1:8000"\nclient = {CLIENT}\nca = "ca"\n'
        'key = "key"\nfolder = "state"\npolicy = "policy.toml"\n'
        '[data]\nfile = "rows.csv"\ntarget = "state"\n'
    )
    (home / "state").mkdir(mode=0o700)
    (home / "state" / "batches.key").write_bytes(add_checksum(SECRET))
    return load_as(NodeSettings, home / "node.toml")


def config(**changes: Any) -> str:
    """The honest configuration, with whole tables or keys of them changed."""
    tables = {name: HONEST.get(name, {}) | table for name, table in changes.items()}
    lines = ['version = 1\nname = "trial"']
    for name, table in (HONEST | tables).items():
        given = {key: value for key, value in table.items() if value is not None}
        body = "".join(f"{k} = {toml.literal(v)}\n" for k, v in given.items())
        lines.append(f"[{name}]\n{body}")
    return "\n".join(lines)


class Refused(Exception):
    """A node refused a request, and why."""


class Attacker:
    """A server that asks one node for whatever it likes."""

    def __init__(self, settings: NodeSettings):
        self.settings, self.node = settings, node_of(settings)
        self.experiment, self.begun = "none", 0

    def ask(self, kind: str, payload: Any = (), **head: Any) -> Message:
        message = Message(kind, self.experiment, CLIENT)._replace(**head)
        return self.send(messages.encode(message, payload))

    def send(self, data: bytes) -> Message:
        reply = messages.decode(self.node.reply(data))
        if reply.kind == "refused":
            raise Refused(reply.fields["reason"])
        return reply

    def begin(self, text: str, **terms: Any) -> None:
        """Describe and enroll, as for a new experiment."""
        self.begun += 1
        self.experiment = f"experiment{self.begun}"
        fields = {"config": text}
        described = self.ask("describe", client=UNKNOWN, fields=fields)
        self.terms = {**fields, "capacities": described.fields["counts"], **terms}
        try:
            self.executor = self.node.permissions().executor(self.terms)
        except Refusal:
            self.ask("enroll", fields=self.terms)
        self.ask("enroll", self.model(0.0), fields=self.terms)

    def model(self, value: float) -> Any:
        return jax.tree.map(
            lambda leaf: np.full(leaf.shape, value, leaf.dtype),
            self.executor.setup.params,
        )

    def steep(self, factor: float, age: float) -> Any:
        """A model that is sure of class 1 above an age, and of class 0 below it."""
        model = self.model(0.0)
        for leaf in jax.tree.leaves(model):
            if leaf.ndim == 2:
                leaf[1, 0] = factor
            else:
                leaf[1] = -factor * age
        return model

    def round(
        self, number: int, model: Any = None, **extra: Any
    ) -> dict[str, np.ndarray]:
        """The arrays of an answer, from the state of enrollment."""
        shared = self.model(0.0) if model is None else model
        payload = self.executor.message._replace(shared=shared, round=None, **extra)
        reply = self.ask("round", payload, round=number, base=ENROLLED)
        return {name.split(".")[-1]: array for name, array in reply.arrays.items()}

    def measure(self, number: int, model: Any = None, **fields: Any) -> dict[str, Any]:
        deployed = self.executor.deployment
        shared = self.model(0.0) if model is None else model
        payload = deployed._replace(
            message=deployed.message._replace(shared=shared, round=None)
        )
        head = {"round": number, "base": ENROLLED, "fields": fields}
        reply = self.ask("measure", payload, **head)
        return reply.fields["measures"]

    def audit(self) -> list[dict[str, Any]]:
        lines = (self.settings.folder / "audit.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def ratios(answer: dict[str, np.ndarray]) -> list[np.ndarray]:
    """What a linear model's update says of rows: weights over intercepts.

    Both are sums over rows with the same factors: of one row, the ratio is that row.
    """
    weights, intercepts = _parts(answer)
    return [
        weights[place] / intercepts[place]
        for place in range(len(intercepts))
        if abs(intercepts[place]) > 1e-9
    ]


def _parts(answer: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    (weights,) = [array for array in answer.values() if array.ndim == 2]
    (intercepts,) = [array for array in answer.values() if array.ndim == 1]
    return np.asarray(weights, float), np.asarray(intercepts, float)


def by_known_batches(attacker: Attacker, answers: list, size: int) -> list[np.ndarray]:
    """Rows from as many answers as there are rows: the seed says which row is where."""
    shard, root = attacker.executor.shard, attacker.executor.setup.root
    rows = attacker.executor.train_rows
    counts = np.zeros((len(answers), rows))
    for number in range(len(answers)):
        key = keys.derive(root, "client", number, shard.id)
        drawn = random_rows(replace(shard, salt=None), key, (4, size))
        np.add.at(counts[number], np.asarray(drawn).ravel(), 1)
    weights = np.stack([_parts(answer)[0][0] for answer in answers])
    intercepts = np.stack([_parts(answer)[1][:1] for answer in answers])
    solved = np.linalg.lstsq(counts, np.hstack([weights, intercepts]), rcond=None)[0]
    return [row[:-1] / row[-1] for row in solved if abs(row[-1]) > 1e-9]


def nearest(candidates: list[np.ndarray], seed: int = 0) -> float:
    """The smallest distance of a candidate from a row of the node with that seed."""
    rows, _ = make_rows(seed)
    if not candidates:
        return float("inf")
    gaps = np.stack(candidates)[:, None] - rows[None]
    return float(np.linalg.norm(gaps, axis=2).min())
