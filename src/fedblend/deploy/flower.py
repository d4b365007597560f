# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Flower's two apps: a ServerApp that runs the coordinator, a ClientApp per node.

This module and ``fleet`` are all that imports Flower. Each of our messages is one piece
of bytes in a Flower message; rounds, deadlines and resending are our own
(``transport``). The ClientApp is for nodes with Flower's SuperNode in place of our
carrier; it imports no JAX.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
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
MOMENT = 0.1
"""Seconds for which a call that has just begun may be awaited."""
CALLS = 8
"""Most pushes, and most pulls, at a time."""
MOST_PULLS = 32
"""Most pulls at a time with those that were abandoned."""
PUSHED, PULLED = 4, 16
"""Messages of one push, and least of one pull where there are more."""
BUSY = 0.5
"""Seconds after which a pull has found replies, and is getting their parts."""
PATIENCE, SLOWEST = 20.0, 1e6
"""Seconds after which a pull is abandoned, and how many bytes a second of what was sent
it has in addition: a reply is about as large as its request."""
UNAVAILABLE = 3
"""Flower's code of the error about a message that the link does not have any more."""


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


class _Call:
    """A call of the Grid in a thread of its own; what it returns goes to a queue."""

    def __init__(self, ids: Collection[str], patience: float):
        self.ids, self.begun = frozenset(ids), time.monotonic()
        self.patience, self.abandoned = patience, False

    @property
    def age(self) -> float:
        return time.monotonic() - self.begun


class GridTransport:
    """A ``Transport`` over Flower's Grid, by its push, pull and list calls.

    Each of these is several calls of HTTP, one after the other, and waits for a link
    that is away, or for the rest of a reply whose sender has died. Here they run in
    threads, a few at a time, and nobody waits for them. The link hands a reply out
    once: while a call is busy with it, another call is told that the message is not
    there any more.
    """

    def __init__(self, grid: Grid):
        self._grid = grid
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._replies: list[tuple[int, bytes | None, str]] = []
        self._open: dict[str, tuple[int, int]] = {}
        """Address and bytes of every message without a reply."""
        self._late: dict[str, int] = {}
        """Addresses of messages whose replies nobody waits for any more."""
        self._held: set[str] = set()
        """Messages with whose replies one of the pulls is busy."""
        self._pulls: list[_Call] = []
        self._waiting: list[list[Message]] = []
        """Messages that are still to be pushed."""
        self._pushing = 0
        self._nodes: list[int] = []
        self._listed, self._listing = -REFRESH, False

    def addresses(self) -> list[int]:
        """The nodes that are connected."""
        if not self._listing and time.monotonic() - self._listed >= REFRESH:
            self._listing = True
            self._start(lambda: sorted(self._grid.get_node_ids()), self._list)
            self._settle()
        return self._nodes

    def send(self, outgoing: Mapping[int, bytes]) -> None:
        """Push a message to each node."""
        pushed = [
            Message(to_record(data), address, KIND, ttl=TTL)
            for address, data in outgoing.items()
        ]
        for first in range(0, len(pushed), PUSHED):
            self._waiting.append(pushed[first : first + PUSHED])
        self._push()

    def receive(self) -> list[Any]:
        """Pull the replies that are there."""
        # Here and not above: a ClientApp must start without JAX.
        from fedblend.deploy.transport import Reply

        self._settle(wait=False)
        self._abandon()
        if self._pull():
            self._settle()
        found, self._replies = self._replies, []
        return [Reply(*one) for one in found]

    def _start(self, call: Callable[[], Any], end: Callable[[Any], None]) -> None:
        """Call something in a thread; ``end`` gets the result in the caller's own."""

        def run() -> None:
            try:
                found = call()
            except BaseException as error:
                failure = error
                self._done.put(lambda: end(failure))
            else:
                self._done.put(lambda: end(found))

        threading.Thread(target=run, daemon=True).start()

    def _settle(self, wait: bool = True) -> None:
        """Take the results that are there; the first may be awaited for a moment."""
        with contextlib.suppress(queue.Empty):
            self._done.get(timeout=MOMENT if wait else 0)()
            while True:
                self._done.get_nowait()()

    def _list(self, nodes: Any) -> None:
        self._listing, self._listed = False, time.monotonic()
        self._nodes = _result(nodes)

    def _push(self) -> None:
        while self._waiting and self._pushing < CALLS:
            some = self._waiting.pop(0)
            self._pushing += 1
            push = partial(self._grid.push_messages, some)
            self._start(lambda push=push: list(push()), partial(self._pushed, some))

    def _pushed(self, messages: list[Message], ids: Any) -> None:
        self._pushing -= 1
        self._push()
        for message, id in zip(messages, _result(ids), strict=True):
            address = message.metadata.dst_node_id
            size = len(from_record(message.content))
            if id:
                self._open[id] = (address, size)
            else:
                self._replies.append((address, None, "the link did not take it"))

    def _pull(self) -> bool:
        """Ask for replies, unless calls are asking for them; whether it did."""
        free = [id for id in self._open if id not in self._held]
        asking = any(call.age < BUSY for call in self._pulls)
        busy = sum(not call.abandoned for call in self._pulls)
        room = min(CALLS - busy, MOST_PULLS - len(self._pulls))
        if asking or room < 1 or not free:
            return False
        size = max(PULLED, -(-len(free) // room))
        for first in range(0, len(free), size):
            ids = free[first : first + size]
            patience = PATIENCE + sum(self._open[id][1] for id in ids) / SLOWEST
            call = _Call(ids, patience)
            self._pulls.append(call)
            pull = partial(self._grid.pull_messages, ids)
            self._start(lambda pull=pull: list(pull()), partial(self._pulled, call))
        return True

    def _pulled(self, call: _Call, found: Any) -> None:
        self._pulls.remove(call)
        if call.abandoned and isinstance(found, BaseException):
            return
        for pulled in _result(found):
            id, error = pulled.metadata.reply_to_message_id, ""
            if pulled.has_error():
                error = str(pulled.error.reason)[:200] or "error"
                gone = pulled.error.code == UNAVAILABLE
                if id in self._open and gone and self._is_asked_for(id):
                    self._held.add(id)
                    continue
            # The link itself sends errors: only the request tells which node failed.
            address = self._close(id)
            if address is None:
                address = self._late.pop(id, None)
            if address is not None:
                data = None if error else from_record(pulled.content)
                self._replies.append((address, data, error))
        self._report(call, "the link has lost the reply")
        for id in call.ids:
            if not any(id in one.ids for one in self._pulls):
                self._late.pop(id, None)

    def _abandon(self) -> None:
        """Do not count on pulls that take too long; what they bring late is taken."""
        for call in self._pulls:
            call.abandoned = call.age > call.patience
            if call.abandoned:
                self._report(call, f"the reply is not complete after {call.age:.0f} s")

    def _report(self, call: _Call, why: str) -> None:
        """Report the replies that a call may have been busy with, and nobody brings."""
        for id in self._held & call.ids:
            if not self._is_asked_for(id):
                address = self._close(id)
                if address is not None:
                    self._late[id] = address
                    self._replies.append((address, None, why))

    def _is_asked_for(self, id: str) -> bool:
        """Whether a pull that is not abandoned may be busy with a reply."""
        return any(id in one.ids and not one.abandoned for one in self._pulls)

    def _close(self, id: str) -> int | None:
        """The address of a message that waits for its reply, which it has now."""
        self._held.discard(id)
        address, _ = self._open.pop(id, (None, 0))
        return address


def _result(found: Any) -> Any:
    if isinstance(found, BaseException):
        raise found
    return found


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
