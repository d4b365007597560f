# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The report of a run while it goes on, served to this machine's user alone.

The server listens on 127.0.0.1 at a free port. Its address holds a secret, since other
users of the machine reach that port too; whoever does not know it gets 404. A request
that names another host than this one gets 403: a site whose name was made to point here
(DNS rebinding) is refused. Nothing but the page and its content can be read, and
nothing can be changed.
"""

import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedblend.errors import RunError
from fedblend.report.page.content import page_content
from fedblend.report.page.document import document
from fedblend.runs.run_folder import Folder

HOST = "127.0.0.1"
WAITING = 3.0
"""Seconds that an open page has to fetch the last content when a run ends."""
RECENT = 5.0
"""Seconds after which a page that asks no more counts as closed."""
MOST_CONNECTIONS = 32
"""Connections at once. Every user of the machine can open some, and a run whose
process has no file descriptors left cannot write its results."""
PATIENCE = 10.0
"""Seconds after which a connection is closed, whatever it sends or reads."""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class LivePage:
    """The address and content of a page about a run folder that is being written."""

    def __init__(self, folder: Path, name: str):
        self.folder = folder
        self.name = name
        self.token = secrets.token_urlsafe(24)
        self.port = 0
        self._lock = threading.Lock()
        self._known: tuple[str, dict[str, Any]] = ("", {})
        self._asked = 0.0
        self._fetched = ""

    @property
    def url(self) -> str:
        """The address, with its secret."""
        return f"http://{HOST}:{self.port}/{self.token}/"

    def version(self) -> str:
        """A text that changes whenever a file of the run does."""
        run = Folder(self.folder)
        files = (run.config, run.metrics, run.summary)
        return "-".join(str(_changed(path)) for path in files)

    def content(self) -> tuple[str, dict[str, Any]]:
        """The version and the content; of before where files cannot be read now."""
        version = self.version()
        with self._lock:
            if version != self._known[0]:
                try:
                    finished = Folder(self.folder).summary.is_file()
                    content = page_content([self.folder], live=not finished)
                    self._known = version, content
                except (RunError, OSError):
                    if not self._known[1]:
                        return "", self._nothing_yet()
            return self._known

    def _nothing_yet(self) -> dict[str, Any]:
        lines = ["The run is starting: nothing has been measured yet."]
        begun = {"title": self.name, "live": True, "tone": "open", "verdict": lines}
        return {**begun, "status": [], "runs": []}

    def answer(self, target: str) -> tuple[int, str, bytes]:
        """Status, type and body for the target of a request."""
        parts = urlsplit(target)
        first, _, rest = parts.path.removeprefix("/").partition("/")
        if not secrets.compare_digest(first.encode(), self.token.encode()):
            return 404, "text/plain", b"not found"
        if rest == "":
            page = document(self.content()[1])
            return 200, "text/html; charset=utf-8", page.encode()
        if rest != "content":
            return 404, "text/plain", b"not found"
        version, content = self.content()
        self._asked, self._fetched = time.monotonic(), version
        if version == parse_qs(parts.query).get("after", [""])[0]:
            return 204, "application/json", b""
        body = json.dumps({"version": version, "content": content}, allow_nan=False)
        return 200, "application/json", body.encode()

    def wait_for_reader(self) -> None:
        """Wait until an open page has the last content, but not long."""
        end = time.monotonic() + WAITING
        while (
            time.monotonic() < end
            and time.monotonic() - self._asked < RECENT
            and self._fetched != self.version()
        ):
            time.sleep(0.05)


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _handler(page: LivePage) -> type[BaseHTTPRequestHandler]:
    class PageHandler(BaseHTTPRequestHandler):
        timeout = PATIENCE
        server_version, sys_version = "fedblend", ""

        def do_GET(self) -> None:
            hosts = [f"{name}:{page.port}" for name in (HOST, "localhost")]
            if self.headers.get("Host") not in hosts:
                status, kind, body = 403, "text/plain", b"forbidden"
            else:
                status, kind, body = page.answer(self.path)
            self.send_response(status)
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *of: Any) -> None:
            del of

    return PageHandler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 2 * MOST_CONNECTIONS

    def __init__(self, handler: type[BaseHTTPRequestHandler]):
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((HOST, 0), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, or not at all where there are too many."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one request, within the time that it has."""
        end = threading.Timer(PATIENCE, _hang_up, [request])
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._room.release()

    def handle_error(self, *of: Any) -> None:
        """A reader that goes away in the middle is no error of the run."""
        del of


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serve(folder: Path, name: str) -> Iterator[LivePage]:
    """Serve the report of a run folder while the run goes on, inside.

    Args:
        folder: of the run; it need not exist yet.
        name: of the run, shown until its folder is there.
    """
    page = LivePage(folder, name)
    server = _Server(_handler(page))
    page.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield page
        page.wait_for_reader()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
