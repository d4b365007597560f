# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend federation``: what it prints, and its exit codes."""

import pytest

from fedblend.cli import main
from fedblend_federation.ops.audit import Audit


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """An empty folder to stand in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fails(capsys, *arguments) -> str:
    assert main(["federation", *arguments]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1, said.err
    return said.err.removeprefix("error: ").strip()


def test_from_init_to_doctor(capsys, place):
    found = ["init", "lab", "--host", "127.0.0.1", "--port", "1", "--nodes", "a, b"]
    assert main(["federation", *found, "--with-keys"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "wrote lab for 2 nodes; read lab/README.md"
    assert (
        second == "whoever has lab can open what any node masks, and pose as any node"
    )
    assert main(["federation", "renew", "lab", "--days", "20"]) == 0
    assert "wrote lab/server/server.key and" in capsys.readouterr().out
    assert main(["federation", "doctor", "lab/server/server.toml"]) == 0
    first, second, third, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"warning: {place}/lab/server/server.crt: certificate exp")
    assert second.startswith("warning: 127.0.0.1:1: cannot be reached: Connection ref")
    assert third.startswith("warning: 127.0.0.1:8000: the link is not up: no answer;")
    assert last == "0 faults, 3 warnings"
    (place / "lab/server/server.key").chmod(0o644)
    assert main(["federation", "doctor", "lab/server"]) == 2
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.startswith("fault: ")
    assert said.out.endswith("1 faults, 3 warnings\n")
    assert "is not empty" in fails(capsys, *found)


def test_bad_input_is_one_line(capsys, place):
    usual = ["init", "lab", "--host", "fl.example.org"]
    assert fails(capsys, *usual, "--nodes", "A B").startswith('--nodes: "A B" is not')
    assert fails(capsys, *usual).startswith("--nodes: is missing")
    assert "'--days': 'x' is not" in fails(
        capsys, *usual, "--nodes", "a", "--days", "x"
    )
    assert "server.toml: No such file" in fails(capsys, "renew", "lab")
    assert "has neither server.toml" in fails(capsys, "doctor")
    assert "nothing.toml: No such file" in fails(capsys, "doctor", "nothing.toml")
    assert "nothing: No such file" in fails(capsys, "audit", "nothing")
    assert not list(place.iterdir())


def test_a_worker_for_a_group(capsys, place):
    main(["federation", "init", "lab", "--host", "127.0.0.1", "--nodes", "a"])
    capsys.readouterr()
    file = place / "lab/nodes/a/node.toml"
    said = fails(capsys, "worker", str(file), "--group", "no-such-group")
    assert said == '--group: "no-such-group" is not a group of users on this machine'
    file.write_text(file.read_text().replace('socket = "worker/socket"', ""))
    said = fails(capsys, "worker", str(file), "--group", "root")
    assert said.startswith(f"--group: the socket is in {file.parent}/state, which is")


def test_audits(capsys, place):
    path = place / "audit.jsonl"
    first = Audit(path).append("started")
    head = Audit(path).append("answered", round=1)
    assert main(["federation", "audit", "audit.jsonl", "--head", first]) == 0
    said = capsys.readouterr().out
    found = "2 lines, unbroken, 1 hashes of the other side found"
    assert said == f"audit.jsonl: {found}; newest hash {head}\n"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    assert "lines were cut off" in fails(capsys, "audit", str(path), "--head", head)
    path.write_bytes(path.read_bytes().replace(b"started", b"Started"))
    assert "line 1: was changed" in fails(capsys, "audit", str(path))


def test_an_experiment_finds_the_server_beside_it(capsys, place, monkeypatch):
    from fedblend_federation.ops import experiments

    called = []
    monkeypatch.setattr(experiments, "run_experiment", lambda *a, **k: called.append(a))
    main(["federation", "init", "lab", "--host", "127.0.0.1", "--nodes", "a,b"])
    trial = str(place / "lab/server/trial.toml")
    main(["federation", "run", trial])
    main(["federation", "run", trial, "--out", "here"])
    monkeypatch.chdir(place / "lab/server")
    main(["federation", "run", "trial.toml", "--resume"])
    outs = [str(out) for _, out in called]
    assert outs == [str(place / "lab/server/runs/trial"), "here", "runs/trial"]
    monkeypatch.chdir(place / "lab")
    capsys.readouterr()
    (place / "lab/server/server.toml").unlink()
    assert "server.toml: No such file" in fails(capsys, "run", trial)
