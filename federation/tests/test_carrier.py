# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A node's connection to Flower's link, before a link that stands in for it."""

import re
import shutil
import threading
import time
from email.utils import formatdate
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")
import httpx
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
)
from flwr.supercore.task_identity import TaskIdentity

from fedblend.errors import RunError
from fedblend_federation import worker
from fedblend_federation.flower import link_clients as fleets
from fedblend_federation.flower import private, records
from fedblend_federation.flower import supernode as carriers
from fedblend_federation.flower.link_clients import FleetClient, Foreign
from fedblend_federation.flower.records import (
    KIND,
    content_of,
    make_record,
    read_record,
)
from fedblend_federation.flower.supernode import Carrier
from fedblend_federation.ops import supervisor
from fedblend_federation.ops.audit import entries
from fedblend_federation.ops.settings import NodeSettings, load_as
from fedblend_federation.worker import Handler

NODE, RUN = 7, 5


def status_error(code: int, **headers: str) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://link")
    response = httpx.Response(code, headers=headers, request=request)
    return httpx.HTTPStatusError("", request=response.request, response=response)


class Link:
    """Stands in for Flower's link, and for the client that reaches it.

    It has no call that hands out an app: a carrier that asks for one fails.
    """

    def __init__(self):
        self.queue: list = []
        self.objects: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.failures: list[Exception] = []
        self.pushed: list = []
        self.late = 0
        self._client = SimpleNamespace(headers={})  # its HTTP connection

    def close(self) -> None:
        self.calls.append("close")

    def send(self, content: RecordDict, kind: str = KIND) -> None:
        """The server pushes a message."""
        message = Message(content, NODE, kind, ttl=60)
        message.metadata.__dict__["_message_id"] = message.object_id
        tree = get_object_tree(message)
        for id, one in get_all_nested_objects(message).items():
            self.objects[id] = one.deflate()
        self.queue.append(
            (message_to_proto(remove_content_from_message(message)), tree)
        )

    def _noted(self, name: str) -> None:
        self.calls.append(name)
        if self.failures:
            raise self.failures.pop(0)

    def ActivateNode(self, request):
        self._noted("activate")
        return SimpleNamespace(node_id=NODE)

    def DeactivateNode(self, request):
        self.calls.append(f"deactivate {request.node_id}")

    def SendNodeHeartbeat(self, request):
        self.calls.append("heartbeat")
        return SimpleNamespace(success=True)

    def PullMessages(self, request):
        if not self.queue:
            raise KeyboardInterrupt  # there is nothing left to try
        self._noted("pull")
        message, tree = self.queue.pop(0)
        return SimpleNamespace(messages_list=[message], message_object_trees=[tree])

    def PullObject(self, request):
        self._noted("object")
        self.late -= 1
        return SimpleNamespace(
            object_found=True,
            object_available=self.late < 0,
            object_content=self.objects[request.object_id],
        )

    def ConfirmMessageReceived(self, request):
        self._noted("confirm")

    def PushMessages(self, request):
        self._noted("push")
        (message,) = request.messages_list
        self.pushed.append((message_from_proto(message), request.message_object_trees))
        ids = [tree.object_id for tree in request.message_object_trees]
        children = [
            c.object_id for t in request.message_object_trees for c in t.children
        ]
        return SimpleNamespace(objects_to_push=ids + children, session_id="s")

    def PushObject(self, request):
        self._noted("push object")
        self.objects[request.object_id] = request.object_content


@pytest.fixture
def link(monkeypatch) -> Link:
    found = Link()
    made = staticmethod(lambda *given: found)
    monkeypatch.setattr(private.FleetHttpClient, "from_server_address", made)
    for name, value in (("_run_id", RUN), ("_node_id", 1), ("_task_id", 3)):
        monkeypatch.setattr(TaskIdentity, name, value)
    for name in ("REFUSED_PAUSE", "OFFLINE", "FASTEST"):
        monkeypatch.setattr(carriers, name, 0.01)
    monkeypatch.setattr(fleets, "RETRY", 0.01)
    return found


class Trial:
    def __init__(self, lab, folder, max_bytes=None):
        home = lab / "nodes" / "alice"
        self.asked: list[bytes] = []
        self.notes: list[dict] = []
        self.lines: list[str] = []
        log = self.lines.append
        fleet = FleetClient("127.0.0.1:1", home / "ca.crt", home / "node.key", log)
        self.carrier = Carrier(
            fleet,
            folder,
            lambda: Handler(self.reply, max_bytes),
            lambda event, **fields: self.notes.append({"event": event, **fields}),
            log,
        )

    def reply(self, data: bytes) -> bytes:
        self.asked.append(data)
        return b"reply to " + data

    def run(self) -> None:
        """Until the link has nothing left."""
        with pytest.raises(KeyboardInterrupt):
            self.carrier.run()


@pytest.fixture
def trial(lab, link, tmp_path) -> Trial:
    return Trial(lab, tmp_path / "state")


def content_pushed(link: Link) -> bytes:
    """By the parts that the server asks for."""
    _, (tree,) = link.pushed[-1]
    whole = content_of(
        {id: link.objects[id] for id in private.list_needed_parts(tree)}, tree
    )
    assert isinstance(whole, RecordDict)
    return read_record(whole)


def _ids(tree):
    yield tree.object_id
    for child in tree.children:
        yield from _ids(child)


def everything(link: Link, monkeypatch) -> None:
    """The link asks for every part of a reply."""
    push = link.PushMessages

    def asks_for_all(request):
        found = push(request)
        (tree,) = request.message_object_trees
        return SimpleNamespace(
            objects_to_push=list(_ids(tree)), session_id=found.session_id
        )

    monkeypatch.setattr(link, "PushMessages", asks_for_all)


MORE = ConfigRecord({"number": 1})


def test_of_a_small_reply_one_part_travels(trial, link, monkeypatch):
    """Of the reply: Flower's message and its record of records are two calls more."""
    everything(link, monkeypatch)
    link.send(make_record(b"x"))
    trial.run()
    _, (tree,) = link.pushed[-1]
    assert [id in link.objects for id in _ids(tree)] == [False, False, True]
    assert content_pushed(link) == b"reply to x"


@pytest.mark.parametrize("size", [6, records.SMALL, records.SMALL + 1])
def test_a_message_is_answered(trial, link, monkeypatch, size):
    everything(link, monkeypatch)
    second = b"2" * size
    link.send(make_record(b"first"))
    link.send(make_record(second))
    trial.run()
    assert trial.asked == [b"first", second]
    assert content_pushed(link) == b"reply to " + second
    assert link.calls[0] == "activate"
    assert link.calls[-2:] == [f"deactivate {NODE}", "close"]
    assert trial.notes == []


@pytest.mark.parametrize(
    "content, kind, reason",
    [
        (make_record(b"x"), "train", "a message of type 'train'"),
        (
            RecordDict({"other": ConfigRecord({"content": b"x"})}),
            KIND,
            "a message without fedblend's record",
        ),
        (
            RecordDict({"other": ConfigRecord({"message": b"x"}), "and": MORE}),
            KIND,
            "a message without fedblend's record",
        ),
        (
            RecordDict({"fedblend": ConfigRecord({"message": "text"})}),
            KIND,
            "a message without fedblend's record",
        ),
        (
            RecordDict({"fedblend": MetricRecord({"message": 1})}),
            KIND,
            "not a message of Flower: ValueError",
        ),
    ],
)
def test_a_message_that_is_not_ours_is_refused(trial, link, content, kind, reason):
    link.send(content, kind)
    trial.run()
    assert trial.asked == []
    assert trial.notes == [{"event": "refused", "message": "foreign", "reason": reason}]
    message, _ = link.pushed[0]
    assert message.has_error() and message.error.reason == reason
    assert kind == KIND or "object" not in link.calls


def test_a_message_that_is_too_large_is_not_read_to_its_end(lab, link, tmp_path):
    trial = Trial(lab, tmp_path / "state", max_bytes=1000)
    link.send(make_record(b"x" * (fleets.OVERHEAD + 1001)))
    trial.run()
    assert trial.asked == []
    assert [note["reason"] for note in trial.notes] == [
        "more than 1000 bytes, the most that is accepted"
    ]


def test_a_node_pauses_for_as_long_as_the_server_asks(trial, link, monkeypatch):
    """But not forever: a server may ask for anything."""
    pauses: list[float] = []
    monkeypatch.setattr(carriers.time, "sleep", pauses.append)
    link.send(make_record(b"x", 0.7))
    link.send(make_record(b"x", 1e9))
    link.send(make_record(b"x"))
    trial.run()
    assert pauses == [0.7, carriers.LONGEST, 0.01]


def test_parts_that_the_server_is_still_pushing_are_awaited(trial, link):
    link.late = 3
    link.send(make_record(b"slow"))
    trial.run()
    assert trial.asked == [b"slow"]
    assert link.calls.index("confirm") > 5


@pytest.mark.parametrize("step", ["activate", "pull", "object", "confirm", "push"])
@pytest.mark.parametrize(
    "failure", [httpx.ConnectError("refused"), httpx.ReadTimeout(""), status_error(502)]
)
def test_a_link_that_is_away_for_a_while_is_awaited(
    trial, link, step, failure, monkeypatch
):
    """Whatever call it is that fails, twice."""
    link.send(make_record(b"x"))
    noted, left = link._noted, [failure, failure]

    def fails_at(name: str) -> None:
        noted(name)
        if name == step and left:
            raise left.pop()

    monkeypatch.setattr(link, "_noted", fails_at)
    trial.run()
    assert trial.asked == [b"x"]
    assert [line for line in trial.lines if "again" in line]


def test_a_node_that_the_link_forgot_connects_again(trial, link):
    link.send(make_record(b"x"))
    link.send(make_record(b"y"))
    link.failures = []
    pull = link.PullMessages

    def forgets(request):
        link.PullMessages = pull
        raise status_error(401)

    link.PullMessages = forgets
    trial.run()
    assert link.calls.count("activate") == 2
    assert trial.asked == [b"x", b"y"]


@pytest.mark.parametrize(
    "ahead, remark",
    [(450, r"4\d\d s behind"), (-35, r"3\d s ahead of"), (100, None), (0, None)],
)
def test_a_clock_that_is_wrong_is_named(trial, link, ahead, remark):
    link.failures = [status_error(401, date=formatdate(time.time() + ahead))]
    trial.run()
    (line,) = (line for line in trial.lines if "refuses this node" in line)
    assert ("clock" in line) == (remark is not None)
    assert remark is None or re.search(f"machine's clock is {remark} the link's", line)


def test_without_rows_the_worker_answers(lab, link, tmp_path):
    """The half of a node that has the network, and nothing of the rows."""
    home = shutil.copytree(lab / "nodes" / "alice", tmp_path / "alice")
    settings = load_as(NodeSettings, home / "node.toml")
    ready = threading.Event()
    handler = Handler(lambda data: b"worker's reply to " + data)
    serving = {"handler": lambda: handler, "ready": ready.set}
    path = settings.worker_socket
    threading.Thread(
        target=worker.serve, args=(path,), kwargs=serving, daemon=True
    ).start()
    assert ready.wait(10)
    link.send(make_record(b"x"))
    link.send(make_record(b"x"), "train")
    lines: list[str] = []
    supervisor.serve_carrier(settings, with_rows=False, log=lines.append)
    assert "connected to the link" in lines
    assert [message.has_error() for message, _ in link.pushed] == [False, True]
    (line,) = entries(settings.flower_folder / "audit.jsonl")
    assert line and line["fields"]["reason"] == "a message of type 'train'"
    assert list(settings.folder.iterdir()) == []


def test_a_run_that_ended_is_no_harm(trial, link, monkeypatch):
    everything(link, monkeypatch)
    link.send(make_record(b"x"))
    link.send(make_record(b"y"))
    confirm = link.ConfirmMessageReceived

    def ended(request):
        monkeypatch.setattr(link, "ConfirmMessageReceived", confirm)
        raise status_error(403)

    monkeypatch.setattr(link, "ConfirmMessageReceived", ended)
    trial.run()
    assert trial.asked == [b"y"]
    assert content_pushed(link) == b"reply to y"


def test_a_carrier_that_was_killed_says_so_when_it_is_back(trial, link, tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "connected").write_text("41")
    trial.run()
    assert link.calls[:2] == ["deactivate 41", "activate"]
    assert not (tmp_path / "state" / "connected").exists()


def test_heartbeats_go_on_while_the_node_computes(trial, link, monkeypatch):
    monkeypatch.setattr(carriers, "HEARTBEAT", 0.1)
    link.send(make_record(b"x"))
    monkeypatch.setattr(trial, "reply", lambda data: time.sleep(0.5) or b"late")
    trial.run()
    between = link.calls[link.calls.index("confirm") : link.calls.index("push")]
    assert between.count("heartbeat") >= 2


def test_a_worker_that_is_down_is_an_error_that_the_server_sees(trial, link):
    def down(data):
        raise ConnectionRefusedError("no worker")

    trial.reply = down
    link.send(make_record(b"x"))
    trial.run()
    assert link.pushed[0][0].error.reason == "no worker"


def test_one_carrier_at_a_time(lab, link, tmp_path):
    running = threading.Event()
    first, second = (Trial(lab, tmp_path / "state") for _ in range(2))

    def holds(data):
        running.set()
        time.sleep(1.0)
        return b""

    first.reply = holds
    link.send(make_record(b"x"))
    thread = threading.Thread(target=first.run)
    thread.start()
    assert running.wait(10)
    with pytest.raises(RunError, match="this node is running already"):
        second.carrier.run()
    thread.join()


@pytest.mark.parametrize(
    "headers",
    [{}, {"content-length": "99999999999"}, {"content-encoding": "gzip"}],
)
def test_a_response_of_any_size_is_not_read(headers):
    headers = {"content-length": "10", **headers} if headers else {}
    with pytest.raises(Foreign, match="a response of"):
        fleets._check_size(httpx.Response(200, headers=headers))
    fleets._check_size(httpx.Response(200, headers={"content-length": "10"}))


def test_a_key_that_is_none_is_one_line(lab, tmp_path):
    home = lab / "nodes" / "alice"
    for key, reason in (
        (home / "ca.crt", "is not a private key"),
        (tmp_path, "Is a dir"),
    ):
        with pytest.raises(RunError, match=reason):
            FleetClient("127.0.0.1:1", home / "ca.crt", key, print)
    for ca, reason in ((home / "public.toml", "is not a cert"), (tmp_path, "Is a dir")):
        with pytest.raises(RunError, match=reason):
            FleetClient("127.0.0.1:1", ca, home / "node.key", print)
