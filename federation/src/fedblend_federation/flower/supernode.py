# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A node's own connection to the link: it takes messages and pushes replies.

Flower's SuperNode fetches an app from the server and runs it, in a process for every
message, and opens a port for that process. The carrier does neither. It hands the bytes
of each message to the node in this process. A message that is not fedblend's is
refused. Nothing that the server sends is run, and nobody can connect to this process.

The link keeps a node online until its heartbeats lapse, and does not deliver a message
twice. A carrier that died therefore reports itself as offline first when it comes back:
the link then tells the server that the message in between is lost, and the server sends
it again at once.
"""

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from fedblend.errors import RunError
from fedblend_federation.flower.link_clients import (
    Delivery,
    Failed,
    FleetClient,
    Foreign,
    Gone,
    Lost,
)
from fedblend_federation.worker import Handler

HEARTBEAT = 10.0
"""Seconds that the link waits for a heartbeat, twice; Flower allows no less."""
FASTEST, SLOWEST = 0.1, 3.0
"""Seconds between two pulls. The pause is a tenth of the time since the last message,
within these bounds: a round waits at most a tenth longer than it takes anyway. A server
with many nodes asks for longer pauses."""
LONGEST = 60.0
"""Seconds between two pulls, whatever the server asks for."""
REFUSED_PAUSE = 2.0
"""Seconds between two attempts to connect to a link that refuses this node."""
OFFLINE = 1.5
"""Seconds for which a carrier that had died is offline: the server looks for replies
five times a second."""


class Carrier:
    """Carries messages between a link and a node, until the process ends.

    Args:
        fleet: the calls to the link.
        folder: where the carrier remembers that it is connected.
        handler: called once for every message, before the message is read.
        note: writes an event and its fields to the audit.
        log: called with a line when the connection changes.
    """

    def __init__(
        self,
        fleet: FleetClient,
        folder: Path,
        handler: Callable[[], Handler],
        note: Callable[..., object],
        log: Callable[[str], None],
    ):
        self._fleet, self._folder = fleet, folder
        self._handler, self._note, self._log = handler, note, log
        self._lost = threading.Event()

    def run(self) -> NoReturn:
        """Connect, and answer messages; connect again where the link forgot us."""
        with _alone(self._folder), closing(self._fleet):
            connected, node = self._folder / "connected", 0
            with suppress(OSError, ValueError):
                if self._fleet.deactivate(int(connected.read_text())):
                    time.sleep(OFFLINE)
            try:
                while True:
                    node = self._activate()
                    connected.write_text(str(node))
                    with self._beating():
                        self._serve()
                    self._log("the link does not know this node any more")
            finally:
                if self._fleet.deactivate(node):
                    connected.unlink(missing_ok=True)

    def _activate(self) -> int:
        """Get the link's id of this node, however long it takes."""
        told = False
        while True:
            try:
                node = self._fleet.activate(HEARTBEAT)
            except (Lost, Gone, Failed) as error:
                if not told:
                    self._log(
                        f"the link refuses this node ({error}): its key is not "
                        "registered there, or it is connected already"
                    )
                told = True
                time.sleep(REFUSED_PAUSE)
            else:
                self._log("connected to the link")
                return node

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Inside of the block heartbeats are sent, also while the node computes."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(HEARTBEAT / 2):
                if not self._fleet.heartbeat(HEARTBEAT):
                    self._lost.set()

        self._lost.clear()
        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()

    def _serve(self) -> None:
        """Answer messages until the link does not know this node any more."""
        last = time.monotonic()
        while not self._lost.is_set():
            try:
                delivery = self._fleet.pull()
                if delivery is not None:
                    self._answer(delivery)
                    last = time.monotonic()
            except Lost:
                return
            except Gone:
                self._log("a message belongs to a run that has ended")
            except (Failed, ValueError) as error:
                # The server misses the reply, and sends the message again.
                self._log(f"a message was not answered: {error}")
            idle = time.monotonic() - last
            asked = min(self._fleet.pause or 0.0, LONGEST)
            time.sleep(max(min(max(idle / 10, FASTEST), SLOWEST), asked))

    def _answer(self, delivery: Delivery) -> None:
        begun = time.monotonic()
        try:
            handler = self._handler()
            reply = handler.reply(self._fleet.read(delivery, handler.max_bytes))
        except Foreign as error:
            reply = str(error)
            with suppress(Exception):  # a full disk takes no line
                self._note("refused", message="foreign", reason=reply)
        except OSError as error:
            # The worker of this node is down: the server sends the message again.
            reply = str(error)[:200]
        self._fleet.reply(delivery, reply, time.monotonic() - begun)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """At most one carrier has a folder: two would take each other's messages."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(folder / "carrier.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{folder}: this node is running already") from None
        yield
    finally:
        os.close(handle)
