# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Another user of the same machine, who tries what Flower's ports offer.

With an address and the text of a certificate, which is empty for plain HTTP, it prints
the status of each call as JSON. It imports nothing of ours: user nobody can run it.
"""

import http.client
import json
import os
import ssl
import subprocess
import sys
from pathlib import Path

CALLS = {
    "start a run": "/v1/control/start-run",
    "list runs": "/v1/control/list-runs",
    "register a key": "/v1/control/register-node",
    "take a task": "/v1/runtime/acquire-task",
    "pull messages": "/v1/runtime/pull-messages",
    "answer": "/v1/runtime/push-messages",
    "read the description": "/docs",
}
NOBODY = 65534


def may_become_nobody() -> bool:
    return os.geteuid() == 0


def as_nobody(address: object, ca: Path | None) -> dict[str, int]:
    """What user nobody gets for each call."""
    program = Path(__file__).read_text()
    trusted = ca.read_text() if ca else ""
    done = subprocess.run(
        ["/usr/bin/env", "python3", "-I", "-c", program, str(address), trusted],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def tried(address: str, trusted: str) -> dict[str, int]:
    host, _, port = address.rpartition(":")
    found = {}
    for name, path in CALLS.items():
        if trusted:
            context = ssl.create_default_context(cadata=trusted)
            connection = http.client.HTTPSConnection(host, int(port), context=context)
        else:
            connection = http.client.HTTPConnection(host, int(port))
        headers = {
            "content-type": "application/protobuf",
            # A program that believes this header takes the call for its own.
            "x-forwarded-for": "127.0.0.1",
        }
        method = "GET" if path == "/docs" else "POST"
        connection.request(method, path, body=b"", headers=headers)
        found[name] = connection.getresponse().status
        connection.close()
    return found


if __name__ == "__main__" and len(sys.argv) == 3:
    print(json.dumps(tried(*sys.argv[1:])))
