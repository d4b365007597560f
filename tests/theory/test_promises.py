# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What is planned for a configuration holds when it is run, on the real datasets.

The objective is evaluated in NumPy, apart from what is run.
"""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedblend.config import toml
from fedblend.config.build import build
from fedblend.config.config import check
from fedblend.runs.plan.candidates import file_solvers
from fedblend.runs.plan.offers import offers
from fedblend.runs.plan.problem import problem
from fedblend.simulation.simulate import set_up
from fedblend.theory import bounds
from fedblend.theory.constants import stack_models
from fedblend.trees import precision
from flix_by_hand import Case, Logistic, known_of, mixed, newton

L2, ALPHA, SEEDS = 0.1, 0.5, 4
SETS = {
    "mushrooms": (56, 5e-2),
    "a6a": (62, 1e-2),
    "w6a": (150, 3e-3),
    "ijcnn1": (12, 1e-3),
}
"""The k of rand-k, about half of the parameters, and an accuracy beyond one shot."""


BOUNDS = {
    "dgd": lambda known, dim, k: bounds.dgd(known),
    "diana": lambda known, dim, k: bounds.diana(known, dim / k - 1),
}
"""From the constants, the number of parameters and k."""


def tables(name: str) -> dict:
    """A configuration that trains on a tenth of the rows, to be quick."""
    work = {"rate": 1.0, "steps": 1, "batch_size": "all"}
    solver = {"solver": "gradient_descent", "tolerance": 1e-9}
    rand_k = {"name": "rand_k", "k": SETS[name][0]}
    data = {"source": name, "partition": "contiguous", "clients": 6, "test": 0.9}
    return {
        "version": 1,
        "name": name,
        "data": data,
        "model": {"name": "logistic", "l2": L2},
        "algorithm": {"name": "flix", "alpha": 0.9, "personal": solver, **work},
        "compress": {"how": "diana", "compressor": rand_k},
        "run": {"rounds": 1, "precision": "float64"},
    }


def by_hand(federated_data, smoothness) -> Case:
    """The clients' functions in NumPy, and their minimizers."""
    functions = []
    for client in range(federated_data.clients):
        inputs, targets = federated_data.train.rows(client)
        ones = np.ones((len(inputs), 1))
        inputs = np.concatenate([np.asarray(inputs, np.float64), ones], axis=1)
        functions.append(Logistic(inputs, np.where(targets > 0, 1.0, -1.0), L2))
    start = np.zeros(functions[0].inputs.shape[1])
    personal = np.stack([newton(function, start) for function in functions])
    return Case(federated_data, functions, personal, smoothness)


QUICK = ("ijcnn1",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in SETS],
)
def test_every_round_is_below_its_bound(name, data_home):
    content = tables(name)
    found = problem(check(content, name))
    among = file_solvers(found)
    for made in offers(found, SETS[name][1], alpha=ALPHA, trials=False, among=among):
        solver, rounds = made.candidate.solver, made.worst
        sizes = found.dim, SETS[name][0]
        assert rounds is not None and made.certified is not None and made.bound
        assert rounds > 5
        wanted = copy.deepcopy(content)
        for setting in (
            f"algorithm.alpha={ALPHA}",
            "algorithm.rate=theory",
            f"run.rounds={rounds - 1}",
        ):
            toml.put(wanted, setting)
        if solver == "dgd":
            del wanted["compress"]
        with precision("float64"):
            built = build(check(wanted, name))
            case = by_hand(built.federated_data, found.smoothness)
            seeds = range(SEEDS if solver == "diana" else 1)
            keys = jnp.stack([jax.random.key(seed) for seed in seeds])
            run = set_up(dataclasses.replace(built.spec, key=keys, measure={}))
            iterates = dict((run.round, stack_models(run.shared)) for _ in run)
        known, f = known_of(case, ALPHA), mixed(case, ALPHA)
        np.testing.assert_allclose(iterates[0][0], known.average, atol=1e-6)
        least = f.solve()[1]
        bound = BOUNDS[solver](known, *sizes).value(np.arange(rounds))
        alone = mixed(case, 0.0)
        start = float(f.value(known.average) - alone.value(known.average))
        assert found.gap(known.alpha, known.average) == pytest.approx(start, rel=1e-6)
        near = BOUNDS[solver](bounds.start_at_gap(known, start), *sizes)
        closer = near.value(np.arange(rounds))
        assert made.certified.rounds < rounds
        for number, replicas in iterates.items():
            gap = np.mean([f.value(shared) for shared in replicas]) - least
            assert gap <= closer[number] + 1e-9, (solver, number)
            assert closer[number] <= bound[number]
        assert max(iterates) == rounds - 1
        assert closer[made.certified.rounds - 1] == pytest.approx(made.bound)
        assert made.bound is not None and made.bound <= SETS[name][1] >= bound[-1]
