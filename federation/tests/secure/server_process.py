# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A server in a process of its own, whose nodes are in the process that started it.

``python server_process.py SOCKET FOLDER secure|plain``. Messages travel as they are,
after the number of a node. At the end the server waits until it is looked at.
"""

import os
import sys
from collections.abc import Mapping
from multiprocessing.connection import Client, Connection
from pathlib import Path

from federations import CLIENTS, SecureFederation

from fedblend_federation.transport import Reply, Timeouts

WAITING = Timeouts(deadline=600.0, resend=300.0, poll=0.01, absence=1.0)
ROUNDS = 2


class PipeTransport:
    """Nodes at the other end of a connection."""

    def __init__(self, connection: Connection):
        self.connection, self.gone = connection, set[int]()

    def addresses(self) -> list[int]:
        return [at for at in range(1000, 1000 + CLIENTS) if at not in self.gone]

    def send(self, outgoing: Mapping[int, bytes]) -> None:
        for address, data in outgoing.items():
            self.connection.send_bytes(address.to_bytes(8, "little") + data)

    def receive(self) -> list[Reply]:
        found = []
        while self.connection.poll():
            data = self.connection.recv_bytes()
            address = int.from_bytes(data[:8], "little")
            if len(data) == 8:  # it has lost its connection
                self.gone.add(address)
            else:
                found.append(Reply(address, data[8:]))
        return found


def federation(folder: Path, kind: str) -> SecureFederation:
    """Both processes make the same one, each for its half."""
    secure = {} if kind == "secure" else None
    return SecureFederation(
        folder, rounds=ROUNDS, timeouts=WAITING, quorum=0.5, secure=secure
    )


def main() -> None:
    """Run all rounds."""
    path, folder, kind = sys.argv[1:]
    connection = Client(path, family="AF_UNIX")
    made = federation(Path(folder), kind)
    made.transport = PipeTransport(connection)  # pyright: ignore
    made.run()
    connection.send_bytes(b"")
    connection.recv_bytes()
    os._exit(0)


if __name__ == "__main__":
    main()
