# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``advise`` on problems whose answers are known beforehand.

On quadratics they are linear algebra: with one step of full gradients parallel training
and one-way transfer are the same, and with eight on alike clients parallel training
stalls off the optimum, which transfers reach. On digits they are from runs of
``mixed_fl`` itself, six to eight rates for each method, with eight seeds where there
is chance, after as many rounds as here. The best mixed losses of parallel, one_way and
two_way, with their standard errors: on few rows with full gradients 0.197, 0.488,
0.097; with batches of 64 at the server 0.220 (0.009), 0.511 (0.023), 0.097 (0.004); of
2 rows 0.433 (0.018), 1.171 (0.031), 0.304 (0.012).
"""

import jax
import numpy as np
import pytest

from fedblend.config.config import check
from fedblend_reproductions.mixed.advise import FACTORS, advise

X = np.array([[1.5, 0.3], [0.2, 0.5]], np.float32)
OWN = np.array([[0.4, -0.2], [0.3, 1.6]], np.float32)
WANTS, OWN_WANTS = np.array([[1, 2], [-2, -1]], np.float32)
RATE = 0.1


@pytest.fixture(autouse=True)
def what_is_compiled_is_kept(tmp_path):
    """As the command does: tuning and trials are one program."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path / "jax"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def quadratic(inputs, targets):
    """1/2 mean (x w - y)^2 as a matrix, a vector and a constant."""
    inputs, targets = inputs.astype(float), targets.astype(float)
    count = len(inputs)
    return (
        inputs.T @ inputs / count,
        inputs.T @ targets / count,
        targets @ targets / count / 2,
    )


def value(of, w):
    matrix, vector, constant = of
    return 0.5 * w @ matrix @ w - vector @ w + constant


def mean(*several):
    return tuple(sum(parts) / len(several) for parts in zip(*several, strict=True))


def least(of):
    return value(of, np.linalg.solve(of[0], of[1]))


def table(path, clients):
    lines = ["client,a,b,target"]
    for number, (inputs, targets) in enumerate(clients):
        for (a, b), y in zip(inputs.tolist(), targets.tolist(), strict=True):
            lines.append(f"c{number},{a!r},{b!r},{y!r}")
    path.write_text("\n".join(lines) + "\n")


def quadratics(folder, clients, steps, rate, rounds, own=(OWN, OWN @ OWN_WANTS)):
    """A configuration with these clients, each of equal weight, in float64."""
    table(folder / "clients.csv", clients)
    table(folder / "server.csv", [own])
    own = {"inputs": ["a", "b"], "kind": "regression", "client": "client"}
    # The closed forms are about the numbers as they are.
    own["preprocess"] = "none"
    content = {
        "version": 1,
        "name": "quadratics",
        "data": {
            "file": "clients.csv",
            "target": "target",
            **own,
            "partition": "by_key",
            "test": 0.0,
        },
        "model": {"name": "softmax", "intercept": False},
        "algorithm": {
            "name": "fedavg",
            "rate": rate,
            "steps": steps,
            "batch_size": "all",
        },
        "central": {
            "how": "parallel",
            "file": "server.csv",
            "steps": steps,
            "test": 0.0,
        },
        "run": {"rounds": rounds, "precision": "float64", "weights": "uniform"},
        "measure": {"local": False},
    }
    return check(content, "here", folder)


def standstill(client, server, rate, steps):
    """Where parallel training of alike clients ends, by linear algebra."""
    moves = [
        np.eye(2) - np.linalg.matrix_power(np.eye(2) - rate * of[0], steps)
        for of in (client, server)
    ]
    wants = [
        move @ np.linalg.solve(of[0], of[1])
        for move, of in zip(moves, (client, server), strict=True)
    ]
    return np.linalg.solve(sum(moves), sum(wants))


@pytest.mark.slow
def test_eight_steps_on_quadratics_that_disagree_ask_for_a_transfer(tmp_path):
    client, server = quadratic(X, X @ WANTS), quadratic(OWN, OWN @ OWN_WANTS)
    both = mean(client, server)
    found = advise(quadratics(tmp_path, [(X, X @ WANTS)] * 2, 8, RATE, 160))
    ends = {how: one.loss.mean() for how, one in found.trials.items()}
    stalls = [
        value(both, standstill(client, server, factor * RATE, 8)) for factor in FACTORS
    ]
    assert min(stalls) > 1.0005 * least(both)
    assert found.how == "one_way"
    assert ends["one_way"] == pytest.approx(least(both), rel=1e-9)
    assert ends["two_way"] == pytest.approx(least(both), rel=1e-9)
    assert ends["parallel"] == pytest.approx(min(stalls), rel=1e-6)


@pytest.mark.slow
def test_one_full_step_makes_all_methods_alike_and_the_cheapest_is_advised(tmp_path):
    # Clients that differ, also in rows; both count alike, and long rates diverge.
    clients = [(X, X @ WANTS), (X[[0, 0, 0]], X[[0, 0, 0]] @ (4 * WANTS))]
    f = mean(*(quadratic(*rows) for rows in clients))
    both = mean(f, quadratic(OWN, OWN @ OWN_WANTS))
    found = advise(quadratics(tmp_path, clients, 1, 0.5, 250))
    assert found.how == "parallel"
    assert "cannot be told apart from one_way" in found.why
    for one in found.trials.values():
        assert one.loss.mean() == pytest.approx(least(both), rel=1e-9)


def digits(rate, batch_size, central_batch, rounds, clients=4, test=0.2):
    """Clients have the digits 0 to 4, the server 5 to 9; eight steps on either side."""
    held = {"classes": [5, 6, 7, 8, 9], "test": test}
    central = {"how": "parallel", "steps": 8, **held}
    if central_batch:
        central["batch_size"] = central_batch
    content = {
        "version": 1,
        "name": "digits",
        "data": {
            "source": "digits",
            "partition": "iid",
            "clients": clients,
            "test": test,
        },
        "model": {"name": "softmax"},
        "algorithm": {
            "name": "fedavg",
            "rate": rate,
            "steps": 8,
            "batch_size": batch_size,
        },
        "central": central,
        "run": {"rounds": rounds},
        "measure": {"local": False},
    }
    return check(content, "here")


@pytest.mark.slow
def test_digits_that_only_the_server_has():
    found = advise(digits(0.25, "all", None, 10, clients=2, test=0.8))
    ends = {how: one.loss.mean() for how, one in found.trials.items()}
    assert found.how == "two_way"
    assert ends["two_way"] == pytest.approx(0.171, abs=0.002)
    assert ends["parallel"] == pytest.approx(0.244, abs=0.002)
    assert ends["one_way"] == pytest.approx(0.488, abs=0.002)
    assert "central.batch_size" not in found.why


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "central_batch", "rounds"), [(1.0, 64, 12), (0.25, 2, 15)]
)
def test_batches_at_the_server_from_which_one_way_suffers(rate, central_batch, rounds):
    found = advise(digits(rate, 16, central_batch, rounds))
    ends = {how: one.loss.mean() for how, one in found.trials.items()}
    assert found.how == "two_way"
    assert ends["one_way"] > 2 * ends["two_way"]
    assert "a larger central.batch_size may help one_way" in found.why
