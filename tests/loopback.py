# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A federation in one process: real nodes and a real server over a post of lists."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedblend.core import Algorithm
from fedblend.data.federated import FederatedData, Shards
from fedblend.deploy.client.executor import Executor, Own
from fedblend.deploy.client.node import Node
from fedblend.deploy.client.node import Rules as NodeRules
from fedblend.deploy.messages import UNKNOWN, Message
from fedblend.deploy.server.coordinator import Coordinator
from fedblend.deploy.server.membership import Membership
from fedblend.deploy.server.settings import RoundRules
from fedblend.deploy.server.setup import rowless, setting
from fedblend.deploy.transport import Patience, Reply
from fedblend.metrics import as_metrics

EXPERIMENT = "trial"
QUICK = Patience(deadline=1.0, resend=0.2, pause=0.0, poll=0.0)


class Box:
    """A post: nodes answer at once, ``spoil`` may change what arrives."""

    def __init__(self, nodes: dict[int, Node]):
        self.nodes, self.waiting = nodes, []
        self.spoil: Callable[[int, bytes], list[Any]] = lambda at, data: [data]
        self.sent = self.received = 0

    def addresses(self) -> list[int]:
        return sorted(self.nodes)

    def send(self, mail: Mapping[int, bytes]) -> None:
        for address, data in mail.items():
            self.sent += len(data)
            node = self.nodes.get(address)
            if node is not None:
                for answer in self.spoil(address, node.answer(data)):
                    self.waiting.append((address, answer))

    def receive(self) -> list[Reply]:
        found, self.waiting = self.waiting, []
        self.received += sum(len(data) for _, data in found if data is not None)
        return [
            Reply(address, data, "" if data is not None else "lost")
            for address, data in found
        ]


def own_split(split: Shards, client: int) -> Shards:
    """The rows of one client, as a node has them."""
    rows = split.rows(client)
    return Shards(rows, np.zeros(1, np.int64), split.counts[client : client + 1])


class Wired:
    """An algorithm on a federation whose clients are nodes with their own folders."""

    def __init__(
        self,
        algorithm: Algorithm,
        params: Any,
        federation: FederatedData,
        key: jax.Array,
        folder: Path,
        *,
        measures: Any = None,
        central: Any = None,
        alone: Any = None,
        **rules: Any,
    ):
        self.algorithm, self.params, self.key = algorithm, params, key
        self.federation, self.folder, self.central = federation, folder, central
        self.rules = RoundRules(**{"patience": QUICK, **rules})
        self.measures, self.alone = measures or {}, alone
        self.notes: list[tuple[str, dict]] = []
        self.nodes = {1000 + c: self.node(c) for c in range(federation.clients)}
        self.box = Box(self.nodes)

    def node(self, client: int) -> Node:
        """A node, with whatever its folder holds."""
        central = self.central
        own = Own(
            client=client,
            algorithm=self.algorithm,
            params=jax.eval_shape(lambda tree: tree, self.params),
            root=self.key,
            splits={n: own_split(s, client) for n, s in self.federation.splits.items()},
            capacities={n: s.capacity for n, s in self.federation.splits.items()},
            measures=as_metrics(self.measures),
            central=central,
            alone=self.alone,
        )
        part = cache(lambda: Executor(own))
        rules = NodeRules(
            join=lambda terms: part(),
            meet=lambda words: {"counts": {"train": int(own.splits["train"].total)}},
            reveal=lambda seen, counts: seen,
            note=self.note,
            longest=lambda: None,
        )
        return Node(self.folder / f"node{client}", client, rules)

    def server(self) -> Coordinator:
        """A server that has not begun."""
        counts = {name: s.counts for name, s in self.federation.splits.items()}
        row = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype),
            jax.eval_shape(lambda tree: tree, self.federation.train.examples),
        )
        invitation = Message("meet", EXPERIMENT, UNKNOWN)
        directory = Membership(
            self.box, invitation, lambda client, words: None, self.note
        )
        chosen = setting(
            self.algorithm,
            self.params,
            rowless(counts, ()),
            self.key,
            self.rules,
            row=row,
            experiment=EXPERIMENT,
            terms={},
            note=self.note,
            metrics=as_metrics(self.measures),
            central=self.central,
        )
        return Coordinator(chosen, directory, self.rules)

    def note(self, event: str, **fields: Any) -> str:
        self.notes.append((event, fields))
        return str(len(self.notes))

    def complete(self, server: Coordinator) -> Coordinator:
        while not server.done:
            server.step()
        return server

    def personal(self, server: Coordinator) -> list[Any]:
        """The model that every node has, as it is on its disk."""
        from fedblend.simulation.serialize import unpack

        found = []
        for client in range(self.federation.clients):
            place = self.folder / f"node{client}" / EXPERIMENT / "personal.safetensors"
            found.append(unpack(place.read_bytes())[0])
        return found
