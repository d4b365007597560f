# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend federation run --resume`` on a folder that cannot go on: one line."""

import json
import shutil
from contextlib import suppress

import pytest
from configured import experiment, federated, method, nodes, write_rows
from trials import apart, forged

from fedblend.cli import main
from fedblend.errors import RunError
from fedblend_federation import message as messages
from fedblend_federation.flower import processes
from fedblend_federation.ops import experiments as submit_module
from fedblend_federation.ops.provision import provision
from fedblend_federation.server.checkpoint import Busy, ServerCheckpoint
from fedblend_federation.server.run import STOPPED, run_in_flower, run_server
from loopback import LoopbackTransport

NAMES = ["alice", "bob", "carol"]
SILENT = "[metrics]\nnames = []\n"
"""Without measures no figures are drawn, which takes longer than the rounds."""


def _refusing(address, data):
    message = messages.decode(data)
    if message.round != 1:
        return [data]
    return [messages.encode(message.reply("refused", reason="away"))]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A federation of three nodes, and an experiment that stopped in its round 1."""
    place = write_rows(tmp_path_factory.mktemp("stopped"))
    provision(place / "lab", host="127.0.0.1", nodes=NAMES, port=1, with_keys=True)
    how = method("fedavg", place, rounds=2) + "[measure]\nlocal = false\n"
    transport = LoopbackTransport(nodes(place, place, SILENT))
    transport.spoil = _refusing
    with pytest.raises(RunError, match="--resume"):
        run_server(experiment(place / "run", federated(how, 60.0)), transport, poll=0.0)
    (place / "run.toml").write_text((place / "run" / "config.toml").read_text())
    return place


@pytest.fixture
def place(stopped, tmp_path, monkeypatch):
    """A copy to spoil; what Flower would start is started here."""
    copied = shutil.copytree(stopped, tmp_path / "copied")
    transport = LoopbackTransport(nodes(copied, copied, SILENT))

    def submit(settings, folder):
        del settings
        with suppress(ValueError, OSError):
            run_in_flower(folder, transport)
        return "1"

    monkeypatch.setattr(processes, "connect", lambda settings: None)
    monkeypatch.setattr(processes, "submit", submit)
    monkeypatch.setattr(processes, "status_of", lambda settings, run: "finished")
    monkeypatch.setattr(submit_module, "INTERVAL", 0.0)
    return copied


def resume(place) -> int:
    server = place / "lab" / "server" / "server.toml"
    words = ["run", place / "run.toml", "--server", server, "--out", place / "run"]
    return main(["federation", *map(str, words), "--resume"])


def _cut(place):
    for name in ("checkpoint", "checkpoint.previous"):
        path = place / "run" / "server" / name
        path.write_bytes(path.read_bytes()[:100])


def _foreign(place):
    path = place / "run" / "server" / "checkpoint"
    header, metadata, body = apart(path.read_bytes())
    path.write_bytes(forged(header, {**metadata, "experiment": "other"}, body))


def _other_method(place):
    path = place / "run" / "server" / "checkpoint"
    header, metadata, body = apart(path.read_bytes())
    renamed = {name.replace(".shared", ".extra"): at for name, at in header.items()}
    assert renamed != header
    path.write_bytes(forged(renamed, metadata, body))


def _no_clients(place):
    path = place / "run" / "server" / "checkpoint"
    header, metadata, body = apart(path.read_bytes())
    state = json.loads(metadata["state"])
    metadata["state"] = json.dumps({**state, "about": {"clients": 3}})
    path.write_bytes(forged(header, metadata, body))


def _no_name(place):
    (place / "run" / "server" / "experiment.json").write_text('{"experiment": 3}')


def _no_folder(place):
    shutil.rmtree(place / "run" / "server")
    (place / "run" / "server").write_text("")


def _changed_audit(place):
    path = place / "run" / "audit.jsonl"
    path.write_bytes(path.read_bytes()[:-20] + b"x" * 19 + b"\n")


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (_cut, "cut off after 100 bytes"),
        (_foreign, "checkpoint: is a checkpoint of experiment"),
        (_other_method, "another model, algorithm or version"),
        (_no_clients, "checkpoint: its metadata are damaged (AttributeError)"),
        (_no_name, "experiment.json: is damaged"),
        (_no_folder, "server: cannot keep checkpoints here: File exists"),
        (_changed_audit, "its last line was changed"),
    ],
)
def test_what_cannot_go_on_is_one_line(spoil, line, place, capsys):
    spoil(place)
    assert resume(place) == 2
    said = capsys.readouterr().err.splitlines()
    (error,) = [one for one in said if one.startswith("error: ")]
    assert line in error and said[-1] == error
    assert not any("Traceback" in one for one in said)
    assert not (place / "run" / "summary.json").exists()


def test_a_full_disk_is_named_and_a_whole_folder_goes_on(place, monkeypatch, capsys):
    def full(*arguments):
        raise OSError(28, "No space left on device", "metrics.jsonl")

    with monkeypatch.context() as patch:
        patch.setattr("fedblend.runs.run_folder.write_metrics", full)
        assert resume(place) == 2
    assert "No space left on device: 'metrics.jsonl'" in capsys.readouterr().err
    assert (place / "run" / STOPPED).exists()
    assert resume(place) == 0
    assert (place / "run" / "summary.json").exists()


def test_a_second_server_leaves_no_reason(stopped, tmp_path):
    copied = shutil.copytree(stopped, tmp_path / "copied")
    first = ServerCheckpoint(copied / "run" / "server")
    with pytest.raises(Busy, match="another server is running"):
        run_in_flower(copied / "run", LoopbackTransport({}))
    first.close()
    assert not (copied / "run" / STOPPED).exists()
