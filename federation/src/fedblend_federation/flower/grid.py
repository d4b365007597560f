# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The server's transport over Flower's Grid: calls beside each other, none awaited.

Messages are pushed and replies fetched with the Grid's own client, but without what the
Grid does around it: it pulls the parts of all replies before it returns one, and fails
if a part that nobody needs is not stored.

A call of the Grid is several calls of HTTP, one after the other, and waits: for a link
that is away, or for the parts of a reply that a node is still pushing, first a second,
then two, four, eight. Here calls run in threads, a few at a time, and the parts are
pulled as soon as they are there. A call that hangs is abandoned: the server gets to
know that a reply is missing, and what such a call brings late is handed on.

The server runs as a ServerApp, in a process that ends with the link's.
"""

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Context, Error, Message, RecordDict
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
UNAVAILABLE = 3
"""Flower's code of the error about a message that the link does not have any more."""


class Fetched(NamedTuple):
    """The bytes of a reply, or the error that came in their place."""

    data: bytes | None
    error: str = ""
    gone: bool = False
    """The link does not have the message any more."""


Claimed = tuple[str, Callable[[], Fetched]]
"""The id of a message, and what gets the reply to it."""


def push(grid: Grid, messages: Sequence[Message]) -> list[str]:
    """Push messages; returns their ids.

    ``Grid.push_messages`` fails if the link does not store a part. A node of ours needs
    one part of a message, confirms the message, and the link forgets the parts that are
    still on the way. That is no failure: a message that gets lost is sent again.
    """
    server = private.server_of(grid)
    if server is None:
        return list(grid.push_messages(messages))
    parts = [private.take_apart(message) for message in messages]
    contents = {id: part for one in parts for id, part in one.contents.items()}
    pushed = server.push(parts)
    needed = {id for one in parts for id in private.list_needed_parts(one.tree)}
    asked = dict.fromkeys(pushed.parts)
    for id in sorted(asked, key=lambda id: id not in needed):  # nodes may begin
        server.stored.push(id, contents[id], pushed.session)
    return list(pushed.messages)


def claim(grid: Grid, ids: Sequence[str]) -> list[Claimed]:
    """The replies to messages that are there; the link hands each of them out once.

    ``Grid.pull_messages`` gets the parts of all of them before it returns. This is the
    same with Flower's own client, one reply at a time; a Grid without such a client is
    asked in the other way.
    """
    server = private.server_of(grid)
    if server is None:
        return [
            (one.metadata.reply_to_message_id, partial(_open_reply, one))
            for one in grid.pull_messages(ids)
        ]
    return [
        (request, partial(_fetch, server.stored, reply, tree))
        for request, reply, tree in server.pull(ids)
    ]


def _open_reply(reply: Message) -> Fetched:
    return _read_content(reply.error if reply.has_error() else reply.content)


def _read_content(content: RecordDict | Error) -> Fetched:
    if isinstance(content, Error):
        error = str(content.reason)[:200] or "error"
        return Fetched(None, error, content.code == UNAVAILABLE)
    return Fetched(read_record(content))


def _fetch(stored: private.Stored, id: str, tree: private.Tree) -> Fetched:
    """A reply, as soon as all of its parts are there."""
    parts = {one: _part(stored, one) for one in private.list_needed_parts(tree)}
    stored.confirm(id)
    return _read_content(content_of(parts, tree))


def _part(stored: private.Stored, id: str) -> bytes:
    pause = FIRST_PAUSE
    while True:
        known, content = stored.pull(id)
        if content is not None:
            return content
        if not known:
            raise LookupError("a part of the reply is not there any more")
        time.sleep(pause)
        pause = min(1.5 * pause, LAST_PAUSE)


REFRESH = 2.0
"""Seconds after which the list of connected nodes is fetched again."""
MOMENT = 0.1
"""Seconds for which a call that has just begun may be awaited."""
CALLS = 8
"""Most calls of a kind at a time."""
MOST_PULLS = 32
"""Most pulls at a time with those that were abandoned."""
PUSHED, PULLED = 4, 64
"""Messages of one push, and least of one pull where there are more."""
BUSY = 0.5
"""Seconds after which another pull does not wait for one that has not ended."""
PATIENCE, SLOWEST = 20.0, 1e6
"""Seconds after which a pull is abandoned, and how many bytes a second of what was sent
it has in addition: a reply is about as large as its request."""
POLLS = 20.0
"""Questions for messages a second, of all nodes together: each takes the link about
10 ms of processor, and so do the calls that carry messages."""


class _Pull:
    """A call in a thread of its own: it claims replies, or fetches a claimed one."""

    def __init__(self, ids: Collection[str], patience: float, claims: bool):
        self.ids, self.patience, self.claims = frozenset(ids), patience, claims
        self.begun: float | None = None
        self.abandoned = False

    @property
    def age(self) -> float:
        """Seconds since it began."""
        return 0.0 if self.begun is None else time.monotonic() - self.begun


class GridTransport:
    """A ``Transport`` over Flower's Grid.

    While a call is busy with a reply, another call that asks for it is told that the
    message is not there any more.
    """

    def __init__(self, grid: Grid):
        self._grid = grid
        self._changed = threading.Condition()
        """Guards all that follows; calls that end announce it here."""
        self._failure: BaseException | None = None
        self._replies: list[Reply] = []
        self._open: dict[str, tuple[int, int]] = {}
        """Address and bytes of every message without a reply."""
        self._late: dict[str, int] = {}
        """Addresses of messages whose replies nobody waits for any more."""
        self._held: set[str] = set()
        """Messages with whose replies one of the pulls is busy."""
        self._pulls: list[_Pull] = []
        self._to_fetch: list[Callable[[], None]] = []
        self._to_push: list[list[Message]] = []
        self._fetching = self._pushing = 0
        self._nodes: list[int] = []
        self._listed, self._listing = -REFRESH, False

    def addresses(self) -> list[int]:
        """The nodes that are connected."""
        with self._changed:
            if not self._listing and time.monotonic() - self._listed >= REFRESH:
                self._listing = True
                self._start(lambda: sorted(self._grid.get_node_ids()), self._list)
                self._changed.wait_for(lambda: not self._listing, MOMENT)
            self._check()
            return self._nodes

    def send(self, outgoing: Mapping[int, bytes]) -> None:
        """Push a message to each node."""
        with self._changed:
            pause = len(self._nodes) / POLLS
            pushed = [
                Message(make_record(data, pause), address, KIND, ttl=TTL)
                for address, data in outgoing.items()
            ]
            for first in range(0, len(pushed), PUSHED):
                self._to_push.append(pushed[first : first + PUSHED])
            self._push()

    def receive(self) -> list[Reply]:
        """Pull the replies that are there."""
        with self._changed:
            self._abandon()
            if self._pull():
                self._changed.wait_for(lambda: self._failure or self._replies, MOMENT)
            self._check()
            found, self._replies = self._replies, []
            return found

    def _check(self) -> None:
        """Raise what a call has raised."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _start(self, call: Callable[[], Any], end: Callable[[Any], None]) -> None:
        """Call something in a thread; ``end`` gets the result, or what was raised."""

        def run() -> None:
            try:
                found = call()
            except BaseException as error:
                found = error
            with self._changed:
                try:
                    end(found)
                except BaseException as error:
                    self._failure = error
                self._changed.notify_all()

        threading.Thread(target=run, daemon=True).start()

    def _list(self, nodes: Any) -> None:
        self._listing, self._listed = False, time.monotonic()
        self._nodes = _result(nodes)

    def _push(self) -> None:
        while self._to_push and self._pushing < CALLS:
            some = self._to_push.pop(0)
            self._pushing += 1
            self._start(partial(push, self._grid, some), partial(self._end_push, some))

    def _end_push(self, messages: list[Message], ids: Any) -> None:
        self._pushing -= 1
        self._push()
        for message, id in zip(messages, _result(ids), strict=True):
            address = message.metadata.dst_node_id
            if id:
                self._open[id] = (address, len(read_record(message.content)))
            else:
                self._replies.append(Reply(address, None, "the link did not take it"))

    def _pull(self) -> bool:
        """Ask for replies, unless a call is asking for them; whether it did."""
        free = [id for id in self._open if id not in self._held]
        asking = [one for one in self._pulls if one.claims]
        busy = sum(not one.abandoned for one in asking)
        room = min(CALLS - busy, MOST_PULLS - len(asking))
        if any(one.age < BUSY for one in asking) or room < 1 or not free:
            return False
        size = max(PULLED, -(-len(free) // room))
        for first in range(0, len(free), size):
            ids = free[first : first + size]
            call = _Pull(ids, self._patience(ids), claims=True)
            self._pulls.append(call)
            self._begin(call, partial(claim, self._grid, ids), self._begin_fetch)
        return True

    def _patience(self, ids: Collection[str]) -> float:
        return PATIENCE + sum(self._open[id][1] for id in ids) / SLOWEST

    def _begin(
        self, call: _Pull, run: Callable[[], Any], end: Callable[[_Pull, Any], None]
    ) -> None:
        call.begun = time.monotonic()
        self._start(run, partial(end, call))

    def _begin_fetch(self, call: _Pull, found: Any) -> None:
        """Fetch the replies that a call has claimed."""
        self._pulls.remove(call)
        if call.abandoned and isinstance(found, BaseException):
            return
        for id, fetch in _result(found):
            patience = self._patience([id]) if id in self._open else PATIENCE
            one = _Pull([id], patience, claims=False)
            self._pulls.append(one)
            self._held.add(id)
            self._to_fetch.append(partial(self._begin, one, fetch, self._end_fetch))
        self._fetch_more()
        self._report(call, "the link has lost the reply")

    def _fetch_more(self) -> None:
        while self._to_fetch and self._fetching < CALLS:
            self._fetching += 1
            self._to_fetch.pop(0)()

    def _end_fetch(self, call: _Pull, found: Any) -> None:
        self._pulls.remove(call)
        if not call.abandoned:
            self._fetching -= 1
            self._fetch_more()
        (id,) = call.ids
        if isinstance(found, LookupError | ValueError):
            found = Fetched(None, str(found) or "error")
        data, error, gone = _result(found)
        if gone and id in self._open and self._is_asked_for(id):
            return
        # The link itself sends errors: only the request tells which node failed.
        address = self._close(id)
        if address is None:
            address = self._late.get(id)
        if address is not None:
            self._replies.append(Reply(address, data, error))
        if not any(id in one.ids for one in self._pulls):
            self._late.pop(id, None)

    def _abandon(self) -> None:
        """Do not count on pulls that take too long; what they bring late is taken."""
        for call in self._pulls:
            if call.age > call.patience:
                if not (call.abandoned or call.claims):
                    self._fetching -= 1
                call.abandoned = True
                self._report(call, f"the reply is not complete after {call.age:.0f} s")
        self._fetch_more()

    def _report(self, call: _Pull, why: str) -> None:
        """Report the replies that a call may have been busy with, and nobody brings."""
        for id in self._held & call.ids:
            if not self._is_asked_for(id):
                address = self._close(id)
                if address is not None:
                    self._late[id] = address
                    self._replies.append(Reply(address, None, why))

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
