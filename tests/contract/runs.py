# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Runs of the cases, made once and shared, and what there is to compare in them."""

from functools import cache
from typing import Any

import jax
import numpy as np
from registry import CASES, EVERYONE, formed

import fedblend as fb
import problems
from fedblend.simulation.sampling import cohorts

CLIENTS = len(problems.COUNTS)
SETTINGS: dict[str, Any] = {"rounds": 5, "cohort": 5, "chunk": 3, "every": 2}
"""Five of seven clients in chunks of three (so one place is padding), and a last block
that is shorter than the others."""

ROUNDING: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6}
"""Sums taken in another order: float32 rounds at 6e-8, and a few hundred roundings of
parameters of size 1 add up over the local steps of five rounds."""


@cache
def problem(name: str = "") -> problems.Problem:
    """The problem that all cases are run on, in the form that a case needs."""
    return formed(name, problems.classes())


def cohort_of(name: str) -> int:
    """How many clients a round of a case has."""
    return CLIENTS if name in EVERYONE else SETTINGS["cohort"]


_PROGRAMS: dict = {}
"""Compiled programs by what is fixed in them; data, keys and states are arguments."""


def new_run(name, on=None, seed=0, compile_anew=False, **settings):
    """A run of a case that has not begun; it uses the programs of others like it."""
    on = problem(name) if on is None else on
    chosen: dict[str, Any] = SETTINGS | {"cohort": cohort_of(name)} | settings
    run = fb.simulate(
        CASES[name](on), on.params, on.federated_data, jax.random.key(seed), **chosen
    )
    if not compile_anew:
        fixed = (run.settings._replace(build=name), chosen["every"])
        run._engine.programs.compiled = _PROGRAMS.setdefault(
            fixed, run._engine.programs.compiled
        )
    return run


@cache
def usual_run(name: str):
    """The usual run of a case, complete."""
    return new_run(name).complete()


def states(run) -> list:
    """What every client remembers."""
    return [jax.device_get(run.client(client)) for client in range(CLIENTS)]


def outcome(run):
    """All that a run comes to: both sides' states, and all personal models."""
    models = [jax.device_get(run.personal(client)) for client in range(CLIENTS)]
    return jax.device_get((run.down, run.server)), states(run), models


def members(run) -> np.ndarray:
    """The cohort of every round."""
    key, rounds = run.key, range(run.rounds)
    return cohorts(key, list(rounds), CLIENTS, run.cohort)


def same_bits(left, right) -> None:
    """Fail unless two trees are equal, bit for bit."""
    jax.tree.map(lambda a, b: _equal(np.asarray(a), np.asarray(b)), left, right)


def _equal(left, right):
    assert left.dtype == right.dtype
    assert left.tobytes() == right.tobytes(), (left, right)


def close(left, right) -> None:
    """Fail unless two trees are equal to rounding."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **ROUNDING), left, right)


def differ(left, right) -> bool:
    """Whether some leaf differs."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return any(not np.array_equal(a, b) for a, b in pairs)


@cache
def client_function(name: str):
    """A case's compiled client function, for one client at a time."""
    return jax.jit(CASES[name](problem(name)).client)
