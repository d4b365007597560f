# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A node: one client of a federation, its states on its own disk.

A node replies to messages. It computes round r from the state that the message names
(``base``, the last round of this client that the server counted) and writes state r
beside it. A message that comes twice, a reply that was lost, a round that was not
counted or a restart in between change nothing: the node sends the same reply again, or
computes it again to the bit. It removes states and replies that no message can ask for
any more.

::

    FOLDER/lock                           one message at a time
    FOLDER/EXPERIMENT/terms.json          the terms under which the node was enrolled
    FOLDER/EXPERIMENT/state-R             after round R; -1 is enrollment
    FOLDER/EXPERIMENT/reply-R             the reply of round R, to be sent again
    FOLDER/EXPERIMENT/personal.safetensors  the model that this client deploys
"""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedblend import keys
from fedblend.core import PyTree
from fedblend.deploy import message as messages
from fedblend.deploy.client import state as states
from fedblend.deploy.client.executor import Executor, Measured
from fedblend.deploy.message import ENROLLED, Message, encode, one_line
from fedblend.deploy.worker import Handler
from fedblend.simulation.serialize import (
    WireError,
    as_tree,
    pack,
    traveling,
    unpack,
    write_atomically,
)
from fedblend.trees import precision


class Refusal(ValueError):
    """A node does not do what a message asks, and why: one line.

    Args:
        reason: what the server gets to know.
        detail: what the node's own audit gets to know, if that is more.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.detail = detail or reason


class Permissions(NamedTuple):
    """What the operator of a node permits, for one message."""

    describe: Callable[[Mapping[str, Any]], dict[str, Any]]
    """From the fields of a message to the node's description, or a ``Refusal``."""
    executor: Callable[[Mapping[str, Any]], Executor]
    """From the terms of an experiment to what computes it, or a ``Refusal``."""
    disclosed: Callable[[Measured, dict[str, int]], Measured]
    """Those of the measures that may leave the node; also given the rows of a split."""
    max_bytes: int | None = None
    """Of a message; a longer one is not read."""


class Node:
    """Replies to messages; everything that it remembers is on its disk.

    Args:
        folder: of the node's states.
        client: its client id.
        permissions: called once for every message.
        note: writes an event and its fields to the audit; returns the newest hash,
            which every reply has.
    """

    def __init__(
        self,
        folder: Path,
        client: int,
        permissions: Callable[[], Permissions],
        note: Callable[..., str],
    ):
        self.folder, self.client = folder, client
        self.permissions, self.note = permissions, note
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def handler(self) -> Handler:
        """What replies to the next message, with the permissions as they are now."""
        permissions = self.permissions()
        return Handler(partial(self._reply, permissions), permissions.max_bytes)

    def reply(self, data: bytes) -> bytes:
        """The reply to a message; one line of refusal where it cannot be met."""
        return self.handler().reply(data)

    def _reply(self, permissions: Permissions, data: bytes) -> bytes:
        request = Message("refused", messages.UNREADABLE, self.client)
        try:
            request = messages.decode(data, permissions.max_bytes)
            with states.locked(self.folder):
                return self._handle(permissions, request)
        except Exception as error:
            return self._refuse(request, error)

    def _refuse(self, request: Message, error: Exception) -> bytes:
        detail = one_line(getattr(error, "detail", error))
        if isinstance(error, Refusal | WireError):
            reason = one_line(error)
        elif isinstance(error, OSError):
            reason = f"disk: {error.strerror}"
        else:
            # The text of an error may quote rows: it is for the operator alone.
            reason = f"failed: {type(error).__name__}"
        # A full disk takes no audit line either, and the server must get to know.
        with suppress(Exception):
            self.note("refused", message=request.kind, reason=reason, detail=detail)
        return encode(
            request.reply("refused", reason=reason)._replace(client=self.client)
        )

    def _handle(self, permissions: Permissions, request: Message) -> bytes:
        kind, round = request.kind, request.round
        addressed = (
            {self.client, messages.UNKNOWN} if kind == "describe" else {self.client}
        )
        if kind == "refused" or request.client not in addressed:
            raise Refusal(
                f"client: a message of kind {kind!r} to client {request.client}, this "
                f"node is client {self.client}"
            )
        if kind in ("round", "measure") and round < 0:
            raise Refusal(f"message: there is no round {round}")
        if kind == "round" and request.base >= round:
            raise Refusal(
                f"message: round {round} cannot start from round {request.base}"
            )
        if kind == "describe":
            description = permissions.describe(request.fields)
            audit = self.note("described", experiment=request.experiment)
            head = request._replace(client=self.client)
            return encode(head.reply(**description, audit=audit))
        place = self.folder / request.experiment
        terms = request.fields if kind == "enroll" else _terms(place)
        executor = permissions.executor(terms)
        width = executor.setup.precision
        with nullcontext() if width is None else precision(width):
            if kind == "enroll":
                return self._enroll(executor, place, request)
            if kind == "round":
                return self._round(executor, place, request)
            return self._measure(executor, place, request, permissions.disclosed)

    def _enroll(self, executor: Executor, place: Path, request: Message) -> bytes:
        setup, digest = executor.setup, messages.digest_of(request)
        sent = states.read_reply(place, ENROLLED, digest, setup.protection)
        if sent is not None:
            self.note("enrolled", experiment=request.experiment)
            return sent
        params = jax.tree.map(jnp.asarray, as_tree(request.arrays, setup.params))
        join, state = executor.enroll(params)
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(place / "params", pack(params))
        states.write_state(place, ENROLLED, state, digest)
        states.write_terms(place, request.fields)
        audit = self.note("enrolled", experiment=request.experiment)
        reply = encode(request.reply(audit=audit), (join, executor.ask(state)))
        states.write_reply(place, ENROLLED, digest, setup.protection, reply)
        return reply

    def _round(self, executor: Executor, place: Path, request: Message) -> bytes:
        setup, round = executor.setup, request.round
        if round >= setup.rounds:
            raise Refusal(f"message: round {round} of an experiment of {setup.rounds}")
        digest, protection = messages.digest_of(request), setup.protection
        if setup.perturb is None:
            # Where messages are empty only the state tells two histories apart.
            protection += f" from {states.hash_of_state(place, request.base)}"
        elif not states.is_first_request(place, round, digest):
            raise Refusal(
                f"message: round {round} was asked for with another message; under "
                "noise it is computed once"
            )
        sent = states.read_reply(place, round, digest, protection)
        event = {"experiment": request.experiment, "round": round}
        if sent is not None:
            self.note("round", **event)
            return sent
        state = _state(executor, place, request.base)
        down = _received(executor, request, executor.message)
        up, after = jax.block_until_ready(executor.update(down, state))
        states.write_state(place, round, after, digest)
        states.remove_old(place, request.base, round)
        ask = _changed_ask(executor, state, after)
        asks = bool(jax.tree.leaves(ask))
        head = request.reply(asked=asks, audit=self.note("round", **event))
        reply = encode(head, (up if setup.perturb is None else setup.perturb(up), ask))
        states.write_reply(place, round, digest, protection, reply)
        return reply

    def _measure(
        self, executor: Executor, place: Path, request: Message, disclosed: Callable
    ) -> bytes:
        setup, round, event = executor.setup, request.round, {}
        if round > setup.rounds:
            raise Refusal(
                f"message: a measure after round {round} of an experiment of "
                f"{setup.rounds}"
            )
        state = _state(executor, place, request.base)
        deployed = _received(executor, request, executor.deployment)
        model, measured = executor.measure(deployed, state)
        metadata = {
            "format": "fedblend",
            "round": str(round),
            "client": str(self.client),
        }
        write_atomically(place / "personal.safetensors", pack(model, metadata))
        if request.fields.get("last") and setup.alone is not None:
            arrays, _ = unpack((place / "params").read_bytes())
            alone, budget = executor.train_alone(as_tree(arrays, setup.params))
            for split, values in alone.items():
                measured[split]["local"] = values
            event["rounds_alone"] = budget.rounds
        counts = {name: split.total for name, split in setup.splits.items()}
        shown = disclosed(measured, counts)
        write_atomically(place / "measures.json", json.dumps(measured).encode())
        audit = self.note(
            "measured",
            experiment=request.experiment,
            round=round,
            sent={split: sorted(models) for split, models in shown.items()},
            **event,
        )
        return encode(request.reply(measures=shown, audit=audit))


def _terms(place: Path) -> dict[str, Any]:
    try:
        return states.read_terms(place)
    except FileNotFoundError:
        raise Refusal(
            f"experiment: {place.name} is not known here; the node was not enrolled in "
            "it, or has lost its folder"
        ) from None


def _state(executor: Executor, place: Path, base: int) -> PyTree:
    return jax.tree.map(jnp.asarray, states.read_state(place, base, executor.state))


def _received(executor: Executor, request: Message, template: Any) -> Any:
    """The server's message, or deployment; the number of its round is in the head."""
    root, round = executor.setup.root, request.round
    key = keys.at(root, "server", round - 1) if round else keys.at(root, "start")
    found = messages.payload_of(request, _at_round(template, None), key)
    found = jax.tree.map(jnp.asarray, found)
    return _at_round(found, jnp.asarray(round, jnp.int32))


def _at_round(received: Any, round: jax.Array | None) -> Any:
    if hasattr(received, "message"):
        return received._replace(message=received.message._replace(round=round))
    return received._replace(round=round)


def _changed_ask(executor: Executor, before: PyTree, after: PyTree) -> PyTree:
    """What the client asks for, if a round has changed it; else nothing travels."""
    if not jax.tree.leaves(executor.request):
        return ()
    old, new = (pack(traveling(executor.ask(state))) for state in (before, after))
    return () if old == new else executor.ask(after)
