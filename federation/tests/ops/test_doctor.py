# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The doctor on files and permissions."""

import datetime
import shutil

import pytest
from edits import certify, edit, only

from fedblend.errors import ConfigError, RunError
from fedblend_federation.ops import doctor, provision
from fedblend_federation.ops.doctor import examine


@pytest.fixture
def away(monkeypatch, no_services):
    """Nothing is asked on the network."""
    monkeypatch.setattr(doctor, "public_findings", lambda address, ca: [])
    monkeypatch.setattr(doctor, "link_findings", lambda address, link: [])


def test_the_link_off_loopback(own, away):
    finding = only(edit(own / "server/server.toml", "127.0.0.1:8000", "0.0.0.0:8000"))
    assert finding.fault
    assert (finding.what, finding.value) == (
        "the link is not on loopback",
        "0.0.0.0:8000",
    )


@pytest.mark.parametrize(
    ("days", "what", "fault"),
    [
        (0, "certificate is not accepted", True),
        (29, "certificate expires soon", False),
        (31, None, None),
    ],
)
def test_the_term_of_a_certificate(own, away, days, what, fault):
    certify(own, days=days)
    file = own / "server/server.toml"
    if what is None:
        assert examine(file) == []
        return
    finding = only(file)
    assert (finding.what, finding.fault) == (what, fault)
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    assert finding.value == (f"{end:%Y-%m-%d}" if days else "certificate has expired")
    assert "fedblend federation renew" in finding.advice


def test_a_certificate_file_for_another_host(own, away):
    file = edit(own / "server/server.toml", "127.0.0.1:8443", "fl.example.org:8443")
    finding = only(file)
    assert finding.fault
    assert finding.what == "certificate is not accepted"
    assert "not valid for 'fl.example.org'" in finding.value
    certify(own, host="FL.example.org")
    assert examine(file) == []


def test_certificates_that_do_not_belong_together(own, away, tmp_path):
    provision.provision(tmp_path / "other", host="127.0.0.1", nodes=["eve"])
    shutil.copy(tmp_path / "other/server/server.crt", own / "server/server.crt")
    finding = only(own / "server/server.toml")
    assert (finding.fault, finding.value) == (True, "KEY_VALUES_MISMATCH")
    shutil.copy(tmp_path / "other/server/server.key", own / "server/server.key")
    finding = only(own / "server/server.toml")
    assert finding.fault and "certificate" in finding.value


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
@pytest.mark.parametrize("name", ["server/server.key", "nodes/bob/node.key"])
def test_keys_that_others_can_read(own, away, name, mode):
    (own / name).chmod(mode)
    finding = only((own / name).parent)
    assert finding.fault
    assert finding.value == f"mode {mode:o}"
    assert finding.advice == f"chmod 600 {own / name}"


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_socket_that_others_could_replace(mode, own, away):
    folder = own / "nodes/bob/worker"
    for usual in (0o700, 0o750):
        folder.chmod(usual)
        assert all(not one.fault for one in examine(own / "nodes/bob"))
    folder.chmod(mode)
    (finding,) = [one for one in examine(own / "nodes/bob") if one.fault]
    assert finding.what == "folder of the socket is open to others"
    assert (finding.value, finding.advice) == (f"mode {mode:o}", f"chmod 750 {folder}")


def test_rows_within_reach_of_code_that_the_server_sends(own, away):
    home = own / "nodes/bob"
    (home / "rows.csv").write_text("a,b\n" + "1,2\n" * 20)
    edit(home / "node.toml", '# target = "label"', 'target = "b"')
    (home / "rows.csv").chmod(0o640)
    finding = next(iter(examine(home)))
    assert (finding.fault, finding.what) == (True, "file of rows is open to others")
    assert finding.advice == f"chmod 600 {home / 'rows.csv'}"
    (home / "rows.csv").chmod(0o600)
    (home / "flower").mkdir(mode=0o700)
    assert examine(home) == []  # one user, who runs no such code
    edit(home / "node.toml", "[data]", "supernode = true\n[data]")
    finding = only(home)
    assert (finding.fault, finding.where) == (False, str(home / "flower"))
    assert finding.what == "one user has the rows and runs code that the server sends"
    (home / "flower").chmod(0o755)
    assert [one.what for one in examine(home) if one.fault] == [
        "state folder is open to others"
    ]


@pytest.mark.parametrize("name", ["server/state", "nodes/bob/state"])
def test_a_state_folder_that_others_can_enter(own, away, name):
    (own / name).chmod(0o750)
    finding = only((own / name).parent)
    assert (finding.fault, finding.value) == (True, "mode 750")


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("server/server.key", None, "key is missing"),
        ("server/ca.crt", None, "certificate cannot be used"),
        ("server/server.crt", "x", "certificate cannot be used"),
        ("server/nodes/bob.pub", None, "public key cannot be used"),
        ("server/nodes/bob.pub", "ssh-rsa x", "public key cannot be used"),
        ("nodes/bob/node.key", "x", "key cannot be used"),
        ("nodes/bob/ca.crt", "x", "certificate cannot be used"),
        ("nodes/bob/policy.toml", "[accept]\nx = 1", "policy cannot be used"),
        ("nodes/bob/policy.toml", None, "policy cannot be used"),
    ],
)
def test_files_that_are_missing_or_damaged(own, away, name, text, what):
    if text is None:
        (own / name).unlink()
    else:
        (own / name).write_text(text)
    home = own / "server" if name.startswith("server") else own / "nodes/bob"
    finding = only(home)
    assert (finding.fault, finding.what) == (True, what)


def test_rows_that_are_not_hidden(own, away):
    path = own / "nodes/bob/policy.toml"
    path.write_text("[protect.rows]\nnoise = 0.0\n")
    finding = only(own / "nodes/bob")
    assert (finding.fault, finding.what) == (False, "rows are not hidden")


def test_a_whole_federation_and_none(own, away, tmp_path):
    (own / "nodes/alice/node.key").chmod(0o666)
    (own / "server/server.key").chmod(0o666)
    assert len([one for one in examine(own) if one.fault]) == 2
    with pytest.raises(RunError, match=r"has neither server\.toml nor node\.toml"):
        examine(tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        examine(tmp_path / "node.toml")
