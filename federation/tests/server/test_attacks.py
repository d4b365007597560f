# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A server that tries to get more of a node than its policy allows."""

import json
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from configured import federated, few, method, settings_of, write_rows

from fedblend_federation import message as messages
from fedblend_federation import worker
from fedblend_federation.client import state as states
from fedblend_federation.client.node import node_of
from fedblend_federation.message import ENROLLED, UNKNOWN, Message
from fedblend_federation.ops import supervisor
from fedblend_federation.ops.settings import NodeSettings, load_as
from fedblend_federation.policy import admit

CLIP, CLIENT = 1.0, 1
CUT = f"[protect]\nclip = {CLIP}\n"
NOISY = f"{CUT}noise = 100.0\n"
LOUDER = f"{CUT}noise = 300.0\n"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"))


class Server:
    """One that asks a node for whatever it likes."""

    def __init__(self, rows, home, policy, name="fedavg", rounds=3):
        self.home, self.experiment = home, "one"
        self.settings = settings_of(rows, home, CLIENT, policy)
        self.node = node_of(self.settings)
        self.terms = {"config": federated(method(name, rows, rounds))}
        described = self.ask("describe", to=UNKNOWN, fields=self.terms)
        self.terms["capacities"] = described.fields["counts"]
        self.executor = self.node.permissions().executor(self.terms)

    def ask(self, kind, payload=(), *, to=CLIENT, **head) -> Message:
        message = Message(kind, self.experiment, to)._replace(**head)
        return messages.decode(self.node.reply(messages.encode(message, payload)))

    def model(self, value):
        return jax.tree.map(
            lambda leaf: jnp.full(leaf.shape, value, leaf.dtype),
            self.executor.setup.params,
        )

    def enroll(self, value=0.0, **more) -> Message:
        return self.ask("enroll", self.model(value), fields={**self.terms, **more})

    def round(self, value=0.0, number=0, base=ENROLLED) -> Message:
        payload = self.executor.message._replace(shared=self.model(value), round=None)
        return self.ask("round", payload, round=number, base=base)


def change(answer: Message) -> np.ndarray:
    assert answer.kind == "round", answer.fields
    return np.concatenate([answer.arrays[name].ravel() for name in answer.arrays])


@pytest.fixture(scope="module")
def asking(rows, tmp_path_factory):
    return Server(rows, tmp_path_factory.mktemp("node"), NOISY)


@pytest.fixture
def server(asking, request):
    """One that begins an experiment; what is compiled is there already."""
    asking.experiment = "".join(filter(str.isalnum, request.node.name))[-60:]
    asking.enroll()
    yield asking
    (asking.home / "policy.toml").write_text(few(NOISY))


def far_apart(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether the difference of two replies still has the noise of both in it."""
    return bool(np.linalg.norm(one - other) > 20 * CLIP)


def test_noise_does_not_cancel_between_experiments_of_the_same_terms(server):
    first = change(server.round(0.0))
    server.experiment = "another"
    server.enroll()
    assert far_apart(first, change(server.round(0.1)))


def test_noise_does_not_cancel_between_rounds_and_terms_of_an_experiment(server):
    first = change(server.round(0.0))
    server.enroll(note="another")
    assert server.round(0.1).kind == "refused"
    assert far_apart(first, change(server.round(0.1, number=1)))


def test_the_same_message_gets_the_same_reply_whatever_happened_meanwhile(server):
    first = change(server.round(0.0))
    np.testing.assert_array_equal(first, change(server.round(0.0)))
    server.enroll(0.5)  # another state to start from
    np.testing.assert_array_equal(first, change(server.round(0.0)))
    (server.home / "policy.toml").write_text(few(LOUDER))  # the same, but longer
    np.testing.assert_array_equal(first, change(server.round(0.0)))
    server.node = node_of(server.settings)  # a restart
    np.testing.assert_array_equal(first, change(server.round(0.0)))


def test_a_round_is_computed_once_under_noise_in_any_order(server):
    assert server.round(0.0, 1).kind == "round"
    assert "another message" in server.round(0.1, 1).fields["reason"]
    assert "another message" in server.round(0.0, 0).fields["reason"]
    assert "of an experiment of 3" in server.round(0.0, 3, 1).fields["reason"]
    assert server.round(0.0, 2, 1).kind == "round"
    assert "another message" in server.round(0.0, 2, ENROLLED).fields["reason"]


def test_replies_that_no_message_can_ask_for_are_removed(server):
    for number in range(3):
        server.round(0.0, number, number - 1)
    place = server.node.folder / server.experiment
    kept = {path.name for path in place.glob("reply-*")}
    assert kept == {f"reply-{r}" for r in states.rounds(place) if r >= 0}
    assert len(kept) < 4


def test_a_model_that_overflows_draws_out_no_bit(rows, tmp_path):
    asking = Server(rows, tmp_path / "node", CUT)
    asking.enroll()
    for number, value in enumerate((np.nan, np.inf, 1e30)):
        found = change(asking.round(value, number))
        assert np.isfinite(found).all()
        assert np.linalg.norm(found) <= CLIP * (1 + 1e-6)


def test_a_measure_belongs_to_a_round_of_the_experiment(server):
    payload = server.executor.deployment
    payload = payload._replace(
        message=payload.message._replace(shared=server.model(0.0), round=None)
    )
    head = {"base": ENROLLED}
    assert server.ask("measure", payload, round=3, **head).kind == "measure"
    refused = server.ask("measure", payload, round=4, **head)
    assert "of an experiment of 3" in refused.fields["reason"]


def test_experiments_without_end_do_not_fill_the_memory(server, monkeypatch):
    built = []

    def build(setup):
        built.append(setup)
        return SimpleNamespace(setup=setup, train_rows=30)

    monkeypatch.setattr(admit, "Executor", build)
    for number in range(2 * admit.EXPERIMENTS):
        server.node.permissions().executor({**server.terms, "note": number})
    server.node.permissions().executor({**server.terms, "note": 0})
    assert len(built) == 2 * admit.EXPERIMENTS + 1


@pytest.mark.parametrize(
    ("columns", "labels"),
    [
        (["age"], ["no", "unheard of"]),
        (["name"], ["yes", "no"]),
        (["x"], ["yes", "no"]),
    ],
)
def test_refusals_quote_nothing_of_the_rows(columns, labels, rows, tmp_path):
    table = "name,age,ill\nAlice,31,yes\n" + "Bob,40,no\n" * 20
    (tmp_path / "rows.csv").write_text(table)
    settings_of(rows, tmp_path, CLIENT, '[rows]\ncolumns = "any"\n')
    toml = tmp_path / "node.toml"
    head, _, _ = toml.read_text().partition("[data]")
    toml.write_text(f'{head}[data]\nfile = "rows.csv"\ntarget = "ill"\n')
    node = node_of(load_as(NodeSettings, toml))
    shape = f"labels = {json.dumps(labels)}\ncolumns = {json.dumps(columns)}"
    text = federated(method("fedavg", rows, 1))
    text = text.replace("classes = 3\nshape = [6]", shape)
    message = Message("describe", "one", UNKNOWN, fields={"config": text})
    reply = node.reply(messages.encode(message))
    assert messages.decode(reply).fields["reason"] == admit.UNFIT
    for word in (b"Alice", b"31", b"yes", b"name", b"rows.csv"):
        assert word not in reply
    # The operator has to know.
    last = (tmp_path / "state" / "audit.jsonl").read_text().splitlines()[-1]
    assert "rows.csv: " in json.loads(last)["fields"]["detail"]


def test_a_worker_refuses_while_the_policy_is_wrong_and_goes_on(
    rows, tmp_path, monkeypatch
):
    settings = settings_of(rows, tmp_path, CLIENT, "[accept]\nrounds = 3\n")
    ready, serve = threading.Event(), worker.serve
    monkeypatch.setattr(
        worker, "serve", lambda *args, **more: serve(*args, **more, ready=ready.set)
    )
    # Signals are for the main thread.
    monkeypatch.setattr(supervisor.processes, "interrupt_on_sigterm", threading.Lock)
    path = tmp_path / "node.toml"
    threading.Thread(target=supervisor.serve_worker, args=(path,), daemon=True).start()
    assert ready.wait(30)
    for _ in range(2):
        data = messages.encode(Message("describe", "one", UNKNOWN))
        reply = messages.decode(worker.request(settings.worker_socket, data))
        assert "policy.toml: accept.rounds" in reply.fields["reason"]
