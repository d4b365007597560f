# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The server's transport over Flower's Grid: calls beside each other, none awaited.

Messages are pushed and replies fetched with the Grid's own client, but without what the
Grid does around it: it pulls the parts of all replies before it returns one, and fails
if a part that nobody needs is not stored.

Calls run in threads, a few at a time. The parts of a reply are pulled as soon as they
are there. A node that does not complete its reply is given up after a while: the server
gets to know that a reply is missing, and may ask for it again.

The server runs as a ServerApp, in a process that ends with the link's.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message
from flwr.serverapp import Grid, ServerApp

from fedblend_federation.flower import private
from fedblend_federation.flower.records import (
    KIND,
    TTL,
    content_of,
    make_record,
    read_record,
)
from fedblend_federation.transport import Reply

FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0
"""Seconds between two attempts to get a part of a reply; they grow."""
PATIENCE, SLOWEST = 20.0, 1e6
"""Seconds after which a reply that is not complete is given up, and how many bytes a
second of its request it has in addition: a reply is about as large."""
REFRESH = 2.0
"""Seconds after which the list of connected nodes is fetched again."""
MOMENT = 0.1
"""Seconds for which a call that has just begun may be awaited."""
CALLS = 8
"""Most calls of a kind at a time."""
PUSHED, CLAIMED = 4, 256
"""Most messages of one push, and of one question for replies."""
POLLS = 20.0
"""Questions for messages a second, of all nodes together: each takes the link about
10 ms of processor, and so do the calls that carry messages."""


def push(link: private.Server, messages: Sequence[Message]) -> list[str]:
    """Push messages; returns their ids.

    ``Grid.push_messages`` fails if the link does not store a part. A node of ours needs
    one part of a message, confirms the message, and the link forgets the parts that are
    still on the way. That is no failure: a message that gets lost is sent again.
    """
    parts = [private.take_apart(message) for message in messages]
    contents = {id: part for one in parts for id, part in one.contents.items()}
    pushed = link.push(parts)
    needed = {id for one in parts for id in private.list_needed_parts(one.tree)}
    asked = dict.fromkeys(pushed.parts)
    for id in sorted(asked, key=lambda id: id not in needed):  # nodes may begin
        link.stored.push(id, contents[id], pushed.session)
    return list(pushed.messages)


def fetch(
    link: private.Server, id: str, tree: private.Tree, patience: float
) -> bytes | str:
    """A reply, as soon as all of its parts are there, or the error in its place."""
    until, pause, parts = time.monotonic() + patience, FIRST_PAUSE, {}
    needed = private.list_needed_parts(tree)
    while missing := [one for one in needed if one not in parts]:
        known, content = link.stored.pull(missing[0])
        if content is not None:
            parts[missing[0]] = content
        elif not known:
            return "a part of the reply is not there any more"
        elif time.monotonic() > until:
            return f"the reply is not complete after {patience:.0f} s"
        else:
            time.sleep(pause)
            pause = min(1.5 * pause, LAST_PAUSE)
    link.stored.confirm(id)
    try:
        found = content_of(parts, tree)
    except Exception as error:  # a node may send anything
        return f"no message of Flower: {type(error).__name__}"
    if isinstance(found, Error):
        return str(found.reason)[:200] or "error"
    return read_record(found)


class GridTransport:
    """A ``Transport`` over Flower's Grid."""

    def __init__(self, grid: Grid):
        self._grid, self._link = grid, private.Server(grid)
        self._changed = threading.Condition()
        """Guards all that follows; calls that end announce it here."""
        numbers = {"list": 1, "push": CALLS, "claim": 1, "fetch": CALLS}
        self._calls = {kind: ThreadPoolExecutor(n) for kind, n in numbers.items()}
        self._failure: BaseException | None = None
        self._replies: list[Reply] = []
        self._open: dict[str, tuple[int, float]] = {}
        """Address and patience of every message whose reply has not been claimed."""
        self._claiming = self._listing = False
        self._nodes: list[int] = []
        self._listed = -REFRESH

    def addresses(self) -> list[int]:
        """The nodes that are connected."""
        with self._changed:
            if not self._listing and time.monotonic() - self._listed >= REFRESH:
                self._listing = True
                self._start("list", self._grid.get_node_ids, end=self._list)
                self._changed.wait_for(lambda: not self._listing, MOMENT)
            self._check()
            return self._nodes

    def send(self, outgoing: Mapping[int, bytes]) -> None:
        """Push a message to each node."""
        with self._changed:
            pause, known = len(self._nodes) / POLLS, list(outgoing.items())
            for first in range(0, len(known), PUSHED):
                some = known[first : first + PUSHED]
                messages = [
                    Message(make_record(data, pause), address, KIND, ttl=TTL)
                    for address, data in some
                ]
                end = partial(self._end_push, some)
                self._start("push", push, self._link, messages, end=end)

    def receive(self) -> list[Reply]:
        """Take the replies that are there."""
        with self._changed:
            if self._open and not self._claiming:
                self._claiming = True
                self._start("claim", self._claim, list(self._open), end=self._fetch)
                self._changed.wait_for(lambda: self._failure or self._replies, MOMENT)
            self._check()
            found, self._replies = self._replies, []
            return found

    def _check(self) -> None:
        """Raise what a call has raised."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _start(
        self, kind: str, call: Callable[..., Any], *given: Any, end: Callable[..., None]
    ) -> None:
        """Call something in a thread; ``end`` gets the result, under the lock."""

        def announce(done: Future) -> None:
            with self._changed:
                try:
                    end(done.result())
                except BaseException as error:
                    self._failure = error
                self._changed.notify_all()

        self._calls[kind].submit(call, *given).add_done_callback(announce)

    def _list(self, nodes: Any) -> None:
        self._listing, self._listed = False, time.monotonic()
        self._nodes = sorted(nodes)

    def _end_push(self, messages: list[tuple[int, bytes]], ids: list[str]) -> None:
        for (address, data), id in zip(messages, ids, strict=True):
            if id:
                self._open[id] = address, PATIENCE + len(data) / SLOWEST
            else:
                self._replies.append(Reply(address, None, "the link did not take it"))

    def _claim(self, ids: list[str]) -> list[tuple[str, str, private.Tree]]:
        """The replies that are there; the link hands each of them out once."""
        groups = (ids[at : at + CLAIMED] for at in range(0, len(ids), CLAIMED))
        return [reply for some in groups for reply in self._link.pull(some)]

    def _fetch(self, replies: list[tuple[str, str, private.Tree]]) -> None:
        self._claiming = False
        for request, id, tree in replies:
            # The link itself sends errors: only the request tells which node failed.
            address, patience = self._open.pop(request)
            end = partial(self._take, address)
            self._start("fetch", fetch, self._link, id, tree, patience, end=end)

    def _take(self, address: int, found: bytes | str) -> None:
        lost = isinstance(found, str)
        reply = Reply(address, None, found) if lost else Reply(address, found)
        self._replies.append(reply)


PARENT_INTERVAL = 0.5
"""Seconds between two looks whether the process that started this one is there."""


def end_with_parent() -> None:
    """End this process as soon as the one that started it has ended.

    Without its link a server cannot go on, and would hold its folder for as long as
    Flower tries to reach the link. Its checkpoint is whole at any moment.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_INTERVAL)
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
