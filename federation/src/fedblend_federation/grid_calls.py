# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Calls of Flower's Grid, one of HTTP at a time: push messages, claim replies, fetch.

With Flower's own client, but for what the Grid does around it: it pulls the parts of
all replies before it returns one, and fails if a part that nobody needs is not stored.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from flwr.app import Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PushAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)

from fedblend_federation.flower import content_of, from_record, needed_parts

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
    client, sender = (getattr(grid, name, None) for name in ("_runtime_client", "node"))
    if client is None:
        return list(grid.push_messages(messages))
    parts = {}
    with no_object_id_recompute():
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            parts |= get_all_nested_objects(message)
        trees = [get_object_tree(message) for message in messages]
        bare = [message_to_proto(remove_content_from_message(one)) for one in messages]
    request = PushAppMessagesRequest(messages_list=bare, message_object_trees=trees)
    pushed = client.PushMessages(request)
    needed = [id for tree in trees for id in needed_parts(tree)]
    asked = dict.fromkeys(pushed.objects_to_push)
    for id in sorted(asked, key=lambda id: id not in needed):  # nodes may begin
        part = PushObjectRequest(
            node=sender,
            run_id=grid.run.run_id,
            object_id=id,
            object_content=parts[id].deflate(),
            session_id=pushed.session_id,
        )
        client.PushObject(part)
    return list(pushed.message_ids)


def claim(grid: Grid, ids: Sequence[str]) -> list[Claimed]:
    """The replies to messages that are there; the link hands each of them out once.

    ``Grid.pull_messages`` gets the parts of all of them before it returns. This is the
    same with Flower's own client, one reply at a time; a Grid without such a client is
    asked in the other way.
    """
    client = getattr(grid, "_runtime_client", None)
    if client is None:
        return [
            (one.metadata.reply_to_message_id, partial(_opened, one))
            for one in grid.pull_messages(ids)
        ]
    found = client.PullMessages(PullAppMessagesRequest(message_ids=ids))
    heads = [one.metadata for one in found.messages_list]
    return [
        (head.reply_to_message_id, partial(_fetch, grid, client, head.message_id, tree))
        for head, tree in zip(heads, found.message_object_trees, strict=True)
    ]


def _opened(reply: Message) -> Fetched:
    return _fetched(reply.error if reply.has_error() else reply.content)


def _fetched(content: RecordDict | Error) -> Fetched:
    if isinstance(content, Error):
        error = str(content.reason)[:200] or "error"
        return Fetched(None, error, content.code == UNAVAILABLE)
    return Fetched(from_record(content))


def _fetch(grid: Any, client: Any, id: str, tree: ObjectTree) -> Fetched:
    """A reply, as soon as all of its parts are there."""
    parts = {one: _part(grid, client, one) for one in needed_parts(tree)}
    received = ConfirmMessageReceivedRequest(
        node=grid.node, run_id=grid.run.run_id, message_object_id=id
    )
    client.ConfirmMessageReceived(received)
    return _fetched(content_of(parts, tree))


def _part(grid: Any, client: Any, id: str) -> bytes:
    request = PullObjectRequest(node=grid.node, run_id=grid.run.run_id, object_id=id)
    pause = FIRST_PAUSE
    while not (pulled := client.PullObject(request)).object_available:
        if not pulled.object_found:
            raise LookupError("a part of the reply is not there any more")
        time.sleep(pause)
        pause = min(1.5 * pause, LAST_PAUSE)
    return pulled.object_content
