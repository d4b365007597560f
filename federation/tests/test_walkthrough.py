# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/federation.md, as a new user types them."""

import pytest
from walkthrough import HOME, ROUNDS, NewUser, commands

from fedblend.config.config import load
from fedblend_federation.client.node import answering
from fedblend_federation.ops import experiments
from fedblend_federation.ops.settings import NodeSettings, ServerSettings, load_as
from fedblend_federation.server.run import run_server
from loopback import LoopbackTransport

NODES = ("alice", "bob", "carol")


def test_a_first_result_takes_at_most_twelve_commands():
    typed = commands()
    assert len(typed) <= 12
    assert typed[0].startswith("pipx install")
    assert typed[-1].endswith(f"fedblend federation run {HOME}/server/trial.toml")
    assert sum(command.startswith("sh ") for command in typed) == 1 + len(NODES)


@pytest.fixture
def user(tmp_path) -> NewUser:
    """A user who has typed all commands but the last, with nothing started."""
    user = NewUser(tmp_path, port=8443)
    for command in commands()[:-1]:
        done = user.run(command)
        assert done is None or (done.returncode, done.stderr) == (0, ""), command
    return user


@pytest.mark.slow
def test_what_the_scripts_set_up_gets_to_a_first_result(user, tmp_path):
    home, out = user.home("server"), tmp_path / "trial"
    config = load(home / "trial.toml")
    settings = load_as(ServerSettings, home / "server.toml")
    experiments.open_folder(out, config, settings, resume=False)
    nodes = {
        at: answering(load_as(NodeSettings, user.home(n) / "node.toml"))
        for at, n in enumerate(NODES)
    }
    summary = run_server(out, LoopbackTransport(nodes), poll=0.0)
    (found,) = summary["runs"]
    assert found["round"] == ROUNDS
    assert found["measures"]["test"]["personal"]["accuracy"]["clients"] == len(NODES)
    assert found["rejected"] == found["dropped"] == 0
