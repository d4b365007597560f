# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A configuration on nodes comes to what it comes to in a simulation."""

from pathlib import Path

import jax
import numpy as np
import pytest

from fedblend.experiment import toml
from fedblend.experiment.config import check, dump
from fedblend.experiment.federation.leading import lead
from fedblend.experiment.federation.settings import Node as NodeSettings
from fedblend.experiment.federation.settings import load_as
from fedblend.experiment.federation.taking_part import node_of
from fedblend.experiment.run import run_config
from fedblend.experiment.section import RunError
from fedblend.runtime.flower import keeping, letters
from fedblend.runtime.wire import as_tree, unpack
from loopback import Box

CLIENTS, ROWS = 3, (40, 25, 33)
METHOD = """
[model]
name = "softmax"
l2 = 0.01
[algorithm]
name = "apfl"
rate = 0.3
steps = 3
batch_size = 8
alpha = 0.5
[run]
rounds = 4
every = 2
chunk = 1
seed = 5
"""
FEDERATED = f"""
version = 1
name = "nodes"
[data]
partition = "nodes"
clients = {CLIENTS}
kind = "classes"
classes = 3
shape = [6]
test = 0.25
seed = 2
[federation]
deadline = 5.0
resend = 1.0
{METHOD}
"""
POLICY = "[metrics]\nminimum_count = 1\nround_to = 12\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Rows of each node in its own file, and those of all in one."""
    folder = tmp_path_factory.mktemp("rows")
    rng = np.random.default_rng(0)
    all_rows = []
    for client, count in enumerate(ROWS):
        targets = rng.integers(0, 3, count)
        inputs = rng.normal(size=(count, 6)) + targets[:, None]
        arrays = {"inputs": inputs.astype(np.float32), "targets": targets}
        np.savez(folder / f"rows{client}.npz", **arrays)
        all_rows.append({**arrays, "clients": np.full(count, client)})
    joined = {
        name: np.concatenate([rows[name] for rows in all_rows]) for name in all_rows[0]
    }
    np.savez(folder / "all.npz", **joined)
    return folder


def nodes(place: Path, folder: Path, policy: str = POLICY) -> dict:
    """Three nodes with folders of their own."""
    found = {}
    for client in range(CLIENTS):
        home = folder / f"node{client}"
        home.mkdir(parents=True, exist_ok=True)
        (home / "policy.toml").write_text(policy)
        (home / "node.toml").write_text(
            f'version = 1\nserver = "127.0.0.1:8000"\nclient = {client}\nca = "ca"\n'
            f'key = "key"\nfolder = "state"\npolicy = "policy.toml"\n'
            f'[data]\nfile = "{place / f"rows{client}.npz"}"\n'
        )
        found[100 + client] = node_of(load_as(NodeSettings, home / "node.toml"))
    return found


def experiment(folder: Path, text: str = FEDERATED) -> Path:
    folder.mkdir(parents=True)
    config = check(toml.parse(text, "test"), "test")
    (folder / "config.toml").write_text(dump(config))
    return folder


@pytest.fixture(scope="module")
def simulated(place, tmp_path_factory):
    text = (
        METHOD
        + f"""
version = 1
name = "one"
[data]
file = "{place / "all.npz"}"
partition = "by_key"
test = 0.25
seed = 2
"""
    )
    head, _, tables = text.partition("\nversion")
    content = toml.parse("version" + tables + head, "test")
    folder = tmp_path_factory.mktemp("simulated") / "run"
    return run_config(check(content, "test"), folder), folder


def test_a_federation_comes_to_what_a_simulation_comes_to(place, tmp_path, simulated):
    there, folder = simulated
    here = lead(experiment(tmp_path / "run"), Box(nodes(place, tmp_path)), poll=0.0)
    one, other = here["runs"][0], there["runs"][0]
    assert one["bits"] == other["bits"]
    for model in ("personal", "shared", "local"):
        for metric in ("accuracy", "loss"):
            found, wanted = (
                run["measures"]["test"][model][metric]["mean"] for run in (one, other)
            )
            assert found == pytest.approx(wanted, abs=1e-6)
    (mine, _), (theirs, _) = (
        unpack((path / "model.safetensors").read_bytes())
        for path in (tmp_path / "run", folder)
    )
    for name, array in theirs.items():
        np.testing.assert_allclose(mine[name], array, atol=1e-6)
    assert (tmp_path / "run" / "harm.csv").exists()


def test_a_node_refuses_what_its_policy_does_not_allow(place, tmp_path):
    refusing = nodes(place, tmp_path, '[accept]\nalgorithms = ["fedavg"]\n')
    text = FEDERATED.replace("deadline = 5.0", "deadline = 0.2")
    with pytest.raises(RunError, match=r"accept\.algorithms.*apfl"):
        lead(experiment(tmp_path / "run", text), Box(refusing), poll=0.0)
    logged = (tmp_path / "node0" / "state" / "audit.jsonl").read_text()
    assert "accept.algorithms" in logged.splitlines()[-1]


def test_a_change_of_the_policy_counts_from_the_next_letter_on(place, tmp_path):
    there = nodes(place, tmp_path)
    text = FEDERATED.replace("deadline = 5.0", "deadline = 0.3")
    box = Box(there)

    def after_the_first_round(address, data):
        if address == 101 and b'"counted"' not in data:
            written = tmp_path / "node1" / "policy.toml"
            if (tmp_path / "run" / "server" / "books").exists():
                written.write_text('[accept]\nalgorithms = ["fedavg"]\n')
        return [data]

    box.spoil = after_the_first_round
    with pytest.raises(RunError, match=r"accept\.algorithms.*--resume"):
        lead(experiment(tmp_path / "run", text), box, poll=0.0)
    (tmp_path / "node1" / "policy.toml").write_text(POLICY)
    box.spoil = lambda address, data: [data]
    assert lead(tmp_path / "run", box, poll=0.0)["runs"][0]["round"] == 4


def test_under_noise_a_round_is_answered_for_one_message(place, tmp_path):
    strict = POLICY + "[protect]\nclip = 1.0\nnoise = 0.5\n"
    text = FEDERATED.replace('"apfl"', '"fedavg"').replace("alpha = 0.5\n", "")
    box = Box(nodes(place, tmp_path, strict))
    asked = []
    send = box.send

    def listening(mail):
        asked.extend(mail.values())
        send(mail)

    box.send = listening
    lead(experiment(tmp_path / "run", text), box, poll=0.0)
    data = next(
        data
        for data in reversed(asked)
        if (letters.read(data).kind, letters.read(data).client) == ("round", 1)
    )
    node, letter = box.nodes[101], letters.read(data)
    assert letters.read(node.answer(data)).kind == "round"
    part = node.rules.join(keeping.read_terms(node.folder / letter.experiment))
    told = as_tree(letter.arrays, part.message._replace(round=None))
    moved = jax.tree.map(lambda leaf: leaf + np.float32(1e-3), told)
    refused = letters.read(node.answer(letters.write(letter, moved)))
    assert "another message" in refused.words["reason"]
