# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend federation status``, ``log``, ``stop`` and ``predict``."""

import shutil

import numpy as np
import pytest
from configured import (
    POLICY,
    experiment,
    federated,
    method,
    newest,
    nodes,
    write_rows,
)

from fedblend.cli import main
from fedblend.errors import RunError
from fedblend.simulation.serialize import unpack
from fedblend_federation.flower import processes
from fedblend_federation.ops import experiments
from fedblend_federation.server.run import STOPPED, run_server
from loopback import LoopbackTransport


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of an experiment whose models are blends, and of its nodes."""
    folder = tmp_path_factory.mktemp("finished")
    write_rows(folder)
    text = federated(method("apfl", folder, rounds=1) + "[measure]\nlocal = false\n")
    blended = text.replace("alpha = 0.5\n", 'alpha = 0.5\nmix = "outputs"\n')
    run = experiment(folder / "run", blended)
    run_server(run, LoopbackTransport(nodes(folder, folder, POLICY)), poll=0.0)
    return folder


def said(capsys, *arguments) -> list[str]:
    assert main(["federation", *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def fails(capsys, *arguments) -> str:
    assert main(["federation", *map(str, arguments)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0].removeprefix("error: ")


def test_the_status_of_an_experiment(capsys, finished, tmp_path):
    lines = said(capsys, "status", finished / "run")
    assert lines[0] == "experiment nodes: round 1 of 1, finished"
    assert lines[1].endswith("3 received, 0 dropped, 0 rejected")
    assert "round: round 0, counted 3" in lines[2]
    assert {line.split(" of ")[1].split()[0] for line in lines[3:]} == {
        "shared",
        "personal",
    }
    unfinished = shutil.copytree(finished / "run", tmp_path / "run")
    (unfinished / "summary.json").unlink()
    assert "running, or waiting" in said(capsys, "status", unfinished)[0]
    (unfinished / STOPPED).write_text("no quorum\n")
    assert said(capsys, "status", unfinished)[0].endswith("stopped: no quorum")
    assert "no config.toml" in fails(capsys, "status", tmp_path)
    assert "server.toml: No such file" in fails(capsys, "status")


def test_the_log_of_a_server_and_of_a_node(capsys, finished, tmp_path):
    lines = said(capsys, "log", finished / "run")
    assert lines[-1].endswith("finished: round 1")
    assert sum("joined: client" in line for line in lines) == 3
    of_node = said(capsys, "log", finished / "node1" / "node.toml")
    assert "measured" in of_node[-2]
    assert of_node[-1].endswith("over True")
    path = tmp_path / "audit.jsonl"
    path.write_bytes((finished / "run" / "audit.jsonl").read_bytes())
    path.write_bytes(path.read_bytes().replace(b'"counted": 3', b'"counted": 4'))
    assert main(["federation", "log", str(path)]) == 2
    seen = capsys.readouterr()
    assert "not as it was written" in seen.out
    assert "was changed" in seen.err
    assert "No such file" in fails(capsys, "log", finished / "node1")


def _by_hand(finished) -> np.ndarray:
    """Predictions of a blend of two linear models, in NumPy."""
    arrays, _ = unpack(newest(finished / "node1").read_bytes())
    inputs = np.load(finished / "rows1.npz")["inputs"]

    def scores(model: str) -> np.ndarray:
        parts = {k: v for k, v in arrays.items() if k.startswith(f".{model}")}
        (weight,) = [part for part in parts.values() if part.ndim == 2]
        (bias,) = [part for part in parts.values() if part.ndim == 1]
        return inputs @ weight.T + bias

    alpha = float(arrays[".alpha"])
    return (alpha * scores("shared") + (1 - alpha) * scores("personal")).argmax(axis=1)


def test_predictions_of_a_node(capsys, finished, tmp_path):
    home, out = finished / "node1" / "node.toml", tmp_path / "out.csv"
    wanted = ["prediction", *map(str, _by_hand(finished))]
    assert said(capsys, "predict", home, "--data", finished / "rows1.npz") == wanted
    inputs = np.load(finished / "rows1.npz")["inputs"]
    np.savez(tmp_path / "new.npz", inputs=inputs)
    said(capsys, "predict", home, "--data", tmp_path / "new.npz", "--out", out)
    assert out.read_text().splitlines() == wanted
    table = "\n".join(",".join(map(repr, row)) for row in inputs.tolist())
    (tmp_path / "new.csv").write_text(f"a,b,c,d,e,f\n{table}\n")
    assert said(capsys, "predict", home, "--data", tmp_path / "new.csv") == wanted


def test_what_cannot_be_predicted_is_one_line(capsys, finished, tmp_path):
    home = finished / "node1" / "node.toml"
    rows = finished / "rows1.npz"
    assert "nothing.csv: no such file" in fails(
        capsys, "predict", home, "--data", tmp_path / "nothing.csv"
    )
    np.savez(tmp_path / "odd.npz", inputs=np.zeros((2, 5)))
    assert "(5,), but the model" in fails(
        capsys, "predict", home, "--data", tmp_path / "odd.npz"
    )
    np.savez(tmp_path / "nan.npz", inputs=np.full((2, 6), np.nan))
    assert "row 0" in fails(capsys, "predict", home, "--data", tmp_path / "nan.npz")
    assert "--experiment: x has left no model here" in fails(
        capsys, "predict", home, "--data", rows, "--experiment", "x"
    )
    copy = shutil.copytree(finished / "node1", tmp_path / "node")
    newest(copy).write_bytes(newest(copy).read_bytes()[:-1] + b"\xff")
    assert "damaged" in fails(capsys, "predict", copy / "node.toml", "--data", rows)
    shutil.rmtree(copy / "state")
    assert "no experiment has left a model here" in fails(
        capsys, "predict", copy / "node.toml", "--data", rows
    )


def forgetful(settings, *words):
    """A link that has lost its database."""
    raise RunError("flwr ls: [code: 16] Run ID not found.")


def test_stopping_writes_the_reason_before_it_stops(capsys, own, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(experiments, "TELLS_NODES", 0.0)

    def call(settings, *words):
        asked.append(words)
        assert words[0] != "stop" or (tmp_path / STOPPED).exists()
        return {"runs": [{"run-id": "7", "status": "running"}]}

    monkeypatch.setattr(processes, "call", call)
    server = own / "server" / "server.toml"
    command = ("stop", tmp_path, "--server", server)
    assert "no experiment is running there" in fails(capsys, *command)
    (tmp_path / experiments.RUN).write_text('{"run": "7"}')
    with monkeypatch.context() as patch:
        patch.setattr(processes, "call", forgetful)
        assert "no experiment is running there" in fails(capsys, *command)
    text = federated(method("fedavg", tmp_path, rounds=2))
    config = experiment(tmp_path / "made", text) / "config.toml"
    (tmp_path / "config.toml").write_bytes(config.read_bytes())
    assert said(capsys, *command) == ["stopped after round 0 of 2; --resume goes on"]
    assert ("stop", "7", processes.CONNECTION) in asked
