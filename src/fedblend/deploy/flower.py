# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Flower's two apps: a server that leads over the Grid, clients that pass messages on.

All that touches Flower is here. A message is one byte array of a message; rounds,
deadlines and resending are our own (``post``). The client's half imports no JAX.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedblend.deploy import worker

RECORD, ARRAY, KIND = "fedblend", "message", "query"
LIVES = 3600.0
"""Seconds that Flower keeps a message; we send again long before."""
AGE = 2.0
"""Seconds after which the list of nodes is asked for again."""


def packed(message: bytes) -> RecordDict:
    """A message as Flower carries it."""
    array = Array(dtype="uint8", shape=(len(message),), stype="fedblend", data=message)
    return RecordDict({RECORD: ArrayRecord({ARRAY: array})})


def opened(content: RecordDict) -> bytes:
    """The message in a message; empty if there is none."""
    try:
        return bytes(content.array_records[RECORD][ARRAY].data)
    except (KeyError, AttributeError):
        return b""


class GridPost:
    """Messages over Flower's Grid, pushed and pulled."""

    def __init__(self, grid: Grid):
        self._grid = grid
        self._open: dict[str, int] = {}
        self._nodes: tuple[float, list[int]] = (-AGE, [])

    def addresses(self) -> list[int]:
        """The nodes that are connected."""
        asked, nodes = self._nodes
        if time.monotonic() - asked >= AGE:
            nodes = sorted(self._grid.get_node_ids())
            self._nodes = (time.monotonic(), nodes)
        return nodes

    def send(self, mail: Mapping[int, bytes]) -> None:
        """Push a message to each."""
        messages = [
            Message(packed(message), address, KIND, ttl=LIVES)
            for address, message in mail.items()
        ]
        ids: Iterable[Any] = self._grid.push_messages(messages)
        for id, address in zip(ids, mail, strict=True):
            if id:
                self._open[id] = address

    def receive(self) -> list[Any]:
        """Pull what has been answered."""
        from fedblend.deploy.transport import Reply

        found = []
        for payload in self._grid.pull_messages(list(self._open)):
            # An error comes from the link, so that only the question tells whose it is.
            address = self._open.pop(payload.metadata.reply_to_message_id, None)
            if address is None:
                continue
            if payload.has_error():
                found.append(Reply(address, None, str(payload.error.reason)[:200]))
            else:
                found.append(Reply(address, opened(payload.content)))
        return found


def client_app(in_process: Callable[[Path], Callable[[bytes], bytes]]) -> ClientApp:
    """The app of a node: messages go to the warm process, or are answered right here.

    Args:
        in_process: from the path of node.toml to a function that answers messages.
    """
    app = ClientApp()

    @app.query()
    def pass_on(payload: Message, context: Context) -> Message:
        message, config = opened(payload.content), context.node_config
        try:
            answer = worker.ask(Path(str(config["socket"])), message)
        except worker.SocketError:
            settings = config.get("settings")
            if not settings:
                raise
            answer = in_process(Path(str(settings)))(message)
        return Message(packed(answer), reply_to=payload)

    return app


def server_app(lead: Callable[[Path, GridPost, bool], None]) -> ServerApp:
    """The app of a server; the folder of the experiment is in the run's configuration.

    Args:
        lead: runs the experiment in a folder to its end; told whether noise comes
            from the shared seed, as tests need it.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config = context.run_config
        shared_seed = bool(config.get("shared-seed", False))
        lead(Path(str(config["folder"])), GridPost(grid), shared_seed)

    return app
