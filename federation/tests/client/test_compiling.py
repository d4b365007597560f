# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Rounds after the first ones find everything compiled, on both sides."""

from collections import Counter

import jax
import pytest
from configured import experiment, federated, method, nodes, write_rows

from fedblend_federation import message as messages
from fedblend_federation.server.run import run_server
from loopback import LoopbackTransport

COMPILING = "/jax/core/compile/"
SILENT = '[accept]\nalgorithms = "any"\n[metrics]\nnames = []\n'


class Watched(LoopbackTransport):
    """A post that knows whose work is done right now; client 1 misses a round."""

    def __init__(self, found, away: int):
        super().__init__(found)
        self.side, self.away = "server", away
        self.spoil = self._refusing

    def send(self, outgoing):
        self.side = "nodes"
        super().send(outgoing)
        self.side = "server"

    def _refusing(self, address, data):
        message = messages.decode(data)
        if (message.kind, message.client, message.round) != ("round", 1, self.away):
            return [data]
        return [messages.encode(message.reply("refused", reason="away"))]


@pytest.mark.parametrize(
    "name",
    ["fedavg", "apfl", pytest.param("compress diana", marks=pytest.mark.slow)],
)
def test_nothing_is_compiled_after_the_second_round(name, tmp_path):
    how = method(name, write_rows(tmp_path), rounds=5) + "[measure]\nlocal = false\n"
    how = how.replace("every = 5", "every = 1")
    if name == "fedavg":
        how = how.replace("seed = 5", 'seed = 5\nreduction = "median"')
    text = federated(how).replace("resend", "quorum = 0.5\nresend")
    transport, made = Watched(nodes(tmp_path, tmp_path, SILENT), away=3), Counter()
    rounds: list[Counter] = []

    def hear(event: str, duration_secs: float, **kwargs) -> None:
        del duration_secs, kwargs
        made[transport.side] += event.startswith(COMPILING)

    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        summary = run_server(
            experiment(tmp_path / "run", text),
            transport,  # pyright: ignore
            poll=0.0,
            on_step=lambda round, last: rounds.append(Counter(made)),
        )
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)
    (run,) = summary["runs"]
    assert (run["round"], run["dropped"]) == (5, 1)
    assert all(rounds[1][side] > 0 for side in ("server", "nodes"))
    assert rounds[2:] == [rounds[2]] * 4
