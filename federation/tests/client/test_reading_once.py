# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A node reads its policy once per message; a configuration is validated once."""

from collections import Counter
from pathlib import Path

from configured import CLIENTS, experiment, federated, method, nodes, write_rows

from fedblend.config.config import Config
from fedblend_federation.server.run import run_server
from loopback import LoopbackTransport

SILENT = '[accept]\nalgorithms = "any"\n[metrics]\nnames = []\n'


def test_policies_are_read_once_per_message_and_a_config_is_validated_once(
    tmp_path, monkeypatch
):
    counts: Counter[str] = Counter()
    read_bytes, validate = Path.read_bytes, Config.model_validate

    def reading(path: Path) -> bytes:
        counts[path.name] += 1
        return read_bytes(path)

    def validating(content, **more):
        counts["validations"] += 1
        return validate(content, **more)

    place = write_rows(tmp_path)
    settings = method("fedavg", place, rounds=2) + "[measure]\nlocal = false\n"
    run = experiment(tmp_path / "run", federated(settings))
    transport = LoopbackTransport(nodes(place, tmp_path, SILENT))
    send = transport.send

    def counting(outgoing) -> None:
        counts["messages"] += len(outgoing)
        send(outgoing)

    transport.send = counting  # pyright: ignore
    monkeypatch.setattr(Path, "read_bytes", reading)
    monkeypatch.setattr(Config, "model_validate", validating)
    run_server(run, transport, poll=0.0)
    # Meeting, enrollment, two rounds, two measurements, and that it is over.
    assert counts["messages"] == 7 * CLIENTS
    assert counts["policy.toml"] == counts["messages"]
    assert counts["validations"] == 1 + CLIENTS
