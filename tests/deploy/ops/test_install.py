# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The scripts that set up the machines of a federation, in a folder in place of /."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fedblend.config.config import load
from fedblend.deploy.contract import contract_of
from fedblend.deploy.ops.settings import NodeSettings, ServerSettings, load_as

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
