# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Every private name of Flower that we use, of whatever version is installed.

A link that stands in for Flower's answers HTTP calls below Flower's own clients. It
registers a node, takes a message from a server's Grid to the node, and its reply back.
"""

import contextlib
from importlib.metadata import version

import pytest

pytest.importorskip("flwr")
import httpx
from flwr.app import Message

NODE, RUN = 7, 5


@contextlib.contextmanager
def flower_has_what_we_use():
    """Fail in one line with the private name that is missing or has another form."""
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        pytest.fail(f"flwr {version('flwr')}: {error}", pytrace=False)


class StubLink:
    """Stands in for the link: what it answers to each path of HTTP."""

    def __init__(self):
        self.queues = {"fleet": [], "runtime": []}
        self.parts: dict[str, bytes] = {}
        self.calls: list[str] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        """In place of the network."""
        from flwr.proto import (
            control_pb2,
            fleet_pb2,
            heartbeat_pb2,
            message_pb2,
            runtime_pb2,
        )

        api, call = request.url.path.split("/")[-2:]
        assert request.headers["flwr-package-version"] == version("flwr")
        assert ("flwr-signature" in request.headers) == (api == "fleet")
        self.calls.append(f"{api} {call}")
        name = "".join(word.title() for word in call.split("-"))
        if call in ("push-messages", "pull-messages") and api == "runtime":
            name = name.replace("Messages", "AppMessages")
        kinds = control_pb2, fleet_pb2, heartbeat_pb2, message_pb2, runtime_pb2
        (proto,) = [one for one in kinds if hasattr(one, f"{name}Request")]
        asked = getattr(proto, f"{name}Request").FromString(request.read())
        found = getattr(self, f"_{call.replace('-', '_')}", lambda *given: {})
        body = getattr(proto, f"{name}Response")(**found(api, asked))
        content = body.SerializeToString()
        length = {"content-length": str(len(content))}
        return httpx.Response(200, headers=length, content=content, request=request)

    def _register_node(self, api, asked):
        assert asked.name == "alice"
        self.public = asked.public_key
        return {"node_id": NODE}

    def _list_nodes(self, api, asked):
        return {"nodes_info": [{"node_id": NODE, "status": "registered"}]}

    def _activate_node(self, api, asked):
        assert asked.public_key == self.public
        return {"node_id": NODE}

    def _send_node_heartbeat(self, api, asked):
        return {"success": asked.node.node_id == NODE}

    def _push_messages(self, api, asked):
        other = {"fleet": "runtime", "runtime": "fleet"}[api]
        (message,), (tree,) = asked.messages_list, asked.message_object_trees
        self.queues[other].append((message, tree))
        told = {"message_ids": [tree.object_id]} if api == "runtime" else {}
        return told | {"objects_to_push": _ids(tree), "session_id": "s"}

    def _push_object(self, api, asked):
        assert (asked.session_id, asked.run_id) == ("s", RUN)
        self.parts[asked.object_id] = asked.object_content
        return {"stored": True}

    def _pull_messages(self, api, asked):
        found, self.queues[api] = self.queues[api], []
        return {
            "messages_list": [message for message, _ in found],
            "message_object_trees": [tree for _, tree in found],
        }

    def _pull_object(self, api, asked):
        content = self.parts[asked.object_id]
        return {
            "object_found": True,
            "object_available": True,
            "object_content": content,
        }


def _ids(tree) -> list[str]:
    return [tree.object_id, *(id for child in tree.children for id in _ids(child))]


@pytest.mark.parametrize("reply", ["one piece", "an array", "an error"])
def test_a_message_passes_every_private_call(reply, lab, monkeypatch):
    link, home = StubLink(), lab / "nodes" / "alice"
    monkeypatch.setattr(
        httpx.HTTPTransport, "handle_request", lambda self, asked: link.answer(asked)
    )
    with flower_has_what_we_use():
        from flwr.supercore.run import Run
        from flwr.supercore.task_identity import TaskIdentity
        from flwr.superlink.grid.http_grid import HttpGrid

        from fedblend_federation.flower import grid, link_clients, private, records

        for name, value in (("_run_id", RUN), ("_node_id", 1), ("_task_id", 3)):
            monkeypatch.setattr(TaskIdentity, name, value)
        control = private.Control("127.0.0.1:1", home / "ca.crt")
        number = control.register(lab / "server/nodes/alice.pub", "alice")
        assert control.statuses() == {number: "registered"}

        address, certificate = "127.0.0.1:1", (home / "ca.crt").read_bytes()
        server = HttpGrid(address, root_certificates=certificate, token="token")
        server.set_run(Run.create_empty(RUN))
        query = Message(records.make_record(b"hello"), NODE, records.KIND, ttl=60)
        own = private.Server(server)
        (sent,) = grid.push(own, [query])

        node = link_clients.FleetClient(
            address, home / "ca.crt", home / "node.key", print
        )
        assert node.activate(10.0) == NODE
        assert node.heartbeat(10.0)
        delivery = node.pull()
        assert delivery is not None
        assert node.read(delivery, None) == b"hello"
        size = records.SMALL + 1 if reply == "an array" else 10
        answer = "no" if reply == "an error" else b"x" * size
        node.reply(delivery, answer, 0.1)
        assert node.pull() is None

        ((request, id, tree),) = own.pull([sent])
        assert request == sent
        assert grid.fetch(own, id, tree, 1.0) == answer
        node.deactivate(NODE)
        control.unregister(number)
        node.close()
        control.close()
    confirmed = ["fleet confirm-message-received", "runtime confirm-message-received"]
    assert [call for call in link.calls if "confirm" in call] == confirmed
    assert link.calls[-1] == "control unregister-node"
    assert "fleet get-fab" not in link.calls
