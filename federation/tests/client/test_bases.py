# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A frozen base is on every node's own disk; adapters alone travel."""

import hashlib
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from configured import (
    CLIENTS,
    POLICY,
    experiment,
    federated,
    largest_gap,
    settings_of,
    simulated,
    simulation,
    write_rows,
)
from safetensors.numpy import load_file, save_file

import fedblend as fb
from fedblend.config.config import loads
from fedblend.trees import leaves_by_path
from fedblend_federation import message as messages
from fedblend_federation.client import build
from fedblend_federation.client.node import node_of
from fedblend_federation.client.predict import predict_rows
from fedblend_federation.contract import contract_of
from fedblend_federation.ops.settings import NodeSettings, load_as
from fedblend_federation.policy import limits
from fedblend_federation.policy.policy import Limits, Refusal
from fedblend_federation.server.run import run_server
from loopback import LoopbackTransport

HIDDEN = 64, 48
MODEL = fb.models.mlp(6, 3, hidden=HIDDEN)
RANK = 2
ENTRIES = RANK * (6 + 64) + RANK * (64 + 48)
"""Of an adapter: both factors of both hidden layers."""


def write_base(path: Path, seed: int = 7) -> str:
    """A base, and its sha256."""
    base = MODEL.init(jax.random.key(seed))
    arrays = {name: np.asarray(leaf) for name, leaf in leaves_by_path(base).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(arrays, path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def how(base: Path, digest: str = "") -> str:
    given = f'sha256 = "{digest}"\n' if digest else ""
    return (
        '[model]\nname = "mlp"\nhidden = [64, 48]\n'
        f'[adapt]\nrank = {RANK}\nbase = "{base}"\n{given}'
        '[algorithm]\nname = "fedavg"\nrate = 0.3\nsteps = 3\nbatch_size = 8\n'
        "[run]\nrounds = 2\nevery = 2\nchunk = 1\nseed = 5\n[measure]\nlocal = false\n"
    )


def node_with(place: Path, home: Path, client: int, named: str | None) -> NodeSettings:
    """The settings of a node whose node.toml names this as its bases."""
    settings_of(place, home, client, POLICY)
    if named is not None:
        file = home / "node.toml"
        file.write_text(
            file.read_text().replace("[data]", f'bases = "{named}"\n[data]')
        )
    return load_as(NodeSettings, home / "node.toml")


class Recording(LoopbackTransport):
    """Remembers the messages of the server; ``spoil`` is for those of nodes."""

    def __init__(self, nodes):
        super().__init__(nodes)
        self.seen: list[bytes] = []

    def send(self, outgoing):
        self.seen.extend(outgoing.values())
        super().send(outgoing)


@pytest.fixture
def place(tmp_path):
    return write_rows(tmp_path)


def test_adapters_on_nodes_are_those_of_a_simulation_and_alone_travel(place, tmp_path):
    """Also: the path of the server is not told, and models on nodes predict."""
    secret = tmp_path / "servers" / "own.safetensors"
    digest = write_base(secret)
    homes = [tmp_path / f"node{client}" for client in range(CLIENTS)]
    nodes = {}
    for client, home in enumerate(homes):
        # A folder with other files, or the file itself; its name does not matter.
        target = home / "bases" / "mine.safetensors"
        write_base(target)
        write_base(home / "bases" / "another.safetensors", seed=9)
        named = "bases" if client else "bases/mine.safetensors"
        nodes[100 + client] = node_of(node_with(place, home, client, named))
    run = experiment(tmp_path / "run", federated(how(secret)))
    transport = Recording(nodes)
    transport.spoil = lambda address, data: (transport.seen.append(data), [data])[1]
    run_server(run, transport, poll=0.0)
    there = simulation(simulated(how(secret), place))
    # 1e-5: float32 in another order of sums, as of other models on nodes.
    assert largest_gap(run, homes, there) < 1e-5
    size, seen = secret.stat().st_size, transport.seen
    assert max(map(len, seen)) < size / 3
    texts = [str(messages.decode(data).fields) for data in seen]
    assert any(digest in text for text in texts)
    assert not any("servers" in text for text in texts)
    arrays = [messages.decode(data).arrays for data in seen]
    sizes = {sum(array.size for array in own.values()) for own in arrays}
    assert ENTRIES in sizes
    assert max(sizes) <= ENTRIES + 1
    (client,) = load_as(NodeSettings, homes[1] / "node.toml").client_settings().values()
    rows = place / "rows1.npz"
    predicted = predict_rows(client, rows).values
    scores = there_scores(there, 1, np.load(rows)["inputs"], secret)
    assert predicted == scores.argmax(axis=-1).tolist()


def there_scores(there, client, inputs, file):
    """By weights that are the sum of base and adapter."""
    weights = {name: leaf.copy() for name, leaf in load_file(file).items()}
    for path, own in there.personal(client).items():
        weights[path] += np.asarray(own["b"] @ own["a"])
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0))
    leaves = [weights[path] for path in leaves_by_path(shapes)]
    params = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    return np.asarray(MODEL.apply(params, inputs))


@pytest.mark.parametrize(
    ("named", "line"),
    [
        (None, "adapt.base: this node has no bases; node.toml names none"),
        ("nowhere", "adapt.base: this node has no base with the sha256 {digest}; "),
        ("bases", "adapt.base: this node has no base with the sha256 {digest}; "),
    ],
)
def test_a_node_without_the_base_refuses_in_one_line(place, tmp_path, named, line):
    digest = write_base(tmp_path / "own.safetensors")
    home = tmp_path / "node"
    write_base(home / "bases" / "own.safetensors", seed=8)
    node = node_of(node_with(place, home, 0, named))
    text = federated(how(tmp_path / "own.safetensors", digest))
    for ask in (node.permissions().describe, node.permissions().executor):
        with pytest.raises(Refusal) as refused:
            ask({"config": text})
        assert str(refused.value).startswith(line.format(digest=digest))
        assert "\n" not in str(refused.value)


def test_a_base_that_comes_later_counts_and_one_that_changes_does_not(place, tmp_path):
    digest = write_base(tmp_path / "own.safetensors")
    home, text = tmp_path / "node", federated(how(tmp_path / "own.safetensors", digest))
    node = node_of(node_with(place, home, 0, "bases"))
    with pytest.raises(Refusal, match="has no base"):
        node.permissions().describe({"config": text})
    write_base(home / "bases" / "own.safetensors")
    assert node.permissions().describe({"config": text})["counts"]["train"] == 30
    write_base(home / "bases" / "own.safetensors", seed=8)
    with pytest.raises(Refusal, match="has no base"):
        node_of(node_with(place, home, 0, "bases")).permissions().describe(
            {"config": text}
        )


@pytest.mark.parametrize("sha256", ["", 'sha256 = ""\n', "sha256 = false\n"])
def test_a_node_opens_no_file_that_the_server_names(
    place, tmp_path, monkeypatch, sha256
):
    """It would read files of the node, and tell whether they are there."""
    write_base(tmp_path / "own.safetensors")
    node = node_of(node_with(place, tmp_path / "node", 0, "bases"))
    text = federated(how(tmp_path / "own.safetensors"))
    text = text.replace("[algorithm]", f"{sha256}[algorithm]")
    opened = []
    monkeypatch.setattr(
        "fedblend.config.tables.adapt.hash_file", lambda path: opened.append(path)
    )
    with pytest.raises(Refusal, match=re.escape("adapt.sha256: is missing")):
        node.permissions().describe({"config": text})
    assert not opened


def test_limits_count_the_base(place, tmp_path):
    """Before it is read: the sizes follow from the configuration."""
    digest = write_base(tmp_path / "own.safetensors")
    whole = fb.trees.size(jax.eval_shape(MODEL.init, jax.random.key(0)))
    home = tmp_path / "node"
    write_base(home / "bases" / "own.safetensors")
    text = federated(how(tmp_path / "own.safetensors", digest))
    contract = contract_of(loads(text, "test"))
    assert limits.parameters(contract) == whole + ENTRIES
    refused = limits.too_large(Limits(memory_gb=(whole - 1) / 12.5e6), contract)
    assert refused == (
        f"policy limits.memory_gb: parameters of the base is {whole}; allowed: at "
        f"most {whole - 1}"
    )


def test_a_file_is_hashed_once(tmp_path, monkeypatch):
    file, read = tmp_path / "own.safetensors", []
    digest = write_base(file)
    plain = build.hash_file
    monkeypatch.setattr(
        build, "hash_file", lambda path: (read.append(path), plain(path))[1]
    )
    assert build.sha256_of(file) == build.sha256_of(file) == digest
    assert len(read) == 1
