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
    FOLDER/ledger.json                    what was given away, over all experiments
    FOLDER/agreement.json                 how the rows are split and labeled, for good
    FOLDER/EXPERIMENT/terms.json          the terms under which the node was enrolled
    FOLDER/EXPERIMENT/rows.json           hashes of the rows, several if they changed
    FOLDER/EXPERIMENT/state-R             after round R; -1 is enrollment
    FOLDER/EXPERIMENT/reply-R             the reply of round R, to be sent again
    FOLDER/EXPERIMENT/personal.safetensors  the model that this client deploys

A node may host several clients, as the gateway of many devices does: ``Host``. Each
client has its own rows, states, ledger, audit and limits, and answers for itself:
what one of them refuses, or fails at, is no matter of the others. They share the
process, the key and the connection, and what is compiled. Requests come in bundles, and
are answered one after the other.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from fedblend.simulation.serialize import WireError
from fedblend.trees import precision
from fedblend_federation import message as messages
from fedblend_federation.client import state as states
from fedblend_federation.client.answers import ANSWERS, Job
from fedblend_federation.client.build import SharedBuilds
from fedblend_federation.client.executor import Executor
from fedblend_federation.client.ledger import Ledger, read_ledger
from fedblend_federation.client.state import make_room
from fedblend_federation.message import UNKNOWN, UNREADABLE, Message, encode, one_line
from fedblend_federation.ops.audit import Audit
from fedblend_federation.ops.settings import (
    ClientSettings,
    NodeSettings,
    name_clients,
)
from fedblend_federation.policy.admit import Admission
from fedblend_federation.policy.policy import Permissions, Refusal
from fedblend_federation.secure.client import ANSWERS as SECURE
from fedblend_federation.worker import Handler


class Node:
    """Replies to messages; everything that it remembers is on its disk.

    Args:
        folder: of the node's states.
        client: its client id.
        permissions: called once for every message.
        note: writes an event and its fields to the audit; returns the newest hash,
            which every reply has.
        home: the folder that has the disk's limit; that of other clients, too, where
            a node hosts several.
    """

    def __init__(
        self,
        folder: Path,
        client: int,
        permissions: Callable[[], Permissions],
        note: Callable[..., str],
        home: Path | None = None,
    ):
        self.folder, self.client, self.home = folder, client, home or folder
        self.permissions, self.note = permissions, note
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def handler(self) -> Handler:
        """What replies to the next message, with the permissions as they are now."""
        permissions = self.permissions()
        most = permissions.policy.limits.message_bytes
        return Handler(partial(self._reply, permissions, most), most)

    def reply(self, data: bytes) -> bytes:
        """The reply to a message; one line of refusal where it cannot be met."""
        return self.handler().reply(data)

    def _reply(self, permissions: Permissions, max_bytes: int, data: bytes) -> bytes:
        request = Message("refused", messages.UNREADABLE, self.client)
        try:
            request = messages.decode(data, max_bytes)
            with states.lock_folder(self.folder):
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
            about = {"message": request.kind, "reason": reason, "detail": detail}
            self._note_of(request)("refused", **about)
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
            about: dict[str, Any] = {"experiment": request.experiment}
            if "statistics" in description:
                about["statistics"] = len(description["statistics"]["present"])
            audit = self._note_of(request)("described", **about)
            head = request._replace(client=self.client)
            return encode(head.reply(**description, audit=audit))
        place, ledger = self.folder / request.experiment, read_ledger(self.folder)
        if kind == "enroll" and not (place / "terms.json").exists():
            limits = permissions.policy.limits
            make_room(self.folder, limits, ledger, self.note, self.home)
        terms = request.fields if kind == "enroll" else _terms(place)
        if kind == "stop":
            return self._stop(ledger, request)
        digest = messages.digest_of(request)
        name = f"{request.experiment} {digest}"
        executor = permissions.executor(terms).request_executor(name)
        note = self._note_of(request)
        told = _check_rows(place, executor, permissions, note)
        secure = permissions.secure(terms)
        job = Job(
            *(request, digest, executor, permissions, ledger, place, note, told, secure)
        )
        answers, width = ANSWERS if secure is None else SECURE, executor.setup.precision
        if kind not in answers:
            raise Refusal(f"message: {kind} is for secure sums, which this has none of")
        with nullcontext() if width is None else precision(width):
            return answers[kind](job)

    def _note_of(self, request: Message) -> Callable[..., str]:
        """Writes to the audit, with the newest hash of the server's, if that tells."""
        return partial(self.note, server=request.audit) if request.audit else self.note

    def _stop(self, ledger: Ledger, request: Message) -> bytes:
        """The server stops an experiment; unless it may go on, it is over here."""
        over = request.fields.get("over") is not False
        if over:
            ledger.account(request.experiment).over = True
            ledger.write(self.folder)
        event = {"experiment": request.experiment, "over": over}
        audit = self._note_of(request)("stopped", **event)
        return encode(request.reply(audit=audit))


def _terms(place: Path) -> dict[str, Any]:
    try:
        return states.read_terms(place)
    except FileNotFoundError:
        raise Refusal(
            f"experiment: {place.name} is not known here; the node was not enrolled in "
            "it, or has lost its folder"
        ) from None


def _check_rows(
    place: Path, executor: Executor, permissions: Permissions, note: Callable[..., str]
) -> dict[str, Any]:
    """Refuse an experiment whose rows changed, unless the operator agrees.

    Returns what every reply tells the server of it.
    """
    enrolled = (place / "terms.json").exists()
    known = states.read_fingerprints(place) if enrolled else []
    if known and known[-1] != executor.setup.fingerprint:
        if "rows" not in permissions.policy.rows.changes:
            raise Refusal(
                "policy rows.changes: the rows of this node changed under the "
                "experiment; allowed: the rows that it began with"
            )
        known.append(executor.setup.fingerprint)
        states.write_fingerprints(place, known)
        note("rows changed", experiment=place.name, sha256=executor.setup.fingerprint)
    return {"rows_changed": True} if len(known) > 1 else {}


class Host:
    """Replies to messages and bundles, for the clients that it hosts.

    Args:
        nodes: of the clients.
        note: writes to the audit of the node itself: what is to no client.
    """

    def __init__(self, nodes: Mapping[int, Node], note: Callable[..., str]):
        self.nodes, self.note = nodes, note

    def handler(self) -> Handler:
        """What replies to the next message, with the policies as they are now."""
        handlers = {client: node.handler() for client, node in self.nodes.items()}
        # A bundle is no longer than what the strictest of its clients accepts.
        largest = messages.LARGEST_BUNDLE
        room = min(one.max_bytes or largest for one in handlers.values())
        return Handler(partial(self._reply, handlers, room), room)

    def reply(self, data: bytes) -> bytes:
        """The reply to a message, or the bundle of replies to a bundle."""
        return self.handler().reply(data)

    def _reply(self, handlers: Mapping[int, Handler], room: int, data: bytes) -> bytes:
        try:
            if messages.is_bundle(data):
                return self._replies(handlers, messages.unpack_bundle(data))
            request = messages.decode(data, room)
            if request.kind == "describe" and request.client == UNKNOWN:
                return self._describe(handlers, room, request)
            if request.client not in handlers:
                raise WireError(
                    f"client: a message to client {request.client}, this node hosts "
                    f"{name_clients(list(handlers))}"
                )
        except WireError as error:
            return self._refuse(str(error))
        return handlers[request.client].reply(data)

    def _replies(
        self, handlers: Mapping[int, Handler], requests: Iterable[tuple[int, bytes]]
    ) -> bytes:
        """One reply after the other; what is to others than its clients is left out."""
        replies = []
        for client, data in requests:
            if client in handlers:
                replies.append((client, handlers[client].reply(data)))
            else:
                self.note("refused", message="foreign", reason=f"to client {client}")
        return messages.pack_bundle(replies)

    def _describe(
        self, handlers: Mapping[int, Handler], room: int, request: Message
    ) -> bytes:
        """What all clients describe, and the size of bundles that they accept."""
        replies = []
        for client, handler in handlers.items():
            own = messages.decode(
                handler.reply(encode(request._replace(client=client)))
            )
            if own.kind == "describe":
                own = own._replace(fields={**own.fields, "bundle_bytes": room})
            replies.append((client, encode(own)))
        return messages.pack_bundle(replies)

    def _refuse(self, reason: str) -> bytes:
        line = one_line(reason)
        self.note("refused", message="foreign", reason=line)
        first = min(self.nodes)
        return encode(Message("refused", UNREADABLE, first, fields={"reason": line}))


def node_of(
    settings: NodeSettings | ClientSettings, shared: SharedBuilds | None = None
) -> Node:
    """The node of one client; policy and rows are read later.

    Args:
        settings: of the client, or of a node that has one.
        shared: what other clients of the same process have built.
    """
    if isinstance(settings, NodeSettings):
        (settings,) = settings.client_settings().values()
    settings.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    note = Audit(settings.folder / "audit.jsonl").note
    permissions = Admission(settings, shared).permissions
    return Node(settings.folder, settings.client, permissions, note, settings.home)


def answering(settings: NodeSettings) -> Node | Host:
    """What answers for a node: its one client, or the host of several."""
    shared = SharedBuilds(settings.bases)
    nodes = {
        client: node_of(own, shared)
        for client, own in settings.client_settings().items()
    }
    if settings.client is not None:
        return nodes[settings.client]
    return Host(nodes, Audit(settings.folder / "audit.jsonl").note)
