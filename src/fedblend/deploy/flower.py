# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Flower's two apps: a ServerApp that runs the coordinator, a ClientApp per node.

This module and ``fleet`` are all that imports Flower. Each of our messages is one piece
of bytes in a Flower message; rounds, deadlines and resending are our own
(``transport``). The ClientApp is for nodes with Flower's SuperNode in place of our
carrier; it imports no JAX.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedblend.deploy import worker

RECORD, ARRAY, KIND = "fedblend", "message", "query"
SMALL = 1 << 20
"""Bytes of a message that travels in one piece: Flower makes a call for every piece,
and an array has two more."""
TTL = 3600.0
"""Seconds that Flower keeps a message; ours are sent again long before."""
REFRESH = 2.0
"""Seconds after which the list of connected nodes is fetched again."""


def to_record(message: bytes) -> RecordDict:
    """A message as the content of a Flower message."""
    if len(message) <= SMALL:
        return RecordDict({RECORD: ConfigRecord({ARRAY: message})})
    array = Array(dtype="uint8", shape=(len(message),), stype="fedblend", data=message)
    return RecordDict({RECORD: ArrayRecord({ARRAY: array})})


def from_record(content: RecordDict) -> bytes:
    """The message in a Flower message; empty if there is none."""
    if RECORD in content.config_records:
        small = content.config_records[RECORD].get(ARRAY)
        return small if isinstance(small, bytes) else b""
    try:
        return bytes(content.array_records[RECORD][ARRAY].data)
    except (KeyError, AttributeError):
        return b""


class GridTransport:
    """A ``Transport`` over Flower's Grid, by its push and pull calls."""

    def __init__(self, grid: Grid):
        self._grid = grid
        self._open: dict[str, int] = {}
        self._nodes: tuple[float, list[int]] = (-REFRESH, [])

    def addresses(self) -> list[int]:
        """The nodes that are connected."""
        fetched, nodes = self._nodes
        if time.monotonic() - fetched >= REFRESH:
            nodes = sorted(self._grid.get_node_ids())
            self._nodes = (time.monotonic(), nodes)
        return nodes

    def send(self, outgoing: Mapping[int, bytes]) -> None:
        """Push a message to each node."""
        pushed = [
            Message(to_record(data), address, KIND, ttl=TTL)
            for address, data in outgoing.items()
        ]
        ids: Iterable[Any] = self._grid.push_messages(pushed)
        for id, address in zip(ids, outgoing, strict=True):
            if id:
                self._open[id] = address

    def receive(self) -> list[Any]:
        """Pull the replies that are there."""
        # Here and not above: a ClientApp must start without JAX.
        from fedblend.deploy.transport import Reply

        replies = []
        for pulled in self._grid.pull_messages(list(self._open)):
            # The link itself sends errors: only the request tells which node failed.
            address = self._open.pop(pulled.metadata.reply_to_message_id, None)
            if address is None:
                continue
            if pulled.has_error():
                replies.append(Reply(address, None, str(pulled.error.reason)[:200]))
            else:
                replies.append(Reply(address, from_record(pulled.content)))
        return replies


def client_app(in_process: Callable[[Path], Callable[[bytes], bytes]]) -> ClientApp:
    """The app of a node: hands messages to the worker, or answers them in process.

    Args:
        in_process: from the path of node.toml to a function that answers messages; used
            where no worker is there and the node's configuration names node.toml.
    """
    app = ClientApp()

    @app.query()
    def forward(request: Message, context: Context) -> Message:
        message, config = from_record(request.content), context.node_config
        try:
            reply = worker.request(Path(str(config["socket"])), message)
        except worker.SocketError:
            settings = config.get("settings")
            if not settings:
                raise
            reply = in_process(Path(str(settings)))(message)
        return Message(to_record(reply), reply_to=request)

    return app


def end_with_parent() -> None:
    """End this process as soon as the one that started it has ended.

    Without its link a server cannot go on, and would hold its folder for as long as
    Flower tries to reach the link. Its checkpoint is whole at any moment.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(REFRESH / 4)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def server_app(run: Callable[[Path, GridTransport], None]) -> ServerApp:
    """The app of a server; the run's configuration names the experiment's folder.

    Args:
        run: runs the experiment of a folder to its end.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        end_with_parent()
        run(Path(str(context.run_config["folder"])), GridTransport(grid))

    return app
