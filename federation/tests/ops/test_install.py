# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The scripts that set up the machines of a federation, in a folder in place of /."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import fedblend
from fedblend.config.config import load
from fedblend_federation.contract import contract_of
from fedblend_federation.ops.provision import provision
from fedblend_federation.ops.settings import NodeSettings, ServerSettings, load_as

HOME = "var/lib/fedblend"
ROWS = "age,dose,outcome\n1,2,yes\n"


def install(
    lab: Path, name: str, root: Path, *words: str
) -> subprocess.CompletedProcess:
    """Run the script of a machine."""
    root.mkdir(exist_ok=True)
    return subprocess.run(
        ["sh", str(lab / f"{name}.sh"), *words],
        env={**os.environ, "ROOT": str(root), "ENVIRONMENT": sys.prefix},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_node_is_set_up_by_one_command(own, tmp_path):
    rows, root = tmp_path / "patients.csv", tmp_path / "alice"
    rows.write_text(ROWS)
    target = 'the "outcome" | of C:\\new & old'
    done = install(own, "alice", root, "--rows", str(rows), "--target", target)
    assert (done.returncode, done.stderr) == (0, "")
    place = root / HOME / "node"
    settings = load_as(NodeSettings, place / "node.toml")
    assert settings.data.file == place / "rows.csv"
    assert settings.data.target == target
    assert settings.data.file.read_text() == ROWS
    for name in ("node.key", "policy.toml", "ca.crt"):
        here = place / name
        assert here.read_bytes() == (own / "nodes" / "alice" / name).read_bytes()
        assert stat.S_IMODE(here.stat().st_mode) == 0o600
    unit = (place / "fedblend-worker.service").read_text()
    assert f"{sys.prefix}/bin/fedblend federation worker {place}/node.toml" in unit
    assert "/opt/fedblend" not in unit


def test_a_node_that_hosts_several_clients_is_set_up_by_one_command(tmp_path):
    lab, rows = tmp_path / "lab", tmp_path / "rows"
    provision(
        lab, host="127.0.0.1", nodes=["gate", "way"], clients_per_node=3, with_keys=True
    )
    rows.mkdir()
    for client in (3, 4, 5):
        (rows / f"{client}.parquet").write_text(ROWS)
    done = install(lab, "way", tmp_path / "way", "--rows", str(rows), "--target", "ill")
    assert (done.returncode, done.stderr) == (0, "")
    place = tmp_path / "way" / HOME / "node"
    clients = load_as(NodeSettings, place / "node.toml").client_settings()
    files = {client: own.data.file for client, own in clients.items()}
    assert files == {c: place / "rows" / f"{c}.parquet" for c in (3, 4, 5)}
    assert all(file.exists() for file in files.values())
    wrong = install(lab, "gate", tmp_path / "gate", "--rows", str(rows / "3.parquet"))
    assert "is no folder with a file for each client" in wrong.stderr


def test_a_node_makes_its_keys_where_it_is(tmp_path):
    lab, place = tmp_path / "lab", tmp_path / "bob" / HOME / "node"
    provision(lab, host="127.0.0.1", nodes=["alice", "bob"])
    done = install(lab, "bob", tmp_path / "bob")
    assert (done.returncode, done.stderr) == (0, "")
    assert "made node.key, secure.key; hand over" in done.stdout
    for name in ("node.key", "secure.key", "public.toml"):
        assert stat.S_IMODE((place / name).stat().st_mode) == 0o600


def test_the_server_is_set_up_by_one_command(own, tmp_path):
    done = install(own, "server", tmp_path / "server")
    assert (done.returncode, done.stderr) == (0, "")
    place = tmp_path / "server" / HOME / "server"
    settings = load_as(ServerSettings, place / "server.toml")
    assert [node.key.exists() for node in settings.nodes] == [True, True]
    assert str(place / "server.crt") in (place / "nginx.conf").read_text()
    assert contract_of(load(place / "trial.toml")).clients == 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--rows", "gone.csv"], "error: --rows: gone.csv: cannot be read"),
        (["--rows"], "error: --rows: needs a file"),
        (["--row", "x"], "error: --row: is not an option; there are"),
        (["--rows", "/etc/hostname"], "is none of .csv, .parquet, .npz"),
    ],
)
def test_a_wrong_argument_is_one_line_and_nothing_is_written(
    words, line, own, tmp_path
):
    done = install(own, "alice", tmp_path / "alice", *words)
    assert done.returncode == 2
    assert line in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "alice" / HOME).exists()


def test_what_is_there_is_not_overwritten(own, tmp_path):
    assert install(own, "alice", tmp_path / "alice").returncode == 0
    again = install(own, "alice", tmp_path / "alice")
    assert again.returncode == 2
    assert "node: is there already, and is not overwritten" in again.stderr


def test_without_rows_the_operator_is_told_what_to_do(own, tmp_path):
    done = install(own, "bob", tmp_path / "bob")
    assert "name its rows in node.toml, then start" in done.stdout


STUB = """#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/pip" ;;
    "install --quiet") shift 2; echo "$*" > "$INSTALLED" ;;
esac
"""
"""Stands for python3, and for pip in the environments that it makes."""


@pytest.mark.parametrize("given", ["fedblend-federation<9", "./my src", None])
def test_what_is_installed_can_be_named(given, own, tmp_path):
    stub, log, root = tmp_path / "bin/python3", tmp_path / "installed", tmp_path / "r"
    stub.parent.mkdir()
    stub.write_text(STUB)
    stub.chmod(0o755)
    variables = {"ROOT": str(root), "INSTALLED": str(log)}
    variables |= {"FEDBLEND": given} if given else {"WHEELS": "my wheels"}
    done = subprocess.run(
        ["sh", str(own / "bob.sh")],
        env={"PATH": f"{stub.parent}:{os.environ['PATH']}", **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    released = f"fedblend-federation=={fedblend.__version__}"
    wanted = given or f"--find-links my wheels {released}"
    assert log.read_text() == f"{wanted}\n"
    unit = (root / HOME / "node" / "fedblend-node.service").read_text()
    assert f"ExecStart={root}/opt/fedblend/bin/fedblend federation node" in unit


def test_below_another_root_the_worker_needs_no_group(own, tmp_path):
    install(own, "bob", tmp_path / "bob")
    unit = tmp_path / "bob" / HOME / "node" / "fedblend-worker.service"
    (command,) = re.findall("^ExecStart=(.*)$", unit.read_text(), re.M)
    assert command.endswith("federation worker " + str(unit.parent / "node.toml"))
