# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A small web server on loopback that stands in for others."""

import contextlib
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@contextlib.contextmanager
def serving(
    answer: Callable[[str, str], int],
    certified: Path | None = None,
    host: str = "127.0.0.1",
    date: str | None = None,
) -> Iterator[int]:
    """Answer requests with the status that ``answer(method, path)`` says.

    ``date`` is what the responses say of the time, without it the time that it is.

    ``certified`` is a folder with server.crt and server.key; plain HTTP without one.
    The port is handed out.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(answer(self.command, self.path))
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

        def date_time_string(self, timestamp: float | None = None) -> str:
            return date or super().date_time_string(timestamp)

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """A handshake that fails is the test's business."""

    server = Server((host, 0), Handler)
    if certified is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certified / "server.crt", certified / "server.key")
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
