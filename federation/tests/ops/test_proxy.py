# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The proxy's configuration, in a real nginx before a stand-in for the link."""

import contextlib
import http.client
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_stub import serving

from fedblend_federation.ops.credentials import HOME

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not here")
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@pytest.fixture(scope="module")
def proxied(tmp_path_factory, lab) -> Iterator[tuple[int, list[tuple[str, str]]]]:
    """The port of a proxy, and what came through it."""
    folder = tmp_path_factory.mktemp("proxy")
    came: list[tuple[str, str]] = []

    def answer(method: str, path: str) -> int:
        came.append((method, path))
        return 200

    with serving(answer, lab / "server") as link, _nginx(folder, lab, link) as port:
        yield port, came


@contextlib.contextmanager
def _nginx(folder: Path, lab: Path, link: int) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = (lab / "server" / "nginx.conf").read_text()
    for old, new in (
        (str(HOME / "server"), str(lab / "server")),
        ("127.0.0.1:8000", f"127.0.0.1:{link}"),
        ("listen 8443 ssl", f"listen 127.0.0.1:{port} ssl"),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "site.conf").write_text(text)
    places = "".join(f"{name}_temp_path {folder}/{name};\n" for name in TEMPORARY)
    user = "user root;\n" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        f"{user}daemon off;\npid {folder}/pid;\nevents {{ }}\n"
        f"http {{\naccess_log off;\n{places}include {folder}/site.conf;\n}}\n"
    )
    command = [str(NGINX), "-p", folder, "-c", folder / "nginx.conf"]
    process = subprocess.Popen([*command, "-e", folder / "errors"])
    try:
        for _ in range(100):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            assert process.poll() is None, (folder / "errors").read_text()
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait()


def ask(lab, port, method, path, body=None) -> int:
    context = ssl.create_default_context(cafile=str(lab / "ca" / "ca.crt"))
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context)
    with contextlib.closing(connection):
        connection.putrequest(method, path)
        connection.putheader("Content-Length", str(len(body or b"")))
        connection.endheaders()
        with contextlib.suppress(OSError):  # a refused body is not read to its end
            connection.send(body or b"")
        return connection.getresponse().status


@pytest.mark.parametrize("call", ["pull-messages", "push-object", "activate-node"])
def test_nodes_come_through(proxied, lab, call):
    port, came = proxied
    came.clear()
    assert ask(lab, port, "POST", f"/v1/fleet/{call}", b"message") == 200
    assert came == [("POST", f"/v1/fleet/{call}")]


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/docs",
        "/openapi.json",
        "/health",
        "/v1/fleet",
        "/v1/fleet/",
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
        "//v1//control/start-run",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet%2f..%2fcontrol/start-run",
        "/V1/FLEET/x",
        "/v1/fleet/a/b",
    ],
)
def test_nothing_else_does(proxied, lab, method, path):
    port, came = proxied
    came.clear()
    assert ask(lab, port, method, path) == 403
    assert came == []


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/../fleet/pull-messages",
        "/v1/control/start-run%3f/../../fleet/pull-messages",
        "/v1/fleet/pull-messages%0a",
        "/v1/fleet/pull-messages?/../../control/start-run",
    ],
)
def test_a_path_means_the_same_behind_the_proxy(proxied, lab, path):
    port, came = proxied
    came.clear()
    assert ask(lab, port, "POST", path) == 200
    assert came == [("POST", "/v1/fleet/pull-messages")]


def test_only_calls_that_nodes_make(proxied, lab):
    port, came = proxied
    came.clear()
    for method in ("GET", "PUT", "DELETE"):
        assert ask(lab, port, method, "/v1/fleet/pull-messages") == 403
    assert came == []


def test_a_large_body_is_refused(proxied, lab):
    port, came = proxied
    came.clear()
    assert ask(lab, port, "POST", "/v1/fleet/push-object", bytes(65 << 20)) == 413
    assert came == []
    assert ask(lab, port, "POST", "/v1/fleet/push-object", bytes(6 << 20)) == 200


def test_plain_http_is_not_forwarded(proxied):
    port, came = proxied
    came.clear()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/fleet/pull-messages")
        assert connection.getresponse().status == 400
    assert came == []


def test_many_requests_at_once_are_slowed(proxied, lab):
    """50 a second, and 200 more at once."""
    port, _ = proxied
    context = ssl.create_default_context(cafile=str(lab / "ca" / "ca.crt"))
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context)
    said, begin = [], time.monotonic()
    with contextlib.closing(connection):
        while len(said) <= 201 + 50 * (time.monotonic() - begin):
            connection.request("POST", "/v1/fleet/pull-messages")
            answer = connection.getresponse()
            answer.read()
            said.append(answer.status)
            if time.monotonic() - begin > 3:
                pytest.skip("this machine is too slow to be too fast")
    assert said[0] == 200
    assert set(said) == {200, 429}
