# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Every algorithm that must keep the contract: all that are registered, and variants.

``ALGORITHMS`` maps a name to a function from a problem (see ``problems``) to an
algorithm, with batches smaller than the data so that its key matters. A registered
algorithm that is not among them gets a case with example arguments. ``WRAPPERS``
maps a name to a function from an algorithm and a problem to an algorithm; every
transform is checked over every algorithm by shapes, and compiled over ``COMPILED``.
"""

from collections.abc import Iterable
from functools import partial
from warnings import catch_warnings, simplefilter

import jax
import numpy as np
import optax
import pytest

import example_arguments as examples
import fedblend as fb
from fedblend import compress
from fedblend.local import Optimizer, Steps
from fedblend.registry import ALGORITHMS as REGISTERED
from fedblend.transforms.central_loss import parameter_loss
from fedblend_reproductions.apfl.averaged import apfl_averaged
from problems import (
    COUNTS,
    Problem,
    classes,
    factored,
    normalized,
    paired,
    several,
)

RATE = 0.2
STEPS_BY_CLIENT = np.array([1, 3, 2, 4, 1, 2, 3])
K_BY_CLIENT = np.array([2, 3, 1, 2, 3, 3, 2])
ALPHA_BY_CLIENT = np.array([0.2, 0.9, 0.5, 1.0, 0.3, 0.7, 0.4])
assert len(STEPS_BY_CLIENT) == len(COUNTS)


def _fedavg(problem, optimizer: Optimizer = RATE, steps: Steps = 3):
    return fb.fedavg(problem.loss, fb.Work(optimizer, steps=steps, batch_size=2))


def _fedopt(problem, server_optimizer):
    return fb.algorithms.fedopt(
        problem.loss, fb.Work(RATE, steps=3, batch_size=2), server_optimizer
    )


def _scaffold(problem, optimizer: Optimizer = RATE, steps: Steps = 3):
    return fb.scaffold(problem.loss, fb.Work(optimizer, steps=steps, batch_size=2))


def _flix(problem):
    local = fb.solvers.gradient_descent(problem.loss, 5.0, most=3)
    return fb.flix(problem.loss, _mixed, alpha=ALPHA_BY_CLIENT, local=local)


def _apfl(problem):
    chosen = {"alpha": ALPHA_BY_CLIENT, "held_out": 0.3, "aggregated": False}
    return fb.apfl(problem.loss, fb.Work(RATE, steps=3, batch_size=2), **chosen)


def _mixed(loss):
    return fb.scaffold(loss, fb.Work(RATE, steps=1, batch_size=2))


def _partial(problem, order: str = "alternate", **own):
    work = fb.Work(RATE, steps=3, batch_size=2)
    return fb.partial(problem.loss, work, personal=_is_bias, order=order, **own)


def _is_bias(path: str) -> bool:
    return path.partition("/")[0] == "bias"


def _scheduled(unit):
    return fb.Scheduled(optax.exponential_decay(RATE, 10, 0.5), unit)


FORMS = {
    "ensemble": several,
    "pairs": paired,
    "factors": factored,
    "normalized": normalized,
}
"""What algorithms make of a model, by their ``form``."""
FORMED = {name: one.form for name, one in REGISTERED.items() if one.form}
FORMED["batch norm"] = "normalized"
"""The form of each algorithm that has one, and that of cases."""


def formed(name: str, problem: Problem) -> Problem:
    """The problem with the model of the form that a case needs."""
    for algorithm, form in FORMED.items():
        if algorithm in name:
            return FORMS[form](problem)
    return problem


def _by_example(problem, name: str):
    work = fb.Work(RATE, steps=3, batch_size=2)
    return examples.build(name, problem.loss, work, len(COUNTS))


ALGORITHMS = {
    "fedavg": _fedavg,
    "fedavg, epochs": partial(_fedavg, steps=fb.Epochs(2)),
    "fedavg, batch norm": partial(_fedavg, steps=fb.Epochs(2)),
    "fedavg, steps by client": partial(_fedavg, steps=STEPS_BY_CLIENT),
    "fedavg, adam": partial(_fedavg, optimizer=optax.adam(0.05)),
    "fedavg, rate by step": partial(_fedavg, optimizer=_scheduled("step")),
    "fedavg, rate by round": partial(_fedavg, optimizer=_scheduled("round")),
    "fedadam": partial(_fedopt, server_optimizer=optax.adam(0.1)),
    "fedyogi": partial(_fedopt, server_optimizer=optax.yogi(0.1)),
    "fedadagrad": partial(_fedopt, server_optimizer=optax.adagrad(0.3)),
    "fedavgm": partial(_fedopt, server_optimizer=optax.sgd(0.5, 0.5)),
    "fedprox": lambda p: fb.algorithms.fedprox(
        p.loss, fb.Work(RATE, steps=3, batch_size=2), mu=0.5
    ),
    "scaffold": _scaffold,
    "scaffold, steps by client": partial(_scaffold, steps=STEPS_BY_CLIENT),
    "scaffold, adam": partial(_scaffold, optimizer=optax.adam(0.05)),
    "svrg": lambda p: fb.algorithms.svrg(
        p.loss, fb.Work(RATE, steps=3, batch_size=2), refresh=0.5
    ),
    # With a ridge, as systems that are nearly singular magnify rounding.
    "hierarchical": lambda p: fb.algorithms.hierarchical(
        p.loss, fb.Work(RATE, steps=2, batch_size=2), ridge=0.1
    ),
    "flix(scaffold)": _flix,
    "apfl": _apfl,
    "apfl agnostic": lambda p: fb.algorithms.apfl_agnostic(
        p.loss,
        fb.Work(RATE, steps=3, batch_size=2),
        clients=len(COUNTS),
        q_rate=0.1,
        alpha=ALPHA_BY_CLIENT,
    ),
    "apfl averaged": lambda p: apfl_averaged(
        p.loss, fb.Work(RATE, steps=2, batch_size=2), alpha=ALPHA_BY_CLIENT, shift=5.0
    ),
    "local only": lambda p: fb.local_only(p.loss, fb.Work(RATE, steps=3, batch_size=2)),
    "reptile": lambda p: fb.algorithms.reptile(
        p.loss, fb.Work(RATE, steps=3, batch_size=2), 0.7
    ),
    "fomaml": lambda p: fb.algorithms.fomaml(
        p.loss, fb.Work(0.05, steps=2, batch_size=2), RATE
    ),
    "perfedavg": lambda p: fb.algorithms.perfedavg(
        p.loss, fb.Work(RATE, steps=3, batch_size=2), inner_rate=0.05
    ),
    "pfedme": lambda p: fb.algorithms.pfedme(
        p.loss,
        fb.Work(RATE, steps=3, batch_size=2),
        lam=2.0,
        inner_rate=0.2,
        inner_steps=4,
    ),
    "ditto": lambda p: fb.ditto(
        _fedavg(p), p.loss, fb.Work(RATE, steps=STEPS_BY_CLIENT, batch_size=2), lam=0.5
    ),
    "fedala": lambda p: fb.algorithms.fedala(
        p.loss, fb.Work(RATE, steps=3, batch_size=2), head=_is_bias
    ),
    "l2gd": lambda p: fb.algorithms.l2gd(p.loss, RATE, lam=0.5, p=0.4, batch_size=2),
    "partial": partial(_partial, personal_steps=2),
    "partial, together": partial(_partial, order="together", personal_rate=0.05),
    "agnostic": lambda p: fb.algorithms.agnostic(
        p.loss, fb.Work(RATE, steps=3, batch_size=2), clients=len(COUNTS), q_rate=0.1
    ),
    "locodl, one mask": lambda p: fb.locodl(
        p.loss,
        fb.Work(RATE, steps=3, batch_size=2),
        compressor=compress.rand_k(2),
        clients=len(COUNTS),
        moved=0.01,
        masks="one",
    ),
    "mapper": lambda p: fb.algorithms.mapper(
        p.loss, fb.Work(RATE, steps=2, batch_size=2), held_out=0.4, grid=3
    ),
}

ELSEWHERE = ("fedopt", "finetune", "flix")
"""Registered algorithms whose cases have other names."""
BY_EXAMPLE = {
    name: partial(_by_example, name=name)
    for name in examples.DISTINCT
    if not {name, name.replace("_", " ")} & set(ALGORITHMS) and name not in ELSEWHERE
}
ALGORITHMS |= BY_EXAMPLE

WRAPPERS = {
    "finetune": lambda algorithm, p: fb.finetune(
        algorithm, p.loss, fb.Work(RATE, steps=2, batch_size=2)
    ),
}

ENCODERS = {
    "identity": lambda algorithm, p: fb.transforms.compressed(
        algorithm, compress.identity()
    ),
    "compressed": lambda algorithm, p: fb.transforms.compressed(
        algorithm, compress.rand_k(2)
    ),
    "diana": lambda algorithm, p: fb.transforms.diana(
        algorithm, compress.rand_k(K_BY_CLIENT)
    ),
    "diana, first": lambda algorithm, p: fb.transforms.diana(
        algorithm, compress.natural(), start="first"
    ),
    "ef21": lambda algorithm, p: fb.transforms.ef21(algorithm, compress.top_k(2)),
    "permuted": lambda algorithm, p: fb.transforms.perm_k(algorithm, clients=7),
    "one mask, diana": lambda algorithm, p: fb.transforms.common_mask(
        algorithm, compress.rand_k(2), how=fb.transforms.diana
    ),
    "clipped": lambda algorithm, p: fb.transforms.adaptive_clip(algorithm, 0.1),
    "downlink": lambda algorithm, p: fb.transforms.downlink(
        algorithm, compress.top_k(2)
    ),
    "mixed": lambda algorithm, p: fb.transforms.mixed_fl(
        algorithm,
        parameter_loss(fb.trees.sum_squares),
        how="two_way",
        steps=2,
        optimizer=0.1,
        upload=True,
    ),
}
"""Transforms that need an algorithm which says something, and no encoder inside."""

COMPILED = ("fedavg", "scaffold")
"""The algorithms over which every transform is compiled: without and with a state."""


SILENT = (
    "local only",
    *(name for name in BY_EXAMPLE if not REGISTERED[name].sends),
)
"""Cases whose clients send nothing."""


ENCODING = (
    "locodl, one mask",
    *(name for name in REGISTERED if REGISTERED[name].encodes),
)
"""Cases whose answers are encoded already."""


def _wrapped(wrapper, algorithm, problem):
    with catch_warnings():
        simplefilter("ignore")  # ``test_contract_pairs`` has what may diverge
        return wrapper(algorithm(problem), problem)


TUNED = {
    f"{name}({algorithm})": partial(_wrapped, wrapper, build)
    for name, wrapper in WRAPPERS.items()
    for algorithm, build in ALGORITHMS.items()
}

SPEAKING = {name: build for name, build in ALGORITHMS.items() if name not in SILENT}
SPEAKING["finetune(fedavg)"] = TUNED["finetune(fedavg)"]

ENCODED = {
    f"{name}({algorithm})": partial(_wrapped, wrapper, build)
    for name, wrapper in ENCODERS.items()
    for algorithm, build in (
        SPEAKING | {"finetune(fedavg)": TUNED["finetune(fedavg)"]}
    ).items()
    if algorithm not in ENCODING
}

PRODUCT = ALGORITHMS | TUNED | ENCODED
"""Everything, for checks by shapes."""

CASES = ALGORITHMS | {
    name: PRODUCT[name]
    for name in (
        *(f"{name}({algorithm})" for name in WRAPPERS for algorithm in COMPILED),
        "identity(fedavg)",
        "compressed(fedavg)",
        "diana(scaffold)",
        "diana, first(flix(scaffold))",
        "diana(finetune(fedavg))",
        "ef21(fedavg)",
        "ef21(scaffold)",
        "mixed(scaffold)",
    )
}
"""What is compiled and run."""

ONE_OF_EACH = (
    *("fedavg", "scaffold", "flix(scaffold)", "apfl", "local only"),
    *("diana(scaffold)", "mixed(scaffold)"),
)
"""One case of each kind of message and state, for what is the engine's own."""


def others_later(names: Iterable[str], also: tuple[str, ...] = ()) -> list:
    """These cases for a test; all but one of each kind are for the slow ones.

    ``also`` are cases that this test needs beside those of the engine.
    """
    now = ONE_OF_EACH + also
    return [
        pytest.param(name, marks=() if name in now else pytest.mark.slow)
        for name in names
    ]


def _built(name: str):
    return CASES[name](formed(name, _PROBLEM))


def _joins(name: str) -> bool:
    """Whether clients of a case send something when they enroll."""
    algorithm, shard = _built(name), _PROBLEM.federated_data.train.shard(0)
    start = (formed(name, _PROBLEM).params, shard, jax.random.key(0))
    return bool(jax.tree.leaves(jax.eval_shape(algorithm.enroll, *start)[0]))


_PROBLEM = classes()
EVERYONE = tuple(name for name in CASES if _built(name).needs.everyone)
"""Cases in which nobody may be left out of a round."""

ENROLLING = (
    "flix(scaffold)",
    "diana, first(flix(scaffold))",
    *filter(_joins, BY_EXAMPLE),
)
"""Cases whose clients all send something before the first round."""
