# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The server's transport over a Grid that is slow, hangs, or loses replies."""

import contextlib
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")
from flwr.app import Message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.task_identity import TaskIdentity

from fedblend_federation.flower import grid as grid_calls
from fedblend_federation.flower.grid import GridTransport, push
from fedblend_federation.flower.private import Server, list_needed_parts
from fedblend_federation.flower.records import (
    KIND,
    SMALL,
    content_of,
    make_record,
)


class StubClient:
    """Stands in for Flower's client of a link: the parts of a reply come late.

    A node sends every message back as soon as it has the part that it needs; the link
    stores no other parts of such a message.

    Args:
        late: looks at a part after which it is there.
        seconds: what each call of HTTP takes.
        hanging: nodes whose replies are there, and not complete.
    """

    def __init__(self, late: int, seconds: float, hanging: tuple[int, ...]):
        self.late, self.seconds, self.hanging = late, seconds, hanging
        self.requests, self.objects, self.closed = {}, {}, set()
        self.asked: Counter = Counter()
        self.confirmed: list[str] = []
        self.pushed: dict[str, bytes] = {}
        self.lock, self.most, self.running = threading.Lock(), 0, 0

    @contextlib.contextmanager
    def _call(self):
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        time.sleep(self.seconds)
        with self.lock:
            self.running -= 1
            yield

    def PushMessages(self, request):
        messages = map(message_from_proto, request.messages_list)
        trees = request.message_object_trees
        ids = [tree.object_id for tree in trees]
        with self._call():
            found = zip(messages, trees, strict=True)
            self.requests |= dict(zip(ids, found, strict=True))
        asked = [one.object_id for tree in trees for one in iterate_object_tree(tree)]
        return SimpleNamespace(
            message_ids=ids, objects_to_push=asked[::-1], session_id="s"
        )

    def PushObject(self, request):
        with self._call():
            answered = not self.requests
            if not answered:
                self.pushed[request.object_id] = request.object_content
        return SimpleNamespace(stored=not answered)

    def PullMessages(self, request):
        found = []
        with self._call():
            for id in request.message_ids:
                message, tree = self.requests.get(id, (None, None))
                parts = [] if tree is None else list_needed_parts(tree)
                if tree is None or not all(one in self.pushed for one in parts):
                    continue
                del self.requests[id]
                content = content_of({one: self.pushed[one] for one in parts}, tree)
                reply = Message(content, reply_to=message)
                reply.metadata.__dict__["_message_id"] = reply.object_id
                found.append(reply)
                for one, part in get_all_nested_objects(reply).items():
                    self.objects[one] = part.deflate()
                    if message.metadata.dst_node_id in self.hanging:
                        self.closed.add(one)
        return SimpleNamespace(
            messages_list=[message_to_proto(one) for one in found],
            message_object_trees=[get_object_tree(one) for one in found],
        )

    def PullObject(self, request):
        with self._call():
            self.asked[request.object_id] += 1
            late = self.asked[request.object_id] > self.late
        return SimpleNamespace(
            object_found=request.object_id in self.objects,
            object_available=late and request.object_id not in self.closed,
            object_content=self.objects.get(request.object_id, b""),
        )

    def ConfirmMessageReceived(self, request):
        self.confirmed.append(request.message_object_id)


class StubGrid:
    """A Grid with Flower's client: its own push and pull are not there."""

    def __init__(
        self,
        nodes: int,
        late: int = 0,
        seconds: float = 0.0,
        hanging: tuple[int, ...] = (),
    ):
        self.nodes, self.listing = nodes, 0.0
        self.client = self._runtime_client = StubClient(late, seconds, hanging)
        self.run, self.node = SimpleNamespace(run_id=5), Node(node_id=1)

    def get_node_ids(self):
        time.sleep(self.listing)
        return range(1, self.nodes + 1)


def transport_over(grid: Any) -> GridTransport:
    return GridTransport(grid)


def received(transport: GridTransport, wanted: int, within: float) -> dict[int, list]:
    """Replies by address, as soon as there are so many."""
    found: dict[int, list] = {}
    until = time.monotonic() + within
    while sum(map(len, found.values())) < wanted and time.monotonic() < until:
        begun = time.monotonic()
        for address, data, error in transport.receive():
            found.setdefault(address, []).append(error if data is None else data)
            # One call after the other would be 4 s.
            assert time.monotonic() - begun < 2, "the coordinator has to wait"
        time.sleep(0.01)
    return found


@pytest.fixture(autouse=True)
def run(monkeypatch):
    for name, value in (("_run_id", 5), ("_node_id", 1), ("_task_id", 3)):
        monkeypatch.setattr(TaskIdentity, name, value)


def test_calls_run_beside_each_other(monkeypatch):
    """64 messages at 20 ms a call are 4 s one after the other."""
    monkeypatch.setattr(grid_calls, "CLAIMED", 8)
    grid = StubGrid(64, seconds=0.02)
    transport, begun = transport_over(grid), time.monotonic()
    transport.send({at: b"%d" % at for at in range(1, 65)})
    assert time.monotonic() - begun < 0.2
    found = received(transport, 64, 10.0)
    assert found == {at: [b"%d" % at] for at in range(1, 65)}
    assert time.monotonic() - begun < 2.5
    assert 1 < grid.client.most <= 2 * grid_calls.CALLS + 2


def test_a_reply_that_is_never_complete_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(grid_calls, "PATIENCE", 1.0)
    grid = StubGrid(4, hanging=(2,))
    transport = transport_over(grid)
    transport.send({2: b"two"})
    assert received(transport, 1, 0.3) == {}
    # The others are asked later, and are there at once.
    transport.send({1: b"one", 3: b"three", 4: b"four"})
    assert received(transport, 3, 0.7) == {1: [b"one"], 3: [b"three"], 4: [b"four"]}
    # After a while the server gets to know, and may send it again.
    (line,) = received(transport, 1, 10.0)[2]
    assert "not complete after 1 s" in line
    grid.client.hanging = ()
    transport.send({2: b"again"})
    assert received(transport, 1, 5.0) == {2: [b"again"]}
    assert received(transport, 1, 0.3) == {}


def test_parts_that_come_late_are_awaited_beside_each_other():
    """A reply is there at the sixth look, after 0.7 s: 5.3 s one after the other."""
    grid = StubGrid(8, late=5)
    transport, begun = transport_over(grid), time.monotonic()
    transport.send({at: b"%d" % at for at in range(1, 9)})
    assert received(transport, 8, 20.0) == {at: [b"%d" % at] for at in range(1, 9)}
    assert time.monotonic() - begun < 4.0
    assert len(grid.client.confirmed) == 8


def test_what_a_node_needs_is_pushed_first_and_the_rest_may_be_refused():
    """Flower's own push would raise where the link does not store a part."""
    grid: Any = StubGrid(1, late=0)
    client = grid.client
    message = Message(make_record(b"x"), 1, KIND, ttl=60)
    pushed, sent = client.PushObject, []

    def answered_at_once(request):
        sent.append(request.object_id)
        pushed(request)
        if len(sent) == 1:
            client.PullMessages(SimpleNamespace(message_ids=[message.object_id]))
        return pushed(request)

    client.PushObject = answered_at_once
    assert push(Server(grid), [message]) == [message.object_id]
    assert sent[:1] == list_needed_parts(get_object_tree(message))
    assert len(sent) == 3


@pytest.mark.parametrize("size, calls", [(10, 1), (SMALL, 1), (SMALL + 1, 5)])
def test_of_a_small_reply_one_part_is_pulled(size, calls):
    grid = StubGrid(1, late=0)
    transport = transport_over(grid)
    transport.send({1: b"x" * size})
    assert received(transport, 1, 20.0) == {1: [b"x" * size]}
    assert grid.client.asked.total() == calls


def test_a_reply_of_which_a_part_is_gone_is_an_error():
    grid = StubGrid(2, late=0)
    transport = transport_over(grid)
    grid.client.PullObject = lambda request: SimpleNamespace(
        object_found=False, object_available=False
    )
    transport.send({1: b"one", 2: b"two"})
    found = received(transport, 2, 10.0)
    assert set(map(tuple, found.values())) == {
        ("a part of the reply is not there any more",)
    }


def test_a_list_of_nodes_that_hangs_holds_up_nobody(monkeypatch):
    grid = StubGrid(2)
    transport = transport_over(grid)
    assert transport.addresses() == [1, 2]
    monkeypatch.setattr(grid_calls, "REFRESH", 0.0)
    grid.listing = 1.0
    begun = time.monotonic()
    assert transport.addresses() == transport.addresses() == [1, 2]
    assert time.monotonic() - begun < 0.5


def test_an_error_of_the_link_reaches_the_server():
    grid: Any = StubGrid(1)

    def broken(request):
        raise RuntimeError("no run")

    grid.client.PushMessages = broken
    transport = transport_over(grid)
    transport.send({1: b"x"})
    with pytest.raises(RuntimeError, match="no run"):
        received(transport, 1, 5.0)


def test_what_is_no_message_of_flower_is_an_error():
    grid: Any = StubGrid(1)
    pull = grid.client.PullObject

    def damaged(request):
        found = pull(request)
        found.object_content = b"x"
        return found

    grid.client.PullObject = damaged
    transport = transport_over(grid)
    transport.send({1: b"one"})
    (line,) = received(transport, 1, 5.0)[1]
    assert line.startswith("no message of Flower")
