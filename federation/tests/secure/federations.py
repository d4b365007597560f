# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Federations of eight nodes with secure sums, and the same sums without masks."""

from collections.abc import Callable, Mapping
from functools import cache
from math import frexp
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
import problems
from fedblend import compress
from fedblend.core import Sender
from fedblend.simulation.communication import sizes_of
from fedblend.simulation.serialize import name_leaves
from fedblend_federation import message as messages
from fedblend_federation.client.executor import Executor
from fedblend_federation.client.node import Node
from fedblend_federation.policy.policy import Permissions
from fedblend_federation.server.aggregation import Total
from fedblend_federation.server.checkpoint import ServerCheckpoint
from fedblend_federation.server.collection import Collected, PlainCollector
from fedblend_federation.server.coordinator import Coordinator
from fedblend_federation.transport import Timeouts
from loopback import LoopbackFederation, LoopbackTransport

COUNTS = (5, 3, 4, 6, 5, 2, 7, 4)
CLIENTS = len(COUNTS)
WAITING = Timeouts(deadline=600.0, resend=300.0, pause=1.0, poll=1.0, absence=3.0)
"""By a clock of their own, see ``trials.clock``."""
WORK = fb.Work(0.2, steps=2, batch_size=2)


@cache
def problem() -> problems.Problem:
    return problems.classes(COUNTS)


@cache
def algorithm(name: str) -> Any:
    loss = problem().loss
    build: dict[str, Callable[[], Any]] = {
        "fedavg": lambda: fb.fedavg(loss, WORK),
        "apfl": lambda: fb.apfl(loss, WORK, alpha=0.5),
        "scaffold": lambda: fb.scaffold(loss, WORK),
        "flix": lambda: fb.flix(
            loss,
            lambda mixed: fb.fedavg(mixed, WORK),
            alpha=0.5,
            local=fb.solvers.lbfgs(loss, most=3),
        ),
        "quantized": lambda: fb.transforms.compressed(
            fb.fedavg(loss, WORK), compress.dithering(4)
        ),
        "flix, diana": lambda: fb.transforms.common_mask(
            build["flix"](), compress.rand_k(4), how=fb.transforms.diana
        ),
        "one mask": lambda: fb.locodl(
            loss,
            fb.Work(0.05, steps=2, batch_size=None),
            compressor=compress.rand_k(4),
            clients=CLIENTS,
            moved=0.01,
            masks="one",
        ),
    }
    return build[name]()


class DroppingTransport(LoopbackTransport):
    """Nodes are gone from certain exchanges: by the kind and round of the message."""

    def __init__(self, nodes: dict, gone: Mapping[tuple[str, int], set[int]]):
        super().__init__(nodes)
        self.gone, self.now = gone, set[int]()
        self.kinds: list[tuple[str, int]] = []
        """Of all messages, with their rounds."""

    def addresses(self) -> list[int]:
        return [at for at in super().addresses() if at - 1000 not in self.now]

    def send(self, outgoing: Mapping[int, bytes]) -> None:
        for address, data in outgoing.items():
            message = messages.decode(data)
            self.kinds.append((message.kind, message.round))
            self.now = self.gone.get((message.kind, message.round), set())
            if address - 1000 not in self.now:
                super().send({address: data})


class SecureFederation(LoopbackFederation):
    """Eight nodes; ``gone`` says who does not get which request."""

    def __init__(
        self,
        folder: Path,
        name: str = "fedavg",
        gone: Mapping[tuple[str, int], set[int]] | None = None,
        **more: Any,
    ):
        on = problem()
        given = {"rounds": 3, "cohort": CLIENTS, "every": 100, "timeouts": WAITING}
        super().__init__(
            algorithm(name),
            on.params,
            on.federated_data,
            jax.random.key(0),
            folder,
            **{**given, "secure": {}, **more},
        )
        self.transport = DroppingTransport(self.nodes, gone or {})

    def node(self, client: int) -> Node:
        """As ever; nodes of one method share what is compiled."""
        node = super().node(client)
        permissions = node.permissions()
        own = permissions._replace(
            executor=lambda terms: _executor(self.algorithm, client, permissions)
        )
        node.permissions = lambda: own
        return node

    def server(self) -> Coordinator:
        """As ever; so do servers."""
        server = super().server()
        first = _FIRST.setdefault((self.algorithm, self.rules.quorum < 1), server)
        for name in ("_tell", "_deploy"):
            setattr(server, name, getattr(first, name))
        for name in ("_add", "_step", "_inspect_join", "_inspect_update", "_total"):
            setattr(server.aggregator, name, getattr(first.aggregator, name))
        server.engine.programs.compiled = first.engine.programs.compiled
        exchange = server.exchanges.exchange

        def begun(requests, *arguments, **options):
            self.transport.now = set()
            return exchange(requests, *arguments, **options)

        server.exchanges.exchange = begun
        return server

    def run(self) -> Coordinator:
        """From the checkpoint to the end, as a process of its own would."""
        checkpoint = ServerCheckpoint(self.folder / "server")
        try:
            server, saved = self.server(), checkpoint.read()
            if saved is not None:
                saved.restore(server)
            while not server.done:
                server.step()
                checkpoint.save(server, {})
            return server
        finally:
            checkpoint.close()


_FIRST: dict[Any, Coordinator] = {}
_BUILT: dict[Any, Executor] = {}


def _executor(method: Any, client: int, permissions: Permissions) -> Executor:
    if (method, client) not in _BUILT:
        _BUILT[method, client] = permissions.executor({})
    return _BUILT[method, client]


class UnmaskedCollector(PlainCollector):
    """The server encodes what it sees as nodes would, and sums that: no masks.

    The encoding is written down here once more, in whole numbers of any size.
    """

    bits, clip = 64, 65536.0
    as_sent = False
    """Whether clients mask what they send, all of them the same entries."""

    def joins(self, enrolled):
        found = {c: one[0] for c, one in sorted(enrolled.accepted.items())}
        return self._total("joins", found)

    def updates(self, members, requests, others):
        server = self._server
        replies = server.exchanges.exchange(
            requests, self._accept, least=server.rules.least
        )
        ups = {c: one[0] for c, one in sorted(replies.accepted.items())}
        if not self.as_sent:
            ups = {c: self._decode(up) for c, up in ups.items()}
            return Collected(Total(self._total("updates", ups)), replies, {})
        total = self._sum(ups)
        whole = self._decode(total)
        weight = float(server.weights[list(ups)].sum())
        found = server.aggregator.total_of("updates", whole, weight, len(ups))
        return Collected(Total(found), replies, {})

    def _decode(self, up):
        sender = Sender(jnp.int32(0), jax.random.key(0), self._server.down)
        return self._server.algorithm.wire.decode(up, sender)

    def _sum(self, found: dict[int, Any]) -> Any:
        server = self._server
        scale = self.bits - 1 - frexp(len(server.active) * self.clip * (1 + 2**-16))[1]
        largest = float(server.weights.max())

        def add(*leaves):
            if not np.issubdtype(leaves[0].dtype, np.floating):
                return leaves[0]
            total = np.zeros(leaves[0].shape, object)
            for client, leaf in zip(found, leaves, strict=True):
                weight = float(server.weights[client]) / largest
                own = np.asarray(leaf, np.float64) * weight
                whole = np.rint(own.clip(-self.clip, self.clip) * 2.0**scale)
                total += np.vectorize(int, otypes=[object])(whole)
            value = np.asarray(total, np.float64) * 2.0**-scale * largest
            return np.asarray(value, np.asarray(leaves[0]).dtype)

        return jax.tree.map(add, *found.values())

    def _total(self, what: str, found: dict[int, Any]):
        server = self._server
        weight = float(server.weights[list(found)].sum())
        total = self._sum(found)
        return server.aggregator.total_of(what, total, weight, len(found))


def without_masks(federation: SecureFederation) -> Coordinator:
    """A server of a federation without secure sums that encodes as one with them."""
    assert federation.secure is None
    federation.secure = {}  # of the server alone, which gives clients coarse weights
    server = federation.server()
    federation.secure = None
    server.collector = UnmaskedCollector(server, sizes_of(server.shapes))
    sparse = algorithm("one mask"), algorithm("flix, diana")
    server.collector.as_sent = server.algorithm in sparse
    return server


def models(federation: SecureFederation, server: Coordinator) -> dict[str, np.ndarray]:
    """The server's message and state, and what every node deploys."""
    found = {
        f"server {name}": np.asarray(leaf)
        for name, leaf in name_leaves((server.down, server.server)).items()
    }
    for client, model in enumerate(federation.personal(server)):
        found |= {f"client {client} {name}": leaf for name, leaf in model.items()}
    return found


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    """Whether all numbers of two runs are the same, to the bit."""
    assert set(one) == set(other)
    return all(one[name].tobytes() == other[name].tobytes() for name in one)
