# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A link that dies while an experiment is submitted to it is waited for."""

from types import SimpleNamespace

import pytest

from fedblend.deploy.ops import flwr_processes
from fedblend.deploy.ops import submit as submit_module
from fedblend.deploy.ops.settings import ServerSettings, load_as
from fedblend.errors import RunError


@pytest.fixture
def link(own, monkeypatch):
    """A link of which is known whether it is up, and how often it was asked."""
    found = SimpleNamespace(up=True, asked=0, back=3, wrong=flwr_processes.UNREACHABLE)

    def submit(settings, folder):
        found.asked += 1
        found.up = found.asked >= found.back
        if not found.up:
            raise RunError(f"flwr run: {found.wrong}")
        (folder / "summary.json").write_text("{}")
        return "7"

    monkeypatch.setattr(flwr_processes, "connect", lambda settings: None)
    monkeypatch.setattr(flwr_processes, "submit", submit)
    monkeypatch.setattr(flwr_processes, "RESTART_AFTER", 0.0)
    monkeypatch.setattr(submit_module, "is_up", lambda settings: found.up)
    monkeypatch.setattr(submit_module, "INTERVAL", 0.0)
    found.settings = load_as(ServerSettings, own / "server" / "server.toml")
    return found


def test_the_experiment_is_submitted_when_it_is_back(link, tmp_path):
    lines = []
    submit_module.run_experiment(link.settings, tmp_path, log=lines.append)
    assert link.asked == 3
    assert lines[:2] == ["the link does not respond; trying again"] * 2
    assert submit_module.run_id(tmp_path) == "7"


def test_one_that_was_never_there_is_not_waited_for(link, tmp_path):
    link.up = False
    with pytest.raises(RunError, match="unavailable"):
        submit_module.run_experiment(link.settings, tmp_path)
    assert link.asked == 1


def test_one_that_stays_away_is_waited_for_no_longer(link, tmp_path, monkeypatch):
    monkeypatch.setattr(submit_module, "LINK_RETURNS", 0.05)
    link.back = 10**9
    with pytest.raises(RunError, match="unavailable"):
        submit_module.run_experiment(link.settings, tmp_path)
    assert link.asked > 1


def test_what_a_link_refuses_is_not_asked_again(link, tmp_path, monkeypatch):
    link.wrong = "this app is too large"
    monkeypatch.setattr(submit_module, "is_up", lambda settings: True)
    with pytest.raises(RunError, match="too large"):
        submit_module.run_experiment(link.settings, tmp_path)
    assert link.asked == 1
