# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Example arguments and options of every registered algorithm, from its rules.

An algorithm that is registered is thereby in every suite that goes through all of them:
the contract, configurations, runs, federations, policies.
"""

import inspect
from typing import Any

import fedblend as fb
from fedblend.checks import FLAG, Number, Paths, Rule, Words
from fedblend.compress.compressor import COMPRESSOR
from fedblend.config.tables.adapt import ADAPTERS
from fedblend.core import Algorithm, Loss
from fedblend.local import OPTIMIZER, Work
from fedblend.registry import ALGORITHMS, FACTS, AlgorithmEntry
from fedblend.solvers import SOLVER

DISTINCT = [name for name, entry in ALGORITHMS.items() if not entry.preset_of]
"""Without presets, whose messages and states are those of another algorithm."""
ON_ADAPTERS = [name for name, one in ALGORITHMS.items() if one.form in ADAPTERS]
"""Those that train adapters, which linear models cannot have."""
WORK = {"rate": 0.1, "steps": 2, "batch_size": 4}
"""Local work of a configuration, where a table of its own has it."""


def value(rule: Rule | None) -> Any:
    """A value that a rule allows, as a configuration states it."""
    if rule == OPTIMIZER:
        return 0.1
    if rule == SOLVER:
        return {"solver": "lbfgs", "most": 3}
    if rule == COMPRESSOR:
        return {"name": "rand_k", "k": 2}
    if isinstance(rule, Words):
        return rule.allowed[0]
    if isinstance(rule, Paths):
        return ["bias"]
    if isinstance(rule, Number):
        return _number(rule)
    assert rule == FLAG, rule
    return True


def _number(rule: Number) -> float:
    low = rule.least if rule.above is None else rule.above
    high = rule.most if rule.below is None else rule.below
    if rule.whole:
        return int(low or 0) + 1
    if low is None or high is None:
        return (low or 0) + 0.5
    return (low + high) / 2


def required(entry: AlgorithmEntry) -> dict[str, Any]:
    """Values for the parameters that have to be given, other than loss and work."""
    given = ("loss", "work", "algorithm", *FACTS)
    return {
        name: value(entry.rules.get(name))
        for name, parameter in entry.parameters.items()
        if parameter.default is inspect.Parameter.empty and name not in given
    }


def options(name: str) -> dict[str, Any]:
    """The options that a configuration must state, beside the clients' local work."""
    entry = ALGORITHMS[name]
    found = {entry.keys.get(key, key): one for key, one in required(entry).items()}
    if "work" in entry.keys:
        found[entry.keys["work"]] = dict(WORK)
    return found


def tables(name: str) -> dict[str, Any]:
    """Tables of a configuration that an algorithm needs instead of a linear model."""
    return {"model": {"name": "mlp", "hidden": [4]}} if name in ON_ADAPTERS else {}


def arguments(name: str, loss: Loss, work: Work, clients: int) -> dict[str, Any]:
    """Example arguments for the builder of an algorithm."""
    entry = ALGORITHMS[name]
    given: dict[str, Any] = required(entry) | {"loss": loss}
    if "work" in entry.parameters:
        given["work"] = work
    for key, rule in entry.rules.items():
        if key in given and rule == SOLVER:
            given[key] = fb.solvers.gradient_descent(loss, 5.0, most=3)
        if key in given and rule == COMPRESSOR:
            given[key] = fb.compress.rand_k(2)
    if "clients" in entry.parameters:
        given["clients"] = clients
    if "algorithm" in entry.parameters:
        given["algorithm"] = fb.fedavg(loss, work)
    return given


def build(name: str, loss: Loss, work: Work, clients: int) -> Algorithm:
    """The algorithm of this name, with example arguments."""
    return ALGORITHMS[name].build(**arguments(name, loss, work, clients))


def needs_everyone(name: str) -> bool:
    """Whether all clients must take part in every round."""
    work = Work(0.1, steps=1 if name == "flix" else 2, batch_size=None)
    return build(name, lambda params, rows: rows, work, 2).needs.everyone
