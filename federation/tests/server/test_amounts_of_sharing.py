# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The hierarchical model on nodes: the amount of sharing, and noise for few rows."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from configured import experiment, few

import fedblend as fb
from fedblend.errors import RunError
from fedblend.selection.one_letter import solve_models, write_letters
from fedblend_federation.client.node import node_of
from fedblend_federation.ops.settings import NodeSettings, load_as
from fedblend_federation.server.run import run_server
from loopback import LoopbackTransport

AMOUNTS = ((0.0, 0.0), (0.3, 0.0), (0.3, 0.1), (100.0, 100.0))
OPEN = few('[accept]\nalgorithms = ["hierarchical"]\n[metrics]\nround_to = 12\n')
CLIENTS, ROWS, INPUTS = 6, 40, 3


def write_rows(folder: Path, rows: int = ROWS, inputs: int = INPUTS):
    """Nodes with levels of their own and equal slopes; all rows in one place, too."""
    draw = np.random.default_rng(3)
    x = draw.normal(size=(CLIENTS * rows, inputs)).astype(np.float32)
    level = np.repeat(draw.normal(size=CLIENTS), rows)
    y = (x.sum(axis=1) + level + draw.normal(size=len(x))).astype(np.float32)
    for client, own in enumerate(np.split(np.arange(len(x)), CLIENTS)):
        np.savez(folder / f"rows{client}.npz", inputs=x[own], targets=y[own])
    return x, y


def nodes(place: Path, policy: str):
    found = {}
    for client in range(CLIENTS):
        home = place / f"node{client}"
        home.mkdir()
        (home / "policy.toml").write_text(policy)
        (home / "node.toml").write_text(
            f'version = 1\nserver = "127.0.0.1:8000"\nclient = {client}\nca = "ca"\n'
            f'key = "key"\nfolder = "state"\npolicy = "policy.toml"\n'
            f'[data]\nfile = "{place / f"rows{client}.npz"}"\n'
        )
        settings = load_as(NodeSettings, home / "node.toml")
        found[100 + client] = node_of(settings)
    return found


def run_amount(place: Path, there, level: float, slopes: float, inputs: int = INPUTS):
    """The mean score of personal models that nodes report after a single round."""
    name = f"level-{level}-slopes-{slopes}"
    text = f"""
version = 1
name = "{name}"
[data]
partition = "nodes"
clients = {CLIENTS}
kind = "regression"
shape = [{inputs}]
test = 0.25
seed = 0
[model]
name = "softmax"
[algorithm]
name = "hierarchical"
rate = 1.0
steps = 1
batch_size = "all"
level = {level}
slopes = {slopes}
[run]
rounds = 1
weights = "uniform"
[measure]
local = false
"""
    done = run_server(
        experiment(place / name, text), LoopbackTransport(there), poll=0.0
    )
    return done["runs"][0]["measures"]["test"]["personal"]["loss"]["mean"]


def test_reported_scores_of_some_amounts_choose_the_amount_of_sharing(tmp_path):
    """Each is one round; the choice is that of cross-validation on all rows."""
    x, y = write_rows(tmp_path)
    there = nodes(tmp_path, OPEN)
    scores = [run_amount(tmp_path, there, *amount) for amount in AMOUNTS]
    parts = np.split(np.arange(len(x)), CLIENTS)
    letter = fb.one_letter(fb.federate((x, y), parts))
    errors = []
    for amount in AMOUNTS:
        one = fb.one_letter(
            fb.federate((x, y), parts), level=amount[0], slopes=amount[1]
        )
        errors.append(one.errors.mean())
    best = int(np.argmin(scores))
    assert best == int(np.argmin(errors)) and AMOUNTS[best] == (0.3, 0.0)
    assert errors[best] < 1.01 * letter.errors.mean(axis=1).min()
