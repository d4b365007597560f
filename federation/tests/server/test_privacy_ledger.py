# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a private run costs its clients, whatever happens to server and nodes."""

import json
import shutil
from functools import cache

import jax
import numpy as np
import pytest
from configured import (
    CLIENTS,
    experiment,
    federated,
    method,
    nodes,
    simulated,
    write_rows,
)

import fedblend as fb
from fedblend.config import toml
from fedblend.config.config import check
from fedblend.config.tables.privacy import report
from fedblend.errors import RunError
from fedblend.runs import run_folder
from fedblend.simulation.serialize import unpack
from fedblend.theory.privacy import cohort_cost
from fedblend_federation import message as messages
from fedblend_federation.server.run import run_server
from loopback import LoopbackFederation, LoopbackTransport
from problems import classes

ROUNDS = 3
SILENT = "[metrics]\nnames = []\n"
COST = {"noise": 0.3, "cohort": CLIENTS, "clients": CLIENTS, "delta": 1e-3}


def _refusing(round):
    def spoil(address, data):
        message = messages.decode(data)
        if (message.kind, message.round) != ("round", round):
            return [data]
        return [messages.encode(message.reply("refused", reason="away"))]

    return spoil


def _model(folder):
    return unpack((folder / "model.safetensors").read_bytes())[0]


def _gap(one, other):
    return max(np.abs(_model(one)[n] - a).max() for n, a in _model(other).items())


def test_the_ledger_survives_a_server_that_goes_on(tmp_path):
    place = write_rows(tmp_path)
    how = method("privacy", place, rounds=ROUNDS) + "[measure]\nlocal = false\n"
    how = how.replace('noise_from = "seed"', 'noise_from = "system"')
    undisturbed = experiment(tmp_path / "undisturbed", federated(how, 60.0))
    whole = run_server(
        undisturbed, LoopbackTransport(nodes(place, tmp_path / "one", SILENT)), poll=0.0
    )
    expected = cohort_cost(rounds=ROUNDS, **COST).epsilon
    simulation = check(toml.parse(simulated(how, place), "test"), "test")
    assert whole["privacy"] == report(simulation, CLIENTS, False)["privacy"]
    assert whole["privacy"]["epsilon"] == expected

    folder = experiment(tmp_path / "stopped", federated(how, 60.0))
    transport = LoopbackTransport(nodes(place, tmp_path / "other", SILENT))
    transport.spoil = _refusing(1)
    with pytest.raises(RunError, match="--resume"):
        run_server(folder, transport, poll=0.0)
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    shutil.copytree(tmp_path / "other", tmp_path / "third")
    transport.spoil = lambda address, data: [data]
    assert run_server(folder, transport, poll=0.0)["privacy"] == whole["privacy"]
    # No noise is drawn twice: the rounds before the stop differ, and those after.
    assert _gap(undisturbed, folder) > 1e-3

    # A checkpoint that is damaged: a round may be told again, and counts.
    (damaged / "server" / "checkpoint").write_bytes(b"no checkpoint")
    again = run_server(
        damaged, LoopbackTransport(nodes(place, tmp_path / "third", SILENT)), poll=0.0
    )
    assert again["privacy"]["epsilon"] == cohort_cost(rounds=ROUNDS + 1, **COST).epsilon
    assert again["privacy"]["epsilon"] > expected
    assert _gap(damaged, folder) > 1e-3
    assert run_folder.read_json(damaged / "server" / "experiment.json") == (
        run_folder.read_json(folder / "server" / "experiment.json")
    )


class Watching(LoopbackTransport):
    """Notes what the checkpoint on disk has when a model leaves the server."""

    def __init__(self, nodes, folder):
        super().__init__(nodes)
        self.path, self.seen = folder / "server" / "checkpoint", set()

    def send(self, outgoing):
        for data in outgoing.values():
            message = messages.decode(data)
            if message.kind in ("round", "measure"):
                _, words = unpack(self.path.read_bytes())
                saved = json.loads(words["state"])["round"]
                self.seen.add((message.kind, message.round, saved))
        super().send(outgoing)


def test_a_noisy_model_is_saved_before_anybody_gets_it(tmp_path):
    """A server that dies before has told nobody: the round that it repeats is one."""
    place = write_rows(tmp_path)
    how = method("privacy", place, rounds=ROUNDS) + "[measure]\nlocal = false\n"
    how = how.replace('noise_from = "seed"', 'noise_from = "system"')
    folder = experiment(tmp_path / "run", federated(how, 60.0))
    transport = Watching(nodes(place, tmp_path, SILENT), folder)
    run_server(folder, transport, poll=0.0)
    assert {("round", n, n) for n in range(ROUNDS)} <= transport.seen
    assert all(round == saved for _, round, saved in transport.seen)


def _asked(noise: float, folder) -> list[set[int]]:
    """The clients that are asked in each round, with one spare."""
    on = _problem()
    plain = fb.fedavg(on.loss, fb.Work(0.2, steps=1, batch_size=2))
    loopback = LoopbackFederation(
        fb.transforms.dp_fedavg(plain, clip=0.05, noise=noise, cohort=1),
        on.params,
        on.federated_data,
        jax.random.key(0),
        folder,
        rounds=8,
        cohort=1,
        spare=1,
    )
    found = [set() for _ in range(8)]
    reply = loopback.transport.send

    def send(outgoing):
        for data in outgoing.values():
            message = messages.decode(data)
            if message.kind == "round":
                found[message.round].add(message.client)
        reply(outgoing)

    loopback.transport.send = send
    server = loopback.server()
    while server.round < 8:
        server.step()
    return found


def test_no_node_that_knows_the_seed_knows_who_else_takes_part(tmp_path):
    """Two of four are asked, one of them a spare: both may be in the sum."""
    one, other = (_asked(2.0, tmp_path / name) for name in ("one", "other"))
    assert one != other
    assert {len(members) for members in one + other} == {2}
    quiet, again = (_asked(0.0, tmp_path / name) for name in ("quiet", "again"))
    assert quiet == again


@cache
def _problem():
    return classes((3, 1, 4, 2))


def _after_a_round(noise: float, missing: bool, folder):
    """The shared model after one round; ``missing``: client 2 is not heard."""
    on = _problem()
    plain = fb.fedavg(on.loss, fb.Work(0.2, steps=2, batch_size=2))
    private = fb.transforms.dp_fedavg(
        plain, clip=0.05, noise=noise, cohort=4, noise_from="seed"
    )
    loopback = LoopbackFederation(
        private,
        on.params,
        on.federated_data,
        jax.random.key(0),
        folder,
        rounds=1,
        cohort=4,
        quorum=0.5,
    )
    if missing:
        silent = _refusing(0)
        loopback.transport.spoil = lambda at, d: silent(at, d) if at == 1002 else [d]
    server = loopback.server()
    while server.round < 1:
        server.step()
    assert server.interval["received"] == 4 - missing
    return jax.device_get(server.shared)


def test_whoever_is_missing_the_noise_is_what_was_planned(tmp_path):
    noises = []
    for missing in (False, True):
        noisy, quiet = (
            _after_a_round(noise, missing, tmp_path / f"{noise}-{missing}")
            for noise in (2.0, 0.0)
        )
        noises.append(jax.tree.map(lambda one, other: one - other, noisy, quiet))
    everybody, fewer = map(jax.tree.leaves, noises)
    for one, other in zip(everybody, fewer, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    entries = np.concatenate([np.ravel(leaf) for leaf in everybody])
    assert np.abs(entries).max() > 1e-2
