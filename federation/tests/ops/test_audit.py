# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The audit: one changed line shows, and a crash does not end it."""

import fcntl
import json
import os
import stat
import threading

import pytest

from fedblend_federation.ops.audit import (
    BEGINNING,
    LONGEST,
    Audit,
    AuditError,
    entries_since,
    verify,
)


@pytest.fixture
def audit(tmp_path):
    """Five events, and their file."""
    path = tmp_path / "audit.jsonl"
    heads = [Audit(path).append("answered", round=i, bytes=10 * i) for i in range(5)]
    return path, heads


def lines_of(path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def test_what_is_written_can_be_read(audit):
    path, heads = audit
    found = [json.loads(line) for line in lines_of(path)]
    assert [entry["fields"] for entry in found] == [
        {"round": i, "bytes": 10 * i} for i in range(5)
    ]
    assert [entry["previous"] for entry in found] == [BEGINNING, *heads[:-1]]
    assert all(set(entry) == {"time", "event", "fields", "previous", "hash"}
               for entry in found)  # fmt: skip
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert verify(path) == (5, heads[-1])


@pytest.mark.parametrize("line", range(5))
def test_any_changed_byte_shows(audit, line):
    path, _ = audit
    lines = lines_of(path)
    for place in range(0, len(lines[line]) - 1, 7):
        changed = bytearray(lines[line])
        changed[place] ^= 1
        path.write_bytes(b"".join([*lines[:line], bytes(changed), *lines[line + 1 :]]))
        with pytest.raises(AuditError, match=r"audit.jsonl: line \d"):
            verify(path)


def test_the_changed_line_is_named(audit):
    path, _ = audit
    path.write_bytes(path.read_bytes().replace(b'"bytes": 20', b'"bytes": 21'))
    with pytest.raises(AuditError, match="line 3: was changed"):
        verify(path)


@pytest.mark.parametrize("line", range(4))
def test_a_removed_line_shows(audit, line):
    path, _ = audit
    lines = lines_of(path)
    path.write_bytes(b"".join(lines[:line] + lines[line + 1 :]))
    with pytest.raises(AuditError, match=f"line {line + 1}: does not follow"):
        verify(path)


def test_swapped_or_repeated_lines_show(audit):
    path, _ = audit
    a, b, c, d, e = lines_of(path)
    for order in ([b, a, c, d, e], [a, c, b, d, e], [a, b, b, c, d, e]):
        path.write_bytes(b"".join(order))
        with pytest.raises(AuditError, match="does not follow the line before"):
            verify(path)


def test_a_changed_line_with_a_new_hash_of_its_own_shows(audit, tmp_path):
    path, _ = audit
    other = tmp_path / "other.jsonl"
    forged = Audit(other)
    for i in range(3):
        forged.append("answered", round=i, bytes=0)
    lines = lines_of(path)
    path.write_bytes(b"".join([*lines[:2], lines_of(other)[2], *lines[3:]]))
    with pytest.raises(AuditError, match="line 3: does not follow"):
        verify(path)


def test_lines_missing_at_the_end_show_against_the_head_that_was_sent(audit):
    path, heads = audit
    path.write_bytes(b"".join(lines_of(path)[:3]))
    assert verify(path) == (3, heads[2])
    assert verify(path, {heads[1]}).lines == 3
    with pytest.raises(AuditError, match="lines were cut off"):
        verify(path, {heads[4]})


@pytest.mark.parametrize("kept", [1, 50, -1])
def test_a_torn_line_is_reported_and_survived(audit, kept):
    path, heads = audit
    lines = lines_of(path)
    torn = lines[4][:kept]
    path.write_bytes(b"".join(lines[:4]) + torn)
    with pytest.raises(AuditError, match="line 5: is cut off"):
        verify(path)
    Audit(path).append("started")
    assert verify(path, {heads[3]}).lines == 6
    said = json.loads(lines_of(path)[4])
    assert said["event"] == "torn line"
    assert said["fields"]["bytes"] == len(torn)


def test_a_first_line_can_be_torn(tmp_path):
    path = tmp_path / "audit.jsonl"
    path.write_bytes(b'{"time": "20')
    Audit(path).append("started")
    assert verify(path).lines == 2


def test_nothing_is_added_to_what_was_changed(audit):
    path, _ = audit
    path.write_bytes(path.read_bytes().replace(b'"bytes": 40', b'"bytes": 41'))
    before = path.read_bytes()
    with pytest.raises(AuditError, match="its last line was changed"):
        Audit(path).append("answered")
    assert path.read_bytes() == before


def test_what_is_no_fact_does_not_fit(audit):
    path, _ = audit
    before = path.read_bytes()
    with pytest.raises(AuditError, match=f"at most {LONGEST} are allowed"):
        Audit(path).append("answered", gradient=str([0.1] * 5000))
    assert path.read_bytes() == before
    text = "ä\n\0 \x1b" * 50
    Audit(path).append("refused", why=text)
    assert json.loads(lines_of(path)[-1])["fields"]["why"] == text
    assert verify(path).lines == 6


def test_long_lines_in_a_row(tmp_path):
    path = tmp_path / "audit.jsonl"
    for _ in range(5):
        Audit(path).append("refused", why="x" * 3700)
    assert path.stat().st_size > 4 * 3700
    assert verify(path).lines == 5


def test_writers_wait_for_each_other(audit):
    path, _ = audit
    writer = threading.Thread(target=Audit(path).append, args=("answered",))
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        writer.start()
        writer.join(0.1)
        assert writer.is_alive()
        assert verify(path).lines == 5
    writer.join()
    assert verify(path).lines == 6


def test_it_is_on_disk_when_append_returns(audit, monkeypatch):
    path, _ = audit
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(path.stat().st_size),
                                                   real(file)))  # fmt: skip
    Audit(path).append("answered")
    assert synced == [path.stat().st_size]


def test_writers_in_turn_make_one_chain(tmp_path):
    path = tmp_path / "audit.jsonl"

    def write() -> None:
        for i in range(20):
            Audit(path).append("answered", round=i)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert verify(path).lines == 80


def test_who_follows_a_file_goes_on_with_a_new_one(audit):
    path, _ = audit
    found, offset = entries_since(path, 10**6)
    assert len(found) == 5 and entries_since(path, offset) == ([], offset)
