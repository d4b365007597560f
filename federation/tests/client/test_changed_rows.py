# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Rows that change under an experiment, and the audits of both sides."""

import numpy as np
import pytest
from configured import POLICY, experiment, federated, method, nodes, write_rows

from fedblend.cli import main
from fedblend.errors import RunError
from fedblend_federation.ops.audit import AuditError, entries, heads_told, verify
from fedblend_federation.server.run import run_server
from loopback import LoopbackTransport

AGREED = POLICY.replace('changes = ["', 'changes = ["rows", "')


def run(folder, policy, change):
    """Run three rounds on nodes; the rows of client 1 change after the first."""
    write_rows(folder)
    text = method("fedavg", folder, rounds=3) + "[measure]\nlocal = false\n"
    place = experiment(folder / "run", federated(text))
    transport = LoopbackTransport(nodes(folder, folder, policy))

    def after_the_first(round: int, rounds: int) -> None:
        if round == 1:
            change(folder / "rows1.npz")

    return run_server(place, transport, poll=0.0, on_step=after_the_first)


def other_rows(file) -> None:
    stored = dict(np.load(file))
    stored["inputs"][3, 2] += 1.0
    np.savez(file, **stored)


def same_rows(file) -> None:
    np.savez(file, **np.load(file))


def noted(path, event: str) -> list[dict]:
    return [one["fields"] for one in entries(path) if one and one["event"] == event]


def test_changed_rows_are_refused_and_both_audits_say_so(tmp_path):
    with pytest.raises(RunError, match=r"client 1 refused: policy rows\.changes"):
        run(tmp_path, POLICY, other_rows)
    (at_node,) = noted(tmp_path / "node1/state/audit.jsonl", "refused")
    (at_server,) = noted(tmp_path / "run/audit.jsonl", "refused")
    assert at_node["reason"] == at_server["reason"]
    assert "changed under the experiment" in at_node["reason"]
    assert at_server["client"] == 1


def test_the_operator_may_agree_and_both_audits_say_so(tmp_path):
    run(tmp_path, AGREED, other_rows)
    (at_node,) = noted(tmp_path / "node1/state/audit.jsonl", "rows changed")
    (at_server,) = noted(tmp_path / "run/audit.jsonl", "rows changed")
    assert len(at_node["sha256"]) == 64
    assert at_server == {"client": 1}


def test_a_file_that_is_written_again_with_the_same_rows_changes_nothing(tmp_path):
    run(tmp_path, POLICY, same_rows)
    for path in ("run/audit.jsonl", "node1/state/audit.jsonl"):
        assert not noted(tmp_path / path, "rows changed")
        assert not noted(tmp_path / path, "refused")


def test_each_audit_shows_lines_that_the_other_lost(tmp_path, capsys):
    run(tmp_path, POLICY, same_rows)
    server, node = tmp_path / "run/audit.jsonl", tmp_path / "node1/state/audit.jsonl"
    both = ((server, node, None), (node, server, 1))
    for whole, other, client in both:
        words = ["federation", "audit", str(whole), "--against", str(other)]
        words += [] if client is None else ["--client", str(client)]
        assert main(words) == 0
        assert "hashes of the other side found" in capsys.readouterr().out
        told = heads_told(other, client)
        lines = whole.read_bytes().splitlines(keepends=True)
        cut = tmp_path / "cut.jsonl"
        cut.write_bytes(b"".join(lines[: len(lines) // 2]))
        verify(cut)
        with pytest.raises(AuditError, match="lines were cut off"):
            verify(cut, told)
