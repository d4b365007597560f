# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What ``fedblend federation init`` writes, as other programs see it."""

import datetime
import shutil
import socket
import ssl
import stat
import subprocess
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)

from fedblend.config.config import load
from fedblend.errors import RunError
from fedblend_federation.contract import contract_of
from fedblend_federation.ops import provision
from fedblend_federation.ops.credentials import PROGRAM
from fedblend_federation.ops.settings import (
    Address,
    NodeSettings,
    ServerSettings,
    client_at,
    load_as,
)
from fedblend_federation.policy.policy import Policy, load_policy
from fedblend_federation.secure.roster import keys_of
from fedblend_federation.secure.session import public_key

EXPECTED = {
    "README.md",
    *("server.sh", "alice.sh", "bob.sh"),
    "ca/ca.crt",
    "ca/ca.key",
    *(f"server/{name}" for name in ("ca.crt", "server.crt", "server.key")),
    *(f"server/{name}" for name in ("server.toml", "nginx.conf", "trial.toml")),
    "server/fedblend-link.service",
    "server/roster.toml",
    "server/nodes/alice.pub",
    "server/nodes/bob.pub",
    *(
        f"nodes/{node}/{name}"
        for node in ("alice", "bob")
        for name in (
            "ca.crt",
            "node.key",
            "public.toml",
            "secure.key",
            "roster.toml",
            "node.toml",
            "policy.toml",
            "fedblend-worker.service",
            "fedblend-node.service",
        )
    ),
}


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not here")
    return found


def test_everything_is_there_and_private(lab):
    paths = [lab, *lab.rglob("*")]
    files = [path for path in paths if path.is_file()]
    assert {str(path.relative_to(lab)) for path in files} == EXPECTED
    for path in paths:
        expected = 0o600 if path.is_file() else 0o700
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_settings_and_policy_can_be_read(lab):
    server = load_as(ServerSettings, lab / "server" / "server.toml")
    assert server.address == Address("127.0.0.1", 8443)
    assert server.link == Address("127.0.0.1", 8000)
    assert [(node.name, node.client) for node in server.nodes] == [
        ("alice", 0),
        ("bob", 1),
    ]
    for file in (server.certificate, server.key, server.ca, server.folder):
        assert file.exists()
    for entry in server.nodes:
        folder = lab / "nodes" / entry.name
        node = load_as(NodeSettings, folder / "node.toml")
        assert (node.client, node.server) == (entry.client, server.address)
        # What the file spells out are the defaults.
        assert load_policy(node.policy) == Policy()


def test_keys_of_nodes_are_of_their_kind(lab):
    folder = lab / "nodes" / "alice"
    key = load_ssh_private_key((folder / "node.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(key.curve, ec.SECP384R1)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    known = lab / "server" / "nodes" / "alice.pub"
    assert known.read_bytes() == public + b" alice\n"


def test_openssh_reads_the_keys(lab):
    command = [program("ssh-keygen"), "-y", "-f", lab / "nodes/alice/node.key"]
    said = subprocess.run(command, capture_output=True, check=True).stdout
    known = (lab / "server/nodes/alice.pub").read_bytes()
    assert said.split()[:2] == known.split()[:2]


def test_openssl_accepts_the_certificate(lab):
    for purpose in (["-purpose", "sslserver"], ["-verify_ip", "127.0.0.1"]):
        command = [program("openssl"), "verify", "-x509_strict", *purpose, "-CAfile"]
        command += [str(lab / "ca/ca.crt"), str(lab / "server/server.crt")]
        subprocess.run(command, capture_output=True, check=True)


def test_the_certificate_lasts_and_names_its_hosts(tmp_path):
    provision.provision(tmp_path, host="fl.example.org", nodes=["a"], days=10)
    text = (tmp_path / "server" / "server.crt").read_bytes()
    shown = x509.load_pem_x509_certificate(text)
    names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = names.get_values_for_type(x509.DNSName)
    assert hosts == ["fl.example.org", "localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == [
        "127.0.0.1"
    ]
    left = shown.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert 9 < left / datetime.timedelta(days=1) <= 10


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_node_trusts_the_server_and_no_other(lab, tmp_path, host):
    provision.provision(tmp_path / "other", host="127.0.0.1", nodes=["eve"])
    assert _shakes_hands(lab, lab / "nodes/alice/ca.crt", host)
    with pytest.raises(ssl.SSLCertVerificationError):
        _shakes_hands(tmp_path / "other", lab / "nodes/alice/ca.crt", host)


def _shakes_hands(served: Path, ca: Path, host: str) -> bool:
    listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    listening.load_cert_chain(
        served / "server/server.crt", served / "server/server.key"
    )

    def answer(server: socket.socket) -> None:
        with server.accept()[0] as plain:
            try:
                listening.wrap_socket(plain, server_side=True).close()
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        context = ssl.create_default_context(cafile=str(ca))
        try:
            with (
                socket.create_connection(server.getsockname()) as plain,
                context.wrap_socket(plain, server_hostname=host) as secured,
            ):
                return secured.version() is not None
        finally:
            thread.join()


def test_renewing_keeps_authority_and_nodes(tmp_path):
    provision.provision(tmp_path, host="127.0.0.1", nodes=["a"], days=10)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    provision.renew(tmp_path, days=100)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    changed = {path.name for path in after if before[path] != after[path]}
    assert changed == {"server.key", "server.crt"}
    assert stat.S_IMODE((tmp_path / "server/server.key").stat().st_mode) == 0o600
    assert _shakes_hands(tmp_path, tmp_path / "nodes/a/ca.crt", "127.0.0.1")
    (tmp_path / "ca" / "ca.key").unlink()
    with pytest.raises(RunError, match=r"ca\.key: No such file or directory; renewing"):
        provision.renew(tmp_path)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"host": "https://x"}, '--host: "https://x" is not a host name or an IP'),
        ({"host": "10.0.0"}, '--host: "10.0.0" is not a host name or an IP address'),
        ({"host": "a\nb"}, r'--host: "a\nb" is not a host name or an IP address'),
        ({"nodes": ["Alice"]}, '--nodes: "Alice" is not 1 to 32 of a-z, 0-9 and -'),
        ({"nodes": ["../x"]}, '--nodes: "../x" is not 1 to 32 of a-z'),
        ({"nodes": [""]}, '--nodes: "" is not 1 to 32 of a-z'),
        ({"nodes": ["a", "a"]}, '--nodes: "a" is named twice'),
        ({"nodes": []}, "--nodes: no node is named"),
        ({"days": 0}, "--days: 0 is not between 1 and 825"),
        ({"days": 10_000}, "--days: 10000 is not between 1 and 825"),
        ({"port": 0}, "--port: 0 is not between 1 and 65535"),
    ],
)
def test_bad_input_writes_nothing(change, line, tmp_path):
    usual = {"host": "fl.example.org", "nodes": ["alice"]}
    with pytest.raises(RunError) as error:
        provision.provision(tmp_path / "new", **(usual | change))
    assert str(error.value).startswith(line)
    assert not (tmp_path / "new").exists()


def test_a_folder_in_use_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(RunError, match="is not empty, and nothing in it is overwr"):
        provision.provision(tmp_path, host="localhost", nodes=["a"])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(RunError, match="mine: is not a folder"):
        provision.provision(tmp_path / "mine", host="localhost", nodes=["a"])


def test_systemd_reads_the_units(lab, tmp_path):
    analyze = program("systemd-analyze")
    for unit in (lab / "server/fedblend-link.service",
                 lab / "nodes/bob/fedblend-worker.service",
                 lab / "nodes/bob/fedblend-node.service"):  # fmt: skip
        copy = tmp_path / unit.name
        # The program is not installed where tests run.
        text = unit.read_text()
        copy.write_text(text.replace(str(PROGRAM), shutil.which("true") or ""))
        done = subprocess.run(
            [analyze, "verify", "--man=no", copy], capture_output=True, text=True
        )
        # Where systemd does not run it says so in other words, and of other units.
        assert unit.name not in done.stderr, done.stderr
        assert "Restart=always" in text and "RestartSec=5" in text


def test_nodes_may_host_several_clients(tmp_path):
    hosts = {"nodes": ["gate", "way"], "clients_per_node": 3}
    provision.provision(tmp_path, host="127.0.0.1", with_keys=True, **hosts)
    server = load_as(ServerSettings, tmp_path / "server" / "server.toml")
    assert [node.client_ids for node in server.nodes] == [(0, 1, 2), (3, 4, 5)]
    assert server.clients == 6
    node = load_as(NodeSettings, tmp_path / "nodes" / "way" / "node.toml")
    assert node.client_ids == (3, 4, 5)
    own = node.client_settings()[4]
    assert own.folder == tmp_path / "nodes" / "way" / "state" / "client-4"
    assert own.data.file == tmp_path / "nodes" / "way" / "rows" / "4.csv"
    # Two clients with one key would have the same masks with a third.
    keys = [keys_of(one).private for one in node.client_settings().values()]
    assert len({public_key(key) for key in keys}) == 3
    assert len(keys_of(own).public) == 6
    assert keys_of(own).names == {c: "gate" if c < 3 else "way" for c in range(6)}
    assert contract_of(load(tmp_path / "server" / "trial.toml")).clients == 6
    assert "(clients 3 to 5)" in (tmp_path / "README.md").read_text()
    with pytest.raises(RunError, match="--clients-per-node: 0 is not between 1 and"):
        provision.provision(tmp_path, host="127.0.0.1", nodes=["a"], clients_per_node=0)


def test_one_of_several_clients_is_named(tmp_path):
    provision.provision(tmp_path, host="127.0.0.1", nodes=["gate"], clients_per_node=2)
    path = tmp_path / "nodes" / "gate" / "node.toml"
    assert client_at(path, 1).client == 1
    for client in (None, 2):
        with pytest.raises(RunError, match="This node hosts clients 0 to 1"):
            client_at(path, client)
