# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A base that init gives to all machines, and what the doctor says of it."""

import hashlib
import subprocess
from pathlib import Path

import numpy as np
import pytest
from edits import edit, only
from safetensors.numpy import save_file

from fedblend.errors import ConfigError, RunError
from fedblend_federation.client import build
from fedblend_federation.client.build import SUMS
from fedblend_federation.ops import doctor, provision
from fedblend_federation.ops.doctor import examine
from fedblend_federation.ops.settings import NodeSettings, load_as


@pytest.fixture
def base(tmp_path):
    file = tmp_path / "tiny.safetensors"
    save_file({"weight": np.ones((2, 3), np.float32)}, file)
    return file


@pytest.fixture
def away(monkeypatch, no_services):
    """Nothing is asked on the network."""
    monkeypatch.setattr(doctor, "public_findings", lambda address, ca: [])


def made(folder: Path, base: Path | None) -> Path:
    """The folder of a new federation's first node."""
    nodes = ["alice", "bob"]
    provision.provision(
        folder, host="127.0.0.1", nodes=nodes, base=base, with_keys=True
    )
    return folder / "nodes" / "alice"


def filled(node: Path) -> Path:
    """The settings of a node that has rows."""
    lines = [f"{n / 30},{n % 2}\n" for n in range(60)]
    (node / "rows.csv").write_text("age,label\n" + "".join(lines))
    (node / "rows.csv").chmod(0o600)
    return edit(node / "node.toml", '# target = "label"', 'target = "label"')


def test_init_copies_a_base_to_every_machine(tmp_path, base, away):
    node = made(tmp_path / "lab", base)
    for folder in (node, node.parent / "bob", tmp_path / "lab" / "server"):
        copied = folder / "bases" / base.name
        assert copied.read_bytes() == base.read_bytes()
        checked = ["sha256sum", "--check", "--quiet", SUMS]
        subprocess.run(checked, cwd=copied.parent, check=True)
    settings = load_as(NodeSettings, filled(node))
    assert settings.bases == node / "bases"
    assert examine(node / "node.toml") == []


def test_init_names_a_base_that_is_too_large_to_copy(tmp_path, base, away, monkeypatch):
    monkeypatch.setattr(build, "MAX_COPIED", 10)
    node = made(tmp_path / "lab", base)
    digest = hashlib.sha256(base.read_bytes()).hexdigest()
    assert (node / "bases" / SUMS).read_text() == f"{digest}  {base.name}\n"
    finding = only(filled(node))
    assert (finding.what, finding.value) == ("base is another one", "no such file")
    assert finding.fault
    (node / "bases" / base.name).write_bytes(base.read_bytes())
    assert examine(node / "node.toml") == []


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("tiny.safetensors", b"another one", "base is another one"),
        ("more.safetensors", b"no tensors", "base is unusable"),
        (SUMS, b"../secret\n", "base is unusable"),
        (SUMS, b"0" * 64 + b"  ../secret\n", "base is unusable"),
    ],
)
def test_the_doctor_finds_bases_that_are_not_what_was_given(
    tmp_path, base, away, name, text, what
):
    node = made(tmp_path / "lab", base)
    (node / "bases" / name).write_bytes(text)
    found = examine(filled(node))
    assert found[0].what == what
    assert found[0].fault
    assert all("\n" not in str(finding) for finding in found)


def test_the_doctor_misses_bases_that_node_toml_names(tmp_path, away):
    node = made(tmp_path / "lab", None)
    settings = filled(node)
    assert examine(settings) == []
    finding = only(edit(settings, 'bases = "bases"', 'bases = "elsewhere"'))
    assert (finding.what, finding.fault) == ("bases are missing", False)


def test_init_refuses_what_is_no_base(tmp_path, base):
    other = tmp_path / "weights.bin"
    other.write_bytes(base.read_bytes())
    with pytest.raises(RunError, match=r"^--base: .*weights.bin: is not a file .safet"):
        made(tmp_path / "lab", other)
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"{}")
    with pytest.raises(ConfigError, match=r"damaged\.safetensors"):
        made(tmp_path / "lab", damaged)
    with pytest.raises(ConfigError, match=r"gone\.safetensors: No such file"):
        made(tmp_path / "lab", tmp_path / "gone.safetensors")
    assert not (tmp_path / "lab").exists()
