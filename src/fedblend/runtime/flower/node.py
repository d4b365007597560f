# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A node: one client of a federation, its states on its own disk.

It answers letters. Round r is computed from the state that the letter names (``base``,
the last round of this client that the server counted), and leaves state r beside it: a
letter that comes twice, an answer that was lost, a round that was not counted, or a
restart in between change nothing: what was answered is told again, or computed again
to the bit. States and answers that no letter can ask for any more are removed.

::

    FOLDER/lock                           one letter at a time
    FOLDER/EXPERIMENT/terms.json          what was agreed when the node was enrolled
    FOLDER/EXPERIMENT/state-R             after round R; -1 is enrolment
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
from fedblend.runtime.checkpoint import write_atomically
from fedblend.runtime.flower import keeping, letters
from fedblend.runtime.flower.letters import ENROLLED, Letter
from fedblend.runtime.flower.part import Part
from fedblend.runtime.precision import precision
from fedblend.runtime.wire import WireError, as_tree, pack, unpack


class Refusal(ValueError):
    """A node will not do what a letter asks, and why: one line.

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
               asked for every letter, because the owner may change his mind.
    meet       (words) -> words: what the node says of itself, or a ``Refusal``.
    reveal     ({split: {model: {metric: value}}}, counts) -> the same: what may leave.
    note       (event, fields) -> head: writes to the audit log, whose newest hash every
               answer tells.
    longest    () -> bytes of a letter that are read at all, None without a limit.
    """

    join: Callable[[Mapping[str, Any]], Part]
    meet: Callable[[Mapping[str, Any]], dict[str, Any]]
    reveal: Callable[[dict, dict[str, int]], dict]
    note: Callable[..., str]
    longest: Callable[[], int | None]


class Node:
    """Answers letters; all that it knows is on its disk."""

    def __init__(self, folder: Path, client: int, rules: Rules):
        self.folder, self.client, self.rules = folder, client, rules
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def answer(self, data: bytes) -> bytes:
        """The answer to a letter; what cannot be done is refused in one line."""
        letter = Letter("refused", letters.UNREAD, self.client)
        try:
            letter = letters.read(data, self.rules.longest())
            with keeping.alone(self.folder):
                return self._done(letter)
        except Refusal as error:
            why, detail = letters.line(error), letters.line(error.detail)
        except WireError as error:
            why = detail = letters.line(error)
        except OSError as error:
            why, detail = f"disk: {error.strerror}", letters.line(error)
        except Exception as error:
            # What went wrong in detail may tell of rows: it is for the owner alone.
            why, detail = f"failed: {type(error).__name__}", letters.line(error)
        # A full disk takes no log either, and the other side must hear of it.
        with suppress(Exception):
            self.rules.note("refused", letter=letter.kind, reason=why, detail=detail)
        refusal = letter.answer("refused", reason=why)
        return letters.write(refusal._replace(client=self.client))

    def _done(self, letter: Letter) -> bytes:
        """What a letter asks for is done; the answer."""
        addressed = (self.client, letters.UNKNOWN)[: 1 + (letter.kind == "meet")]
        if letter.kind == "refused" or letter.client not in addressed:
            raise Refusal(
                f"client: a letter of kind {letter.kind!r} to client "
                f"{letter.client}, this node is client {self.client}"
            )
        if letter.kind in ("round", "measure") and letter.round < 0:
            raise Refusal(f"letter: there is no round {letter.round}")
        if letter.kind == "round" and letter.base >= letter.round:
            raise Refusal(
                f"letter: round {letter.round} cannot start from round {letter.base}"
            )
        if letter.kind == "meet":
            return self._meet(letter)
        enrolled = letter.kind != "enroll"
        part = self._part(letter) if enrolled else self.rules.join(letter.words)
        do = {
            "enroll": self._enroll,
            "round": self._round,
            "measure": self._measure,
        }[letter.kind]
        width = part.own.precision
        with nullcontext() if width is None else precision(width):
            return do(part, letter)

    def _meet(self, letter: Letter) -> bytes:
        said = self.rules.meet(letter.words)
        audit = self.rules.note("met", experiment=letter.experiment)
        head = letter._replace(client=self.client)
        return letters.write(head.answer(**said, audit=audit))

    def _enroll(self, part: Part, letter: Letter) -> bytes:
        place = self._place(letter)
        about, said = {"experiment": letter.experiment}, letters.digest(letter)
        kept = keeping.read_answer(place, ENROLLED, said, part.own.manner)
        if kept is not None:
            self.rules.note("enrolled", **about)
            return kept
        params = jax.tree.map(jnp.asarray, as_tree(letter.arrays, part.own.params))
        hello, state = part.enroll(params)
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(place / "params", pack(params))
        keeping.write_state(place, ENROLLED, state, said)
        keeping.write_terms(place, letter.words)
        head = letter.answer(audit=self.rules.note("enrolled", **about))
        answer = letters.write(head, (hello, part.ask(state)))
        keeping.write_answer(place, ENROLLED, said, part.own.manner, answer)
        return answer

    def _round(self, part: Part, letter: Letter) -> bytes:
        place = self._place(letter)
        if letter.round >= part.own.rounds:
            raise Refusal(
                f"letter: round {letter.round} of an experiment of {part.own.rounds}"
            )
        said, leave = letters.digest(letter), part.own.leave
        if leave is not None and not keeping.new_or_same(place, letter.round, said):
            raise Refusal(
                f"letter: round {letter.round} was asked for with another message; "
                "under noise it is answered once"
            )
        about = {"experiment": letter.experiment, "round": letter.round}
        manner = part.own.manner
        if leave is None:
            # Where messages are empty only the state tells two histories apart.
            manner = f"{manner} from {keeping.seal_of_state(place, letter.base)}"
        kept = keeping.read_answer(place, letter.round, said, manner)
        if kept is not None:
            self.rules.note("round", **about)
            return kept
        state = self._state(place, letter.base, part)
        down = self._told(letter, part.message, part)
        up, after = jax.block_until_ready(part.client(down, state))
        keeping.write_state(place, letter.round, after, said)
        keeping.forget(place, letter.base, letter.round)
        changed = self._asked_anew(part, state, after)
        asked = bool(jax.tree.leaves(changed))
        head = letter.answer(asked=asked, audit=self.rules.note("round", **about))
        leaving = up if leave is None else leave(up)
        answer = letters.write(head, (leaving, changed))
        keeping.write_answer(place, letter.round, said, manner, answer)
        return answer

    def _measure(self, part: Part, letter: Letter) -> bytes:
        place = self._place(letter)
        if letter.round > part.own.rounds:
            raise Refusal(
                f"letter: a measure after round {letter.round} of an experiment of "
                f"{part.own.rounds}"
            )
        state = self._state(place, letter.base, part)
        told = self._told(letter, part.deployed, part)
        model, seen = part.measure(told, state)
        words = {"format": "fedblend", "round": str(letter.round)}
        name = {**words, "client": str(self.client)}
        write_atomically(place / "personal.safetensors", pack(model, name))
        counts = part.counts()
        about: dict[str, Any] = {}
        if letter.words.get("last") and part.own.alone is not None:
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
            experiment=letter.experiment,
            round=letter.round,
            told={split: sorted(models) for split, models in revealed.items()},
            **about,
        )
        told_measures = _spoken(revealed)
        return letters.write(letter.answer(measures=told_measures, audit=audit))

    def _told(self, letter: Letter, template: Any, part: Part) -> Any:
        """The message in a letter; the number of its round is in the head."""
        root, at = part.own.root, letter.round
        key = keys.at(root, "server", at - 1) if at else keys.at(root, "start")
        told = letters.message(letter, _without_round(template), key)
        number = jnp.asarray(letter.round, jnp.int32)
        told = jax.tree.map(jnp.asarray, told)
        if hasattr(told, "message"):
            return told._replace(message=told.message._replace(round=number))
        return told._replace(round=number)

    def _asked_anew(self, part: Part, before: Any, after: Any) -> Any:
        """What the client asks for, if that has changed; else nothing travels."""
        if not jax.tree.leaves(part.request):
            return ()
        old, new = (pack(letters.travelling(part.ask(s))) for s in (before, after))
        return () if old == new else part.ask(after)

    def _part(self, letter: Letter) -> Part:
        try:
            return self.rules.join(keeping.read_terms(self._place(letter)))
        except FileNotFoundError:
            raise Refusal(
                f"experiment: {letter.experiment} is not known here; the node was not "
                "enrolled in it, or has lost its folder"
            ) from None

    def _state(self, place: Path, base: int, part: Part) -> Any:
        return jax.tree.map(jnp.asarray, keeping.read_state(place, base, part.state))

    def _place(self, letter: Letter) -> Path:
        return self.folder / letter.experiment


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
