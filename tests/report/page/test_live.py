# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The page of a run that goes on: for its user alone, and up to date."""

import contextlib
import http.client
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedblend.report.page import live
from synthetic_run import write_run


@pytest.fixture
def page(tmp_path: Path, monkeypatch) -> Iterator[live.LivePage]:
    monkeypatch.setattr(live, "WAITING", 0.1)
    with live.serve(tmp_path / "run", "first") as page:
        yield page


def asked(page: live.LivePage, path: str, host: str | None = None, method: str = "GET"):
    """Status, headers and body of an answer."""
    line = http.client.HTTPConnection(live.HOST, page.port, timeout=5)
    line.putrequest(method, path, skip_host=True)
    line.putheader("Host", f"{live.HOST}:{page.port}" if host is None else host)
    line.endheaders()
    answer = line.getresponse()
    found = answer.status, dict(answer.headers), answer.read()
    line.close()
    return found


def content(page: live.LivePage, after: str = "") -> Any:
    status, _, body = asked(page, f"/{page.token}/content?after={after}")
    return json.loads(body) if status == 200 else status


def test_the_page_is_there_before_the_folder(page: live.LivePage):
    status, headers, body = asked(page, f"/{page.token}/")
    assert status == 200 and b"The run is starting" in body
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers


def test_content_follows_the_run_until_it_is_finished(page, tmp_path: Path):
    write_run(tmp_path / "run", finished=False)
    first = content(page)
    assert first["content"]["live"]
    assert content(page, first["version"]) == 204
    shutil.rmtree(tmp_path / "run")
    write_run(tmp_path / "run")
    last = content(page, first["version"])
    assert not last["content"]["live"] and last["content"]["runs"][0]["finished"]


@pytest.mark.parametrize(
    "path", ["/", "/content", "/{wrong}/", "/{token}", "/{token}/x"]
)
def test_who_does_not_know_the_secret_finds_nothing(page: live.LivePage, path: str):
    wrong = "x" * len(page.token)
    status, _, body = asked(page, path.format(wrong=wrong, token=page.token))
    if path == "/{token}":  # the secret alone is the page too
        assert status == 200
    else:
        assert (status, body) == (404, b"not found")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "", "127.0.0.1"]
)
def test_another_host_is_refused_even_with_the_secret(page: live.LivePage, host: str):
    status, _, body = asked(page, f"/{page.token}/", host.format(port=page.port))
    assert (status, body) == (403, b"forbidden")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_but_reading_is_answered(page: live.LivePage, method: str):
    assert asked(page, f"/{page.token}/", method=method)[0] == 501


def test_every_run_has_a_secret_of_its_own(tmp_path: Path):
    with live.serve(tmp_path, "a") as one, live.serve(tmp_path, "b") as other:
        assert one.token != other.token and len(one.token) >= 32
        assert one.port != other.port


def test_the_server_ends_with_the_run(tmp_path: Path):
    with live.serve(tmp_path, "a") as page:
        assert asked(page, f"/{page.token}/")[0] == 200
    with pytest.raises(ConnectionRefusedError):
        asked(page, f"/{page.token}/")


def test_half_written_files_leave_the_content_of_before(page, tmp_path: Path):
    folder = write_run(tmp_path / "run", finished=False)
    first = content(page)
    folder.metrics.write_text('{"round": ')
    assert content(page, first["version"]) == 204
    assert content(page)["version"] == first["version"]


def test_connections_of_others_are_few_and_end(page: live.LivePage, monkeypatch):
    """Every user of the machine may connect; the run needs its file descriptors."""
    monkeypatch.setattr(live, "PATIENCE", 1.0)
    before = threading.active_count()
    with contextlib.ExitStack() as lines:
        silent = [
            lines.enter_context(socket.create_connection((live.HOST, page.port), 5))
            for _ in range(live.MOST_CONNECTIONS + 20)
        ]
        assert silent[-1].recv(1) == b""  # closed at once, while the first are open
        silent[0].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[0].recv(1)
        silent[0].setblocking(True)
        # A thread and its clock for each connection.
        assert threading.active_count() - before <= 2 * live.MOST_CONNECTIONS
        for line in silent[: live.MOST_CONNECTIONS]:  # the others, by their clock
            assert line.recv(1) == b""
        end = time.monotonic() + 5
        while threading.active_count() > before and time.monotonic() < end:
            time.sleep(0.02)
        assert asked(page, f"/{page.token}/")[0] == 200
