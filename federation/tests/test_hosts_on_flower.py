# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A federation over a network: every node a host of its own, the shipped nginx before
the link, and one host cut off for two rounds.

Minutes; needs root, ip and nginx. ``pytest -n 0 -m slow tests/federation/test_hosts*``
"""

import subprocess
import time

import numpy as np
import pytest
from configured import POLICY, apfl_on_nodes, write_rows
from hosts import SERVER, Hosts, hosts, possible
from replay import absences, models, replayed

from fedblend_federation.server.checkpoint import read_progress

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not possible(), reason="no network namespaces here"),
]
NAMES = ("alice", "bob", "carol")
ROUNDS, CUT, AWAY = 8, 2, 1
"""Node ``AWAY`` is cut off when ``CUT`` rounds are counted, for two rounds."""
CONFIG = (
    apfl_on_nodes("hosts", len(NAMES), ROUNDS)
    + """[federation]
deadline = {deadline}
resend = 20.0
quorum = 0.6
"""
)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    place = write_rows(tmp_path_factory.mktemp("rows"))
    rows = {
        name: dict(np.load(place / f"rows{client}.npz"))
        for client, name in enumerate(NAMES)
    }
    with hosts(tmp_path_factory.mktemp("hosts") / "lab", rows, POLICY) as made:
        yield made


def run(made: Hosts, place, deadline: float) -> tuple[subprocess.Popen, list]:
    """The experiment, begun on the server's host."""
    file = place / "trial.toml"
    file.write_text(CONFIG.format(deadline=deadline))
    settings = made.folder / "server" / "server.toml"
    where = ["--server", settings, "--out", place / "out"]
    command = made.fedblend(SERVER, "run", file, *where)
    return subprocess.Popen(command), [made.home(name) for name in NAMES]


def until_round(out, number: int, within: float = 600.0) -> None:
    begun = time.monotonic()
    while read_progress(out / "server")[0] < number:
        assert time.monotonic() - begun < within
        time.sleep(0.1)


def test_nobody_is_missed_while_all_are_there(federation, tmp_path):
    process, homes = run(federation, tmp_path, 300.0)
    assert process.wait(900) == 0
    out = tmp_path / "out"
    assert absences(out) == {number: {} for number in range(ROUNDS)}
    assert models(out, homes) == replayed(out, homes, {}, tmp_path / "again")


def test_a_host_that_is_cut_off_is_missed_and_comes_back(federation, tmp_path):
    process, homes = run(federation, tmp_path, 60.0)
    out, name = tmp_path / "out", NAMES[AWAY]
    until_round(out, CUT)
    federation.cut_off(name)
    until_round(out, CUT + 2)
    federation.cut_off(name, False)
    assert process.wait(900) == 0
    away = absences(out)
    missed = [number for number, clients in away.items() if clients]
    print(f"missed in rounds {missed}")
    assert missed[:2] == [CUT, CUT + 1]
    assert missed[-1] < ROUNDS - 1
    assert all(set(away[number]) == {AWAY} for number in missed)
    assert models(out, homes) == replayed(out, homes, away, tmp_path / "again")


def test_hosts_reach_the_proxy_and_nothing_else(federation):
    """A node sees the fleet's calls at the proxy; no link, no way out."""
    reach = "import socket, sys; socket.create_connection((sys.argv[1], {}), 3)"

    def reached(host: str, port: int) -> bool:
        command = ["python3", "-c", reach.format(port), host]
        inside = federation.inside(NAMES[0], command)
        return subprocess.run(inside, capture_output=True).returncode == 0

    server = "10.77.0.1"
    assert reached(server, 8443)
    assert not reached(server, 8000)
    assert not reached("10.77.0.3", 8443)
    settings = federation.home(NAMES[0]) / "node.toml"
    said = subprocess.run(
        federation.fedblend(NAMES[0], "doctor", settings), capture_output=True
    )
    assert said.returncode == 0, said.stdout
