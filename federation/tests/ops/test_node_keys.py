# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Keys that nodes make for themselves, and the roster of their public halves."""

import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from fedblend.cli import main
from fedblend_federation.ops import doctor
from fedblend_federation.ops.provision import provision
from fedblend_federation.ops.settings import NodeSettings, ServerSettings, load_as
from fedblend_federation.secure.roster import keys_of
from fedblend_federation.secure.session import public_key

NAMES = ["alice", "bob"]


class Machines:
    """A folder of init, and one for each machine, which has its files and no others."""

    def __init__(self, folder: Path, capsys, **more):
        self.lab, self.capsys = folder / "lab", capsys
        provision(self.lab, host="127.0.0.1", nodes=NAMES, **more)
        self.server = shutil.copytree(self.lab / "server", folder / "server")
        homes = {name: self.lab / "nodes" / name for name in NAMES}
        self.homes = {
            name: shutil.copytree(home, folder / name) for name, home in homes.items()
        }

    def says(self, *words: object, code: int = 0) -> str:
        assert main(["federation", *map(str, words)]) == code
        said = self.capsys.readouterr()
        assert said.err.count("\n") == (code != 0)
        return said.err if code else said.out

    def keys(self, name: str, code: int = 0) -> str:
        return self.says("keys", self.homes[name] / "node.toml", code=code)

    def collect(self, *names: str, code: int = 0) -> str:
        files = [self.homes[name] / "public.toml" for name in names]
        return self.says("roster", self.server / "server.toml", *files, code=code)

    def hand_out(self) -> None:
        for home in self.homes.values():
            shutil.copy(self.server / "roster.toml", home)


@pytest.fixture
def machines(tmp_path, capsys) -> Machines:
    return Machines(tmp_path, capsys)


def prints(said: str) -> list[str]:
    return re.findall(r"(?:[0-9a-f]{4} ){7}[0-9a-f]{4}", said)


def test_init_holds_no_key_of_a_node(machines):
    found = {
        str(path.relative_to(machines.lab)) for path in machines.lab.rglob("*.key")
    }
    assert found == {"ca/ca.key", "server/server.key"}
    assert not list(machines.lab.rglob("*.pub"))
    assert not list(machines.lab.rglob("roster.toml"))


def test_from_keys_on_the_nodes_to_a_roster(machines):
    own = {name: prints(machines.keys(name))[0] for name in NAMES}
    assert own["alice"] != own["bob"]
    said = machines.collect(*NAMES)
    # The same ones at the server and on all nodes, which is what people compare.
    assert prints(said) == [own["alice"], own["bob"]]
    machines.hand_out()
    for name, home in machines.homes.items():
        said = machines.keys(name)
        assert said.startswith("made no key; all were there; hand over ")
        assert prints(said) == [own[name], own["alice"], own["bob"]]
        for path in home.glob("*.key"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        (settings,) = (
            load_as(NodeSettings, home / "node.toml").client_settings().values()
        )
        found = keys_of(settings)
        assert found.names == {0: "alice", 1: "bob"}
        assert found.public[settings.client] == public_key(found.private)
    for node in load_as(ServerSettings, machines.server / "server.toml").nodes:
        assert node.key.read_text().endswith(f" {node.name}\n")


def test_the_key_of_a_node_has_the_fingerprint_of_openssh(machines):
    program = shutil.which("ssh-keygen")
    if program is None:
        pytest.skip("ssh-keygen is not here")
    said = machines.keys("alice")
    command = [program, "-lf", machines.homes["alice"] / "node.key"]
    shown = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    (mine,) = re.findall(r"SHA256:\S+", said)
    assert mine in shown
    assert mine in machines.collect("alice")


def test_no_key_is_overwritten(machines):
    machines.keys("alice")
    home = machines.homes["alice"]
    before = {path.name: path.read_bytes() for path in home.glob("*.key")}
    assert set(before) == {"node.key", "secure.key"}
    machines.keys("alice")
    (home / "secure.key").unlink()
    assert "made secure.key;" in machines.keys("alice")
    assert (home / "node.key").read_bytes() == before["node.key"]
    for name, line in (
        ("node", "is not a private key of Op"),
        ("secure", "is not an X255"),
    ):
        whole = (home / f"{name}.key").read_bytes()
        for part in (b"", whole[:60]):
            (home / f"{name}.key").write_bytes(part)
            assert line in machines.keys("alice", code=2)
            assert (home / f"{name}.key").read_bytes() == part
        (home / f"{name}.key").write_bytes(whole)


def test_a_roster_grows_and_keeps_what_it_has(machines):
    machines.keys("alice")
    assert "; missing: bob\n" in machines.collect("alice")
    machines.keys("bob")
    assert len(prints(machines.collect("bob"))) == 2
    before = (machines.server / "roster.toml").read_bytes()
    (machines.homes["bob"] / "secure.key").unlink()
    machines.keys("bob")
    line = machines.collect("bob", code=2)
    assert "roster.toml: has another key than" in line and "is not overwritten" in line
    (machines.homes["alice"] / "node.key").unlink()
    machines.keys("alice")
    assert "alice.pub: has another key than" in machines.collect("alice", code=2)
    assert (machines.server / "roster.toml").read_bytes() == before


def test_files_of_others_are_one_line(machines):
    machines.keys("alice")
    file = machines.homes["alice"] / "public.toml"
    text = file.read_text()
    for old, new, line in (
        ("client = 0", "client = 7", "client 7: is not a node of server.toml"),
        ("ecdsa-sha2", "ecdsa-sha3", "a public key of OpenSSH, ECDSA"),
        ("version = 1", "version = 2", "version"),
    ):
        file.write_text(text.replace(old, new))
        assert line in machines.collect("alice", code=2)
        assert not (machines.server / "roster.toml").exists()
    file.unlink()
    assert "public.toml: No such file" in machines.collect("alice", code=2)


def test_a_node_of_several_clients_has_one_fingerprint(tmp_path, capsys):
    machines = Machines(tmp_path, capsys, clients_per_node=3)
    own = [prints(machines.keys(name)) for name in NAMES]
    assert sorted(path.name for path in machines.homes["bob"].glob("secure-*.key")) == [
        f"secure-{client}.key" for client in (3, 4, 5)
    ]
    assert prints(machines.collect(*NAMES)) == [one for (one,) in own]


def test_a_roster_with_another_key_of_the_node_shows(machines, monkeypatch):
    """At the command that shows fingerprints, and to the doctor."""
    for name in ("link_service", "worker_service", "public_findings"):
        monkeypatch.setattr(doctor, name, lambda *given: [])

    def found(home: Path) -> list[tuple[str, bool]]:
        return [(one.what, one.fault) for one in doctor.examine(home)]

    home = machines.homes["alice"]
    assert found(home)[:2] == [("key is missing", True), ("key is missing", True)]
    for name in NAMES:
        machines.keys(name)
    assert ("roster is missing", False) in found(home)
    machines.collect(*NAMES)
    machines.hand_out()
    assert found(home) == [("rows are missing", False)]
    (home / "secure.key").unlink()
    assert "of client 0 is not that of secure.key" in machines.keys("alice", code=2)
    assert ("keys of secure sums cannot be used", True) in found(home)
