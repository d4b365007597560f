# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Two sums whose difference would be one client's answer are not both opened."""

from pathlib import Path

import pytest
from federations import CLIENTS, SecureFederation
from test_lying_server import EVERYBODY, VICTIM, Lied, refused
from trials import clock

from fedblend_federation.client import state
from fedblend_federation.client.executor import Executor
from fedblend_federation.client.ledger import SUMS, Ledger, read_ledger
from fedblend_federation.message import UNKNOWN
from fedblend_federation.secure.session import MAX_ATTEMPTS
from fedblend_federation.server.settings import BelowQuorum

_ = clock


def experiment(
    folder: Path, monkeypatch, name: str, gone=None, **rules
) -> SecureFederation:
    """One of several experiments on the same nodes, from the same first model."""
    monkeypatch.setattr("loopback.EXPERIMENT", name)
    rules = {"rounds": 1, "quorum": 0.5, **rules}
    federation = SecureFederation(folder, gone=gone, **rules)
    server = federation.server()
    server.collector.folder = folder / f"server {name}"  # pyright: ignore
    while server.round < 1:
        server.step()
    return federation


@pytest.mark.parametrize("stage", ["share", "round"])
def test_a_model_is_not_summed_over_all_clients_but_one(stage, tmp_path, monkeypatch):
    """The difference of two sums of one model was the update of one client."""
    experiment(tmp_path, monkeypatch, "first")
    line = "differs by 1 clients or by weights; allowed: the same sum again, or one"
    with pytest.raises(BelowQuorum, match=line):
        experiment(tmp_path, monkeypatch, "second", {(stage, 0): {VICTIM}})


def test_the_same_cohort_and_a_far_one_are_allowed(tmp_path, monkeypatch):
    experiment(tmp_path, monkeypatch, "first")
    experiment(tmp_path, monkeypatch, "again")
    experiment(tmp_path, monkeypatch, "far", cohort=5)
    ledger = read_ledger(tmp_path / f"node{VICTIM}")
    assert set(ledger.opened) >= {"first", "again"}


def test_the_same_cohort_with_other_weights_is_refused(tmp_path, monkeypatch):
    """One client weighs half in one sum and all in the other: it is the difference."""
    experiment(tmp_path, monkeypatch, "first")
    with pytest.raises(BelowQuorum, match="differs by 0 clients or by weights"):
        experiment(tmp_path, monkeypatch, "second", weight_ratio=1.0)


def test_a_sum_that_all_refuse_to_open_is_tried_again(tmp_path, monkeypatch):
    """When the client that was gone is back, its cohort is the one of before."""
    experiment(tmp_path, monkeypatch, "first")
    gone = {("round", 0): {VICTIM}}
    monkeypatch.setattr("loopback.EXPERIMENT", "second")
    federation = SecureFederation(tmp_path, gone=gone, rounds=1, quorum=0.5)
    federation.folder = tmp_path / "second"  # of its server
    with pytest.raises(BelowQuorum, match="the sum is not open yet"):
        federation.complete(federation.server())
    federation.transport.gone = {}
    assert federation.complete(federation.server()).round == 1


def test_batches_are_those_of_an_experiment_and_a_cohort(tmp_path, monkeypatch):
    """The same batch in two sums is the same answer of all whom both are of."""
    names: dict[int, list[str]] = {}

    def salted(executor, name):
        names.setdefault(executor.setup.client, []).append(name)
        return executor

    monkeypatch.setattr(Executor, "request_executor", salted)
    seen = []
    for name, rules in (("one", {}), ("two", {}), ("three", {"cohort": 5})):
        names.clear()
        federation = experiment(tmp_path, monkeypatch, name, **rules)
        sent = [kind for kind, _ in federation.transport.kinds]
        members = [c for c in EVERYBODY if len(names.get(c, [])) > 2]
        assert "round" in sent and members
        seen.append({c: set(names[c]) for c in members})
    for client in seen[2]:
        one, two, three = (found[client] for found in seen)
        assert not one & two and not one & three and not two & three


def test_what_is_remembered_is_bounded():
    ledger, all = Ledger(), list(range(CLIENTS))
    for number in range(SUMS + 10):
        ledger.enter_sum("trial", number, str(number), "uniform 1.0", all)
    assert len(ledger.sums) == SUMS and ledger.opened == {"trial": SUMS + 9}
    assert ledger.nearest(str(SUMS), "uniform 1.0", all[:-1]) == 1
    assert ledger.nearest("0", "uniform 1.0", all[:-1]) == float("inf")


@pytest.mark.parametrize("lose", [state.end_experiment, state.remove_experiment])
def test_what_was_opened_is_kept_for_good(lose, tmp_path):
    """Stopped, pushed off the disk by another experiment, enrolled again."""
    lied = Lied(tmp_path)
    assert lied.ask("unmask").kind == "unmask"
    place = lied.federation.folder / f"node{VICTIM}" / "trial"
    (place / state.MODEL).write_bytes(b"")
    lose(place)
    assert not (place / "opened-1").exists()
    assert lied.ask("enroll", round=UNKNOWN).kind == "enroll"
    for attempt in (0, 1, MAX_ATTEMPTS - 1):
        for round in (0, 1):
            for kind in ("share", "round", "unmask"):
                reason = refused(lied.ask(kind, round=round, attempt=attempt))
                assert "a sum of round 1 was opened" in reason
