# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The socket of a warm process: in deep folders, too, and for nobody else."""

import threading

import pytest

from fedblend.runtime.flower import warm


@pytest.fixture
def answering(tmp_path):
    """A process, or here a thread, behind a socket whose path is a long one."""
    path = tmp_path / ("deep" * 20) / ("folder" * 10) / "door"
    ready = threading.Event()
    settings = {"longest": lambda: 100, "ready": ready.set}
    threading.Thread(
        target=warm.serve, args=(path, bytes.upper), kwargs=settings, daemon=True
    ).start()
    assert ready.wait(5)
    return path


def test_letters_are_answered(answering):
    assert len(str(answering)) > 150
    assert [warm.ask(answering, word) for word in (b"one", b"two")] == [b"ONE", b"TWO"]


def test_what_cannot_be_asked_is_said(answering, tmp_path):
    with pytest.raises(warm.SocketError, match=r"closed|reset|Broken pipe"):
        warm.ask(answering, b"x" * 101)
    assert warm.ask(answering, b"still there") == b"STILL THERE"
    with pytest.raises(warm.SocketError, match=r"nobody: No such file"):
        warm.ask(tmp_path / "nobody", b"x")
    answering.chmod(0o666)
    with pytest.raises(warm.SocketError, match=r"only its owner"):
        warm.ask(answering, b"x")
