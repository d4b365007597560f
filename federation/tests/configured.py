# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Experiments by configuration, on nodes and in a simulation, and what both come to."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

import example_arguments as examples
from fedblend.config import toml
from fedblend.config.build import build
from fedblend.config.config import check, dump
from fedblend.runs import run_folder
from fedblend.simulation.run import Run
from fedblend.simulation.serialize import name_leaves, unpack
from fedblend.simulation.simulate import set_up
from fedblend_federation.client.node import node_of
from fedblend_federation.ops.settings import NodeSettings, load_as

CLIENTS, ROWS = 3, (40, 25, 33)
OPEN = '[accept]\nalgorithms = "any"\ndiscloses = ["upload", "constants"]\n'
FEW = {
    "accept": {"fewest_rows": 0, "min_batch_rows": 0},
    "rows": {"changes": ["split"]},
    "protect": {"rows": {"noise": 0.0}},
}
"""Of nodes with few rows, which compute what a simulation does."""


def few(policy: str) -> str:
    """The policy, for nodes that have few rows."""
    tables: dict[str, Any] = toml.parse(policy, "test")
    for name, defaults in FEW.items():
        tables[name] = defaults | tables.get(name, {})
    told = tables["accept"].get("discloses", [])
    tables["accept"]["discloses"] = [*told, "batches"]
    return "".join(
        f"[{name}]\n"
        + "".join(f"{key} = {toml.literal(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    )


POLICY = few(OPEN + "[metrics]\nround_to = 12\n")
WORK = "rate = 0.3\nsteps = 3\nbatch_size = 8\n"
OWN = (
    'personal = { solver = "sgd", rate = 0.1, steps = 5, batch_size = 8, turns = 3 }\n'
)
ALGORITHMS = {
    "fedavg": "",
    "fedopt": 'server = { name = "adam", rate = 0.05 }\n',
    "fedprox": "mu = 0.1\n",
    "scaffold": "",
    "svrg": "refresh = 0.5\n",
    "local_only": "",
    "finetune": "finetune = { rate = 0.1, steps = 2, batch_size = 8 }\n",
    "flix": "alpha = 0.5\n" + OWN,
    "flix_local_steps": 'alpha = 0.5\nmix = "outputs"\n' + OWN,
    "apfl": "alpha = 0.5\n",
    "apfl_agnostic": "alpha = 0.5\nq_rate = 0.1\n",
    "reptile": "server = 0.5\n",
    "fomaml": "server = 0.5\n",
    "perfedavg": "inner_rate = 0.1\n",
    "pfedme": "inner_rate = 0.1\ninner_steps = 2\nlam = 1.0\n",
    "ditto": "lam = 0.5\npersonal = { rate = 0.1, steps = 2, batch_size = 8 }\n",
    "l2gd": "lam = 0.5\n",
    "partial": 'personal = ["bias"]\npersonal_steps = 2\n',
    "agnostic": "q_rate = 0.1\n",
    "mapper": "",
}
ALGORITHMS |= {
    name: "".join(
        f"{key} = {toml.literal(value)}\n"
        for key, value in examples.options(name).items()
    )
    for name in examples.DISTINCT
    if name not in ALGORITHMS and name not in examples.ON_ADAPTERS
}
"""What every algorithm needs beside the work of a client."""
LINEAR = 'name = "softmax"\n'
NETWORK = 'name = "mlp"\nhidden = [4]\n'
"""Of FLIX: with a linear model a simulation starts where smoothness constants say, and
nobody in a federation has the rows to compute these."""
FEDAVG = f'[algorithm]\nname = "fedavg"\n{WORK}'
COMPRESSED = '[compress]\nhow = "{how}"\ncompressor = {{ name = "{name}", k = 4 }}\n'
PRIVATE = "[privacy]\nclip = 0.5\nnoise = 0.3\ndelta = 1e-3\n"
CENTRAL = '[central]\nhow = "{how}"\nfile = "{file}"\nbatch_size = 4\ntest = 0.0\n'


def tables(name: str, place: Path) -> str:
    """The tables of a case: an algorithm, or FedAvg with something around it."""
    if name in ALGORITHMS:
        work = WORK.replace("steps = 3", "steps = 1") if name == "flix" else WORK
        return f'[algorithm]\nname = "{name}"\n{work}{ALGORITHMS[name]}'
    kind, _, how = name.partition(" ")
    if kind == "compress":
        compressor = "top_k" if how == "ef21" else "rand_k"
        return FEDAVG + COMPRESSED.format(how=how, name=compressor)
    if kind == "central":
        return FEDAVG + CENTRAL.format(how=how, file=place / "server.npz")
    return FEDAVG + PRIVATE + 'noise_from = "seed"\n'


AROUND = (
    "compress plain",
    "compress diana",
    "compress ef21",
    "central parallel",
    "central one_way",
    "central two_way",
    "privacy",
)
CASES = (*ALGORITHMS, *AROUND)


def apfl_on_nodes(name: str, clients: int, rounds: int) -> str:
    """The configuration of an experiment, all tables but ``[federation]``."""
    return f"""
version = 1
name = "{name}"
[data]
partition = "nodes"
clients = {clients}
kind = "classes"
classes = 3
shape = [6]
test = 0.25
[model]
name = "softmax"
[algorithm]
name = "apfl"
rate = 0.3
steps = 3
batch_size = 8
alpha = 0.5
[run]
rounds = {rounds}
every = {rounds}
[measure]
local = false
"""


def method(name: str, place: Path, rounds: int) -> str:
    """All tables but ``[data]``."""
    return (
        f"[model]\n{NETWORK if name.startswith('flix') else LINEAR}l2 = 0.01\n"
        + tables(name, place)
        + f"[run]\nrounds = {rounds}\nevery = {rounds}\nchunk = 1\nseed = 5\n"
    )


def federated(how: str, deadline: float = 5.0) -> str:
    """The configuration of a federation."""
    return (
        'version = 1\nname = "nodes"\n[data]\npartition = "nodes"\n'
        f'clients = {CLIENTS}\nkind = "classes"\nclasses = 3\nshape = [6]\n'
        "test = 0.25\nseed = 2\n"
        f"[federation]\ndeadline = {deadline}\nresend = {deadline / 5}\n{how}"
    )


def simulated(how: str, place: Path) -> str:
    """The configuration of its simulation."""
    return (
        f'version = 1\nname = "one"\n[data]\nfile = "{place / "all.npz"}"\n'
        f'partition = "by_key"\nkind = "classes"\ntest = 0.25\nseed = 2\n{how}'
    )


def write_rows(folder: Path) -> Path:
    """Rows of each node in a file of its own, those of all in one, the server's own."""
    rng = np.random.default_rng(0)
    all_rows = []
    for client, count in enumerate((*ROWS, 20)):
        targets = rng.integers(0, 3, count)
        inputs = rng.normal(size=(count, 6)) + targets[:, None]
        arrays: dict[str, Any] = {
            "inputs": inputs.astype(np.float32),
            "targets": targets,
        }
        if client == CLIENTS:
            np.savez(folder / "server.npz", **arrays)
            break
        np.savez(folder / f"rows{client}.npz", **arrays)
        all_rows.append({**arrays, "clients": np.full(count, client)})
    joined: dict[str, Any] = {
        name: np.concatenate([rows[name] for rows in all_rows]) for name in all_rows[0]
    }
    np.savez(folder / "all.npz", **joined)
    return folder


def settings_of(place: Path, home: Path, client: int, policy: str) -> NodeSettings:
    """The settings of a node with a folder of its own, and few rows."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "policy.toml").write_text(few(policy))
    (home / "node.toml").write_text(
        f'version = 1\nserver = "127.0.0.1:8000"\nclient = {client}\nca = "ca"\n'
        f'key = "key"\nfolder = "state"\npolicy = "policy.toml"\n'
        f'[data]\nfile = "{place / f"rows{client}.npz"}"\n'
    )
    return load_as(NodeSettings, home / "node.toml")


def nodes(place: Path, folder: Path, policy: str = POLICY) -> dict:
    """Three nodes with folders of their own."""
    return {
        100 + client: node_of(
            settings_of(place, folder / f"node{client}", client, policy)
        )
        for client in range(CLIENTS)
    }


def experiment(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    config = check(toml.parse(text, "test"), "test")
    (folder / "config.toml").write_text(dump(config))
    return folder


def simulation(text: str) -> Run:
    """A configuration run on one machine."""
    built = build(check(toml.parse(text, "test"), "test"))
    return set_up(built.spec).complete()


def sends_at_enrollment(text: str) -> bool:
    """Whether clients of a configuration send something when they enroll."""
    built = build(check(toml.parse(text, "test"), "test"))
    shard, key = built.federated_data.train.shard(0), jax.random.key(0)
    params = jax.eval_shape(built.model.init, key)
    join, _ = jax.eval_shape(built.algorithm.enroll, params, shard, key)
    return bool(jax.tree.leaves(join))


def largest_gap(out: Path, homes: list[Path], there: Run) -> float:
    """The largest difference of a number in any model; bits are the same."""
    (summary,) = run_folder.read_summary(run_folder.Folder(out))["runs"]
    assert summary["bits"] == there.summary()["bits"]
    mine, _ = unpack((out / "model.safetensors").read_bytes())
    gaps = [_gap(mine, there.shared)]
    for client, home in enumerate(homes):
        model, _ = unpack(newest(home).read_bytes())
        gaps.append(_gap(model, there.personal(client)))
    return max(gaps)


def newest(home: Path) -> Path:
    """The model of the experiment that was last on a node."""
    models = home.glob("state/*/personal.safetensors")
    return max(models, key=lambda path: path.stat().st_mtime_ns)


def _gap(mine: dict[str, np.ndarray], model: Any) -> float:
    theirs = {name: np.asarray(leaf) for name, leaf in name_leaves(model).items()}
    assert set(mine) == set(theirs)
    gaps = [float(np.abs(mine[name] - theirs[name]).max()) for name in theirs]
    return max(gaps, default=0.0)
