# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What nodes describe of their rows, and what the method makes of it: FLIX starts where
its simulation does."""

from pathlib import Path

import numpy as np
import pytest
from configured import (
    CLIENTS,
    experiment,
    federated,
    few,
    largest_gap,
    nodes,
    settings_of,
    simulated,
    simulation,
    write_rows,
)

from fedblend.errors import ConfigError
from fedblend_federation import message as messages
from fedblend_federation.client.node import node_of
from fedblend_federation.server.run import run_server
from loopback import LoopbackTransport

SILENT = '[accept]\nalgorithms = "any"\n{more}[metrics]\nnames = []\n'
TELLS, KEEPS = (
    SILENT.format(more=more) for more in ('discloses = ["constants"]\n', "")
)


class Recorded(LoopbackTransport):
    """A transport that records all messages, both ways."""

    def __init__(self, found):
        super().__init__(found)
        self.requests, self.replies = [], []
        self.spoil = self._record

    def send(self, outgoing):
        self.requests += [
            (messages.decode(data), len(data)) for data in outgoing.values()
        ]
        super().send(outgoing)

    def _record(self, address, data):
        self.replies.append((messages.decode(data), len(data)))
        return [data]


PERSONAL = {
    "sgd": "rate = 0.1, steps = 5, batch_size = 8, turns = 3",
    "lbfgs": "tolerance = 1e-3, most = 50",
    "gradient_descent": "tolerance = 1e-3, most = 50",
}


def flix(
    solver: str, rate: str = "0.1", rounds: int = 2, name: str = "flix", steps: int = 1
) -> str:
    return (
        '[model]\nname = "softmax"\nl2 = 0.05\n'
        f'[algorithm]\nname = "{name}"\nalpha = [0.3, 0.5, 0.9]\nrate = {rate}\n'
        f'steps = {steps}\nbatch_size = "all"\n'
        f'personal = {{ solver = "{solver}", {PERSONAL[solver]} }}\n'
        f"[run]\nrounds = {rounds}\nevery = {max(rounds, 1)}\nchunk = 1\nseed = 5\n"
        "[measure]\nlocal = false\n"
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows"))


def homes(folder: Path) -> list[Path]:
    return [folder / f"node{client}" for client in range(CLIENTS)]


@pytest.mark.parametrize(
    ("solver", "rate", "method"),
    [
        ("gradient_descent", '"theory"', {}),
        pytest.param(
            *("gradient_descent", '"theory"', {"name": "scafflix", "steps": 3}),
            marks=pytest.mark.slow,
        ),
        pytest.param("lbfgs", "0.1", {}, marks=pytest.mark.slow),
    ],
)
def test_flix_on_linear_models_starts_and_ends_as_in_a_simulation(
    solver, rate, method, place, tmp_path
):
    how = flix(solver, rate, **method)
    transport = Recorded(nodes(place, tmp_path, TELLS))
    run_server(experiment(tmp_path / "run", federated(how, 60.0)), transport, poll=0.0)  # pyright: ignore
    there = simulation(simulated(how, place))
    assert largest_gap(tmp_path / "run", homes(tmp_path), there) <= 1e-6
    # No node hears the constants of another, and the rate only where it is asked for.
    terms = [
        message.fields for message, _ in transport.requests if message.kind == "enroll"
    ]
    assert all(words["constants"] is True for words in terms)
    assert all((words["rates"] is None) == (rate == "0.1") for words in terms)
    met = [
        message.fields["constants"]
        for message, _ in transport.replies
        if message.kind == "describe"
    ]
    smooth = np.array([constants[0] for constants in met])
    assert len(set(smooth)) == CLIENTS and not any(
        str(one) in str(terms) for one in smooth
    )


def test_where_one_node_withholds_constants_all_weigh_by_alpha(place, tmp_path):
    how = flix("sgd", rounds=0)
    found = nodes(place, tmp_path, TELLS)
    (tmp_path / "node1" / "policy.toml").write_text(few(KEEPS))
    transport = Recorded(found)
    run_server(experiment(tmp_path / "run", federated(how, 60.0)), transport, poll=0.0)  # pyright: ignore
    joins = [message for message, _ in transport.replies if message.kind == "enroll"]
    weights = {
        join.client: [float(a) for a in join.arrays.values() if a.ndim == 0]
        for join in joins
    }
    for client, alpha in enumerate((0.3, 0.5, 0.9)):
        assert weights[client] == [pytest.approx(alpha**2)]
    audit = (tmp_path / "run" / "audit.jsonl").read_text()
    assert "constants withheld" in audit
    meets = [message for message, _ in transport.replies if message.kind == "describe"]
    assert ["constants" in message.fields for message in meets] == [True, False, True]


def test_constants_of_few_rows_or_beside_a_clip_are_withheld(place, tmp_path):
    words = {"config": federated(flix("sgd"))}

    def met(policy: str, words: dict = words) -> messages.Message:
        node = node_of(settings_of(place, tmp_path, 1, policy))
        message = messages.Message("describe", "one", messages.UNKNOWN, fields=words)
        return messages.decode(node.reply(messages.encode(message, ())))

    assert "constants" in met(TELLS).fields
    assert "constants" not in met(TELLS + "[protect]\nclip = 1.0\n").fields
    enough = TELLS.replace("[accept]\n", "[accept]\nfewest_rows = 10\n")
    assert "constants" in met(enough).fields
    # With this part held out one of the 25 rows is left, which constants would tell.
    one = {"config": words["config"].replace("test = 0.25", "test = 0.96")}
    said = met(enough, one)
    assert said.kind == "refused"
    assert said.fields["reason"] == (
        "policy accept.fewest_rows: training rows is fewer; allowed: at least 10"
    )


@pytest.mark.parametrize(
    ("solver", "rate", "key"),
    [
        ("sgd", '"theory"', r'algorithm\.rate: "theory"'),
        ("gradient_descent", "0.1", r'personal\.solver: "gradient_descent"'),
    ],
)
def test_what_needs_constants_names_who_withholds_them(
    solver, rate, key, place, tmp_path
):
    found = nodes(place, tmp_path, KEEPS)
    run = experiment(tmp_path / "run", federated(flix(solver, rate), 60.0))
    with pytest.raises(ConfigError, match=key + r".*clients \[0, 1, 2\] withhold"):
        run_server(run, LoopbackTransport(found), poll=0.0)
