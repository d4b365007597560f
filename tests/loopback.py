# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A federation in one process: real nodes and server over a transport of lists."""

import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedblend.core import Algorithm
from fedblend.data.federated import FederatedData, Shards
from fedblend.metrics import make_metrics
from fedblend.simulation.serialize import unpack
from fedblend_federation.client.executor import ClientSetup, Executor
from fedblend_federation.client.node import Node
from fedblend_federation.message import UNKNOWN, Message
from fedblend_federation.policy.policy import Permissions
from fedblend_federation.secure.client import Means
from fedblend_federation.secure.session import public_key
from fedblend_federation.server.coordinator import Coordinator
from fedblend_federation.server.membership import Membership
from fedblend_federation.server.settings import RoundRules, SecureSums, ServerSetup
from fedblend_federation.transport import Reply, Timeouts

EXPERIMENT = "trial"
QUICK = Timeouts(deadline=1.0, resend=0.2, pause=0.0, poll=0.0)


def own_key(client: int) -> X25519PrivateKey:
    """A key for secure sums, the same in every process of a test."""
    return X25519PrivateKey.from_private_bytes(bytes([client + 1]) * 32)


class LoopbackTransport:
    """Nodes reply at once; ``spoil`` may change what arrives."""

    def __init__(self, nodes: dict[int, Any]):
        self.nodes, self.waiting = nodes, []
        self.spoil: Callable[[int, bytes], list[Any]] = lambda address, data: [data]
        self.sent = self.received = 0

    def addresses(self) -> list[int]:
        return sorted(self.nodes)

    def send(self, outgoing: Mapping[int, bytes]) -> None:
        for address, data in outgoing.items():
            self.sent += len(data)
            node = self.nodes.get(address)
            if node is not None:
                for reply in self.spoil(address, node.reply(data)):
                    self.waiting.append((address, reply))

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


def finite(measured: Any, counts: dict[str, int]) -> Any:
    """All measures that JSON can hold."""
    del counts
    return {
        split: {
            model: {k: v for k, v in values.items() if math.isfinite(v)}
            for model, values in models.items()
        }
        for split, models in measured.items()
    }


class LoopbackFederation:
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
        secure: dict[str, Any] | None = None,
        **rules: Any,
    ):
        self.algorithm, self.params, self.key = algorithm, params, key
        self.federation, self.folder, self.central = federation, folder, central
        self.rules = RoundRules(**{"timeouts": QUICK, **rules})
        self.measures, self.alone = measures or {}, alone
        self.secure = secure
        self.private = [own_key(c) for c in range(federation.clients)]
        self.notes: list[tuple[str, dict]] = []
        self.nodes = {1000 + c: self.node(c) for c in range(federation.clients)}
        self.transport = LoopbackTransport(self.nodes)

    def node(self, client: int) -> Node:
        """A node, with whatever its folder holds."""
        splits = self.federation.splits.items()
        setup = ClientSetup(
            client=client,
            algorithm=self.algorithm,
            params=jax.eval_shape(lambda tree: tree, self.params),
            root=self.key,
            splits={name: own_split(split, client) for name, split in splits},
            capacities={name: split.capacity for name, split in splits},
            measures=make_metrics(self.measures),
            central=self.central,
            alone=self.alone,
        )
        rows = int(setup.splits["train"].total)
        executor = cache(lambda: Executor(setup))
        permissions = Permissions(
            describe=lambda fields: {"counts": {"train": rows}},
            executor=lambda terms: executor(),
            disclose=finite,
            secure=lambda terms: None if self.secure is None else self.means(client),
        )
        folder = self.folder / f"node{client}"
        return Node(folder, client, lambda: permissions, self.note)

    def means(self, client: int) -> Means:
        """What a node needs for secure sums; all nodes have the keys of all."""
        settings = {"bits": 64, "clip": 65536.0, "least": 3, **(self.secure or {})}
        roster = {c: public_key(key) for c, key in enumerate(self.private)}
        private = self.private[client]
        return Means(weights=None, private=private, roster=roster, **settings)

    def server(self) -> Coordinator:
        """A server that has not begun."""
        row = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype),
            jax.eval_shape(lambda tree: tree, self.federation.train.examples),
        )
        invitation = Message("describe", EXPERIMENT, UNKNOWN)
        membership = Membership(
            self.transport, invitation, lambda client, description: None, self.note
        )
        setup = ServerSetup(
            experiment=EXPERIMENT,
            algorithm=self.algorithm,
            params=self.params,
            counts={n: split.counts for n, split in self.federation.splits.items()},
            row=row,
            key=self.key,
            metrics=make_metrics(self.measures),
            note=self.note,
            central=self.central,
            secure=self._sums(),
        )
        return Coordinator(setup, membership, self.rules)

    def _sums(self) -> SecureSums | None:
        if self.secure is None:
            return None
        known = {
            name: self.secure[name] for name in ("bits", "clip") & self.secure.keys()
        }
        return SecureSums(self.folder / "server", **known)

    def note(self, event: str, **fields: Any) -> str:
        self.notes.append((event, fields))
        return f"{len(self.notes):064x}"

    def complete(self, server: Coordinator) -> Coordinator:
        while not server.done:
            server.step()
        return server

    def personal(self, server: Coordinator) -> list[Any]:
        """The model that every node has, as it is on its disk."""
        del server
        found = []
        for client in range(self.federation.clients):
            place = self.folder / f"node{client}" / EXPERIMENT / "personal.safetensors"
            found.append(unpack(place.read_bytes())[0])
        return found
