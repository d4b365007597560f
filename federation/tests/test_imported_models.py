# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Code of one's own on nodes: only what a node's policy lists is imported."""

import sys

import numpy as np
import pytest
import torch
from configured import (
    CLIENTS,
    OPEN,
    POLICY,
    experiment,
    federated,
    largest_gap,
    nodes,
    settings_of,
    simulated,
    simulation,
    write_rows,
)

import fedblend as fb
from fedblend.simulation.serialize import unpack
from fedblend_federation.client.node import node_of
from fedblend_federation.policy.policy import Accept, Policy, Refusal
from fedblend_federation.server.run import run_server
from loopback import LoopbackTransport

MODULE = """
import torch
from fedblend.algorithms.fedavg import fedavg


def network(shape, outputs):
    hidden = torch.nn.Linear(shape[0], 4)
    return torch.nn.Sequential(hidden, torch.nn.Tanh(), torch.nn.Linear(4, outputs))


def method(loss, work):
    return fedavg(loss, work)
"""
MODEL, METHOD = "node_code:network", "node_code:method"
LISTED = POLICY.replace(
    "[accept]\n", f'[accept]\nimports = ["{MODEL}", "{METHOD}"]\n', 1
)


def tables(model: str, algorithm: str, more: str = "") -> str:
    return (
        f'[model]\nname = "{model}"\n[algorithm]\nname = "{algorithm}"\n{more}'
        "rate = 0.3\nsteps = 3\nbatch_size = 8\n"
        "[run]\nrounds = 2\nevery = 2\nchunk = 1\nseed = 5\n[measure]\nlocal = false\n"
    )


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A module on the path, which nobody has imported yet."""
    (tmp_path / "node_code.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "node_code", raising=False)
    yield tmp_path
    sys.modules.pop("node_code", None)


@pytest.mark.parametrize(
    ("model", "algorithm", "key"),
    [(MODEL, "fedavg", "model.name"), ("softmax", METHOD, "algorithm.name")],
)
def test_a_node_imports_nothing_that_its_policy_does_not_list(
    code, model, algorithm, key
):
    place = write_rows(code)
    node = settings_of(place, code / "node", 0, OPEN)
    text = federated(tables(model, algorithm))
    with pytest.raises(Refusal, match=rf"^policy accept.imports: {key} is node_code:"):
        node_of(node).permissions().describe({"config": text})
    with pytest.raises(Refusal, match=r"accept.imports: .*; allowed: none$"):
        node_of(node).permissions().executor({"config": text})
    assert "node_code" not in sys.modules


def test_a_server_names_no_folder_to_import_from(code):
    policy = Policy(accept=Accept(imports=[METHOD]))
    text = federated(tables("softmax", METHOD, f'import_from = "{code}"\n'))
    refused = policy.import_refusal(text)
    assert refused and "algorithm.import_from is a folder; allowed: none" in refused
    assert "node_code" not in sys.modules


@pytest.mark.slow
def test_a_listed_pytorch_model_trains_on_nodes_as_in_a_simulation(code):
    """And the personal model on a node's disk loads into the module."""
    place = write_rows(code)
    how = tables(MODEL, METHOD)
    run = experiment(code / "run", federated(how))
    homes = [code / f"node{client}" for client in range(CLIENTS)]
    run_server(run, LoopbackTransport(nodes(place, code, LISTED)), poll=0.0)
    there = simulation(simulated(how, place))
    assert largest_gap(run, homes, there) < 1e-5
    shared, _ = unpack((run / "model.safetensors").read_bytes())
    net = sys.modules["node_code"].network((6,), 3)
    net.load_state_dict(fb.models.state_dict(shared, net))
    rows = np.load(place / "rows0.npz")["inputs"]
    model = fb.models.from_torch(net, rows[:2])
    scores = net(torch.from_numpy(rows)).detach().numpy()
    expected = model.apply(there.shared, rows)
    np.testing.assert_allclose(scores, expected, atol=1e-5)
