# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A node: one client of a federation, its states on its own disk.

It answers messages. Round r is computed from the state that the message names
(``base``, the last round of this client that the server counted), and leaves state r
beside it: a message that comes twice, an answer that was lost, a round that was not
counted, or a restart in between change nothing: what was answered is told again, or
computed again to the bit. States and answers that no message can ask for any more are
removed.

::

    FOLDER/lock                           one message at a time
    FOLDER/EXPERIMENT/terms.json          what was agreed when the node was enrolled
    FOLDER/EXPERIMENT/state-R             after round R; -1 is enrollment
    FOLDER/EXPERIMENT/answer-R            what left in round R, to be told again
    FOLDER/EXPERIMENT/personal.safetensors  the model that this client uses
"""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedblend import keys
from fedblend.deploy import messages
from fedblend.deploy.client import storage
from fedblend.deploy.client.executor import Executor
from fedblend.deploy.messages import ENROLLED, Message
from fedblend.simulation.checkpoint import write_atomically
from fedblend.simulation.precision import precision
from fedblend.simulation.serialize import WireError, as_tree, pack, unpack


class Refusal(ValueError):
    """A node will not do what a message asks, and why: one line.

    Args:
        reason: what the other side is told.
        detail: what the owner alone is told, if that is more.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.detail = detail or reason


class Rules(NamedTuple):
    """What the owner of a node lets happen.

    join       (terms) -> Part: builds what the terms ask for, or raises a ``Refusal``;
               asked for every message, because the owner may change his mind.
    meet       (words) -> words: what the node says of itself, or a ``Refusal``.
    reveal     ({split: {model: {metric: value}}}, counts) -> the same: what may leave.
    note       (event, fields) -> head: writes to the audit log, whose newest hash every
               answer tells.
    longest    () -> bytes of a message that are read at all, None without a limit.
    """

    join: Callable[[Mapping[str, Any]], Executor]
    meet: Callable[[Mapping[str, Any]], dict[str, Any]]
    reveal: Callable[[dict, dict[str, int]], dict]
    note: Callable[..., str]
    longest: Callable[[], int | None]


class Node:
    """Answers messages; all that it knows is on its disk."""

    def __init__(self, folder: Path, client: int, rules: Rules):
        self.folder, self.client, self.rules = folder, client, rules
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def answer(self, data: bytes) -> bytes:
        """The answer to a message; what cannot be done is refused in one line."""
        message = Message("refused", messages.UNREAD, self.client)
        try:
            message = messages.read(data, self.rules.longest())
            with storage.alone(self.folder):
                return self._done(message)
        except Refusal as error:
            why, detail = messages.line(error), messages.line(error.detail)
        except WireError as error:
            why = detail = messages.line(error)
        except OSError as error:
            why, detail = f"disk: {error.strerror}", messages.line(error)
        except Exception as error:
            # What went wrong in detail may tell of rows: it is for the owner alone.
            why, detail = f"failed: {type(error).__name__}", messages.line(error)
        # A full disk takes no log either, and the other side must hear of it.
        with suppress(Exception):
            self.rules.note("refused", message=message.kind, reason=why, detail=detail)
        refusal = message.answer("refused", reason=why)
        return messages.write(refusal._replace(client=self.client))

    def _done(self, message: Message) -> bytes:
        """What a message asks for is done; the answer."""
        addressed = (self.client, messages.UNKNOWN)[: 1 + (message.kind == "meet")]
        if message.kind == "refused" or message.client not in addressed:
            raise Refusal(
                f"client: a message of kind {message.kind!r} to client "
                f"{message.client}, this node is client {self.client}"
            )
        if message.kind in ("round", "measure") and message.round < 0:
            raise Refusal(f"message: there is no round {message.round}")
        if message.kind == "round" and message.base >= message.round:
            raise Refusal(
                f"message: round {message.round} cannot start from round {message.base}"
            )
        if message.kind == "meet":
            return self._meet(message)
        enrolled = message.kind != "enroll"
        part = self._part(message) if enrolled else self.rules.join(message.words)
        do = {
            "enroll": self._enroll,
            "round": self._round,
            "measure": self._measure,
        }[message.kind]
        width = part.own.precision
        with nullcontext() if width is None else precision(width):
            return do(part, message)

    def _meet(self, message: Message) -> bytes:
        said = self.rules.meet(message.words)
        audit = self.rules.note("met", experiment=message.experiment)
        head = message._replace(client=self.client)
        return messages.write(head.answer(**said, audit=audit))

    def _enroll(self, part: Executor, message: Message) -> bytes:
        place = self._place(message)
        about, said = {"experiment": message.experiment}, messages.digest(message)
        kept = storage.read_answer(place, ENROLLED, said, part.own.manner)
        if kept is not None:
            self.rules.note("enrolled", **about)
            return kept
        params = jax.tree.map(jnp.asarray, as_tree(message.arrays, part.own.params))
        join, state = part.enroll(params)
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(place / "params", pack(params))
        storage.write_state(place, ENROLLED, state, said)
        storage.write_terms(place, message.words)
        head = message.answer(audit=self.rules.note("enrolled", **about))
        answer = messages.write(head, (join, part.ask(state)))
        storage.write_answer(place, ENROLLED, said, part.own.manner, answer)
        return answer

    def _round(self, part: Executor, message: Message) -> bytes:
        place = self._place(message)
        if message.round >= part.own.rounds:
            raise Refusal(
                f"message: round {message.round} of an experiment of {part.own.rounds}"
            )
        said, leave = messages.digest(message), part.own.leave
        if leave is not None and not storage.new_or_same(place, message.round, said):
            raise Refusal(
                f"message: round {message.round} was asked for with another message; "
                "under noise it is answered once"
            )
        about = {"experiment": message.experiment, "round": message.round}
        manner = part.own.manner
        if leave is None:
            # Where messages are empty only the state tells two histories apart.
            manner = f"{manner} from {storage.seal_of_state(place, message.base)}"
        kept = storage.read_answer(place, message.round, said, manner)
        if kept is not None:
            self.rules.note("round", **about)
            return kept
        state = self._state(place, message.base, part)
        down = self._told(message, part.message, part)
        up, after = jax.block_until_ready(part.client(down, state))
        storage.write_state(place, message.round, after, said)
        storage.forget(place, message.base, message.round)
        changed = self._asked_anew(part, state, after)
        asked = bool(jax.tree.leaves(changed))
        head = message.answer(asked=asked, audit=self.rules.note("round", **about))
        leaving = up if leave is None else leave(up)
        answer = messages.write(head, (leaving, changed))
        storage.write_answer(place, message.round, said, manner, answer)
        return answer

    def _measure(self, part: Executor, message: Message) -> bytes:
        place = self._place(message)
        if message.round > part.own.rounds:
            raise Refusal(
                f"message: a measure after round {message.round} of an experiment of "
                f"{part.own.rounds}"
            )
        state = self._state(place, message.base, part)
        told = self._told(message, part.deployed, part)
        model, seen = part.measure(told, state)
        words = {"format": "fedblend", "round": str(message.round)}
        name = {**words, "client": str(self.client)}
        write_atomically(place / "personal.safetensors", pack(model, name))
        counts = part.counts()
        about: dict[str, Any] = {}
        if message.words.get("last") and part.own.alone is not None:
            params = as_tree(
                unpack((place / "params").read_bytes())[0], part.own.params
            )
            alone, budget = part.alone(params)
            for split, values in alone.items():
                seen[split]["local"] = values
            about["rounds_alone"] = budget.rounds
        revealed = self.rules.reveal(seen, counts)
        write_atomically(place / "measures.json", json.dumps(seen).encode())
        audit = self.rules.note(
            "measured",
            experiment=message.experiment,
            round=message.round,
            told={split: sorted(models) for split, models in revealed.items()},
            **about,
        )
        told_measures = _spoken(revealed)
        return messages.write(message.answer(measures=told_measures, audit=audit))

    def _told(self, message: Message, template: Any, part: Executor) -> Any:
        """The message in a message; the number of its round is in the head."""
        root, at = part.own.root, message.round
        key = keys.at(root, "server", at - 1) if at else keys.at(root, "start")
        told = messages.content(message, _without_round(template), key)
        number = jnp.asarray(message.round, jnp.int32)
        told = jax.tree.map(jnp.asarray, told)
        if hasattr(told, "message"):
            return told._replace(message=told.message._replace(round=number))
        return told._replace(round=number)

    def _asked_anew(self, part: Executor, before: Any, after: Any) -> Any:
        """What the client asks for, if that has changed; else nothing travels."""
        if not jax.tree.leaves(part.request):
            return ()
        old, new = (pack(messages.traveling(part.ask(s))) for s in (before, after))
        return () if old == new else part.ask(after)

    def _part(self, message: Message) -> Executor:
        try:
            return self.rules.join(storage.read_terms(self._place(message)))
        except FileNotFoundError:
            raise Refusal(
                f"experiment: {message.experiment} is not known here; the node was not "
                "enrolled in it, or has lost its folder"
            ) from None

    def _state(self, place: Path, base: int, part: Executor) -> Any:
        return jax.tree.map(jnp.asarray, storage.read_state(place, base, part.state))

    def _place(self, message: Message) -> Path:
        return self.folder / message.experiment


def _without_round(template: Any) -> Any:
    if hasattr(template, "message"):
        return template._replace(message=template.message._replace(round=None))
    return template._replace(round=None)


def _spoken(measures: dict) -> dict:
    """Values as JSON has them: what is not a number is left out."""
    return {
        split: {
            model: {
                name: value for name, value in metrics.items() if value - value == 0
            }
            for model, metrics in models.items()
        }
        for split, models in measures.items()
    }
