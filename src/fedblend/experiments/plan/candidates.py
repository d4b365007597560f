# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The solvers among which a plan chooses, each as settings of the configuration.

``theory`` gives each a step, so that its settings say what is left: k of rand-k, and
the mean number of local steps 1/p.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from fedblend import trees
from fedblend.algorithms.flix import flix
from fedblend.algorithms.locodl import locodl
from fedblend.compress import rand_k
from fedblend.config import model, toml
from fedblend.config.config import Config, check
from fedblend.core import Algorithm, Loss
from fedblend.experiments.plan.messages import Compose
from fedblend.experiments.plan.problem import Problem
from fedblend.local import Work
from fedblend.solvers import Solver
from fedblend.theory import bounds, local_training
from fedblend.theory.bounds import Curve
from fedblend.theory.constants import Mixture

PARTS = (64, 16, 4)
"""rand-k is tried with the dimension divided by these as k."""
LONGER = (0.5, 1, 2, 4)
"""Numbers of local steps that are tried, in units of theory's."""
MASKS = ("own", "one")
"""Of LoCoDL: entries of each client's own, or the same of all."""
NAMES = {
    "dgd": "DGD",
    "accelerated": "accelerated",
    "diana": "DIANA",
    "ef21": "EF21",
    "downlink": "EF21-P",
    "scafflix": "Scafflix",
    "locodl": "LoCoDL",
}
"""Solvers as their papers spell them."""
NESTEROV = "algorithm.server={ name = 'nesterov' }"
RAND_K = (
    "compress={{ how = 'diana', start = 'first', "
    "compressor = {{ name = 'rand_k', k = {k} }} }}"
)


class Candidate(NamedTuple):
    """A solver with its options."""

    solver: str
    """"dgd", "accelerated", "diana", "ef21", "scafflix" or "locodl"."""
    options: str
    """In words, such as "rand-8"."""
    settings: tuple[str, ...]
    """What ``fedblend run --set`` needs besides alpha, rate and rounds."""
    curve: Callable[[Mixture], Curve]
    """The bound of theory on ``f~(x^k) - min f~``, expected where it is random."""
    compose: Compose | None = None
    """Of a solver that configurations do not have, and Python combines."""

    @property
    def name(self) -> str:
        """Solver and options."""
        return f"{NAMES[self.solver]} {self.options}".rstrip()

    @property
    def family(self) -> str:
        """The solver, of which options differ in a number only."""
        return f"{self.solver} {self.options.partition(', ')[2]}"

    @property
    def compresses(self) -> bool:
        """Whether it needs a table ``[compress]``."""
        return self.solver in ("diana", "ef21")


def candidates(found: Problem) -> list[Candidate]:
    """All solvers and options that plans compare, gradient descent first."""
    dim = trees.size(found.params)
    sizes = sorted({max(dim // part, 1) for part in PARTS})
    tried = [
        *configured(found),
        Candidate("accelerated", "", (NESTEROV,), bounds.accelerated),
        *(_diana(dim, k) for k in sizes),
        *_scafflix(found),
        *(_locodl(found, k, masks) for masks in MASKS for k in sizes if _convex(found)),
    ]
    return list({one.name: one for one in tried}.values())


def configured(found: Problem) -> list[Candidate]:
    """Gradient descent, and what the table ``[compress]`` of the file makes of it."""
    table = found.config.compress
    plain = Candidate("dgd", "", (), bounds.dgd)
    if table is None:
        return [plain]
    way = model.solver(table, trees.size(found.params), len(found.shape))

    def curve(known: Mixture) -> Curve:
        return bounds.curve(way.name, known, *way[1:])

    return [plain, Candidate(way.name, "of the file", (), curve)]


def config_of(found: Problem, candidate: Candidate, *settings: str) -> Config:
    """The configuration of a candidate at theory's step."""
    content = found.config.model_dump(exclude_none=True)
    if not candidate.compresses:
        content.pop("compress", None)
    for setting in ("algorithm.rate=theory", *candidate.settings, *settings):
        toml.put(content, setting)
    return check(content, "plan")


def _scafflix(found: Problem) -> list[Candidate]:
    """Scafflix with some numbers of local steps; none where an f_i is not convex."""
    if not _convex(found):
        return []
    best = local_training.scafflix(found.shape, found.smoothness).steps
    steps = sorted({max(round(factor * best), 1) for factor in LONGER})
    return [_scafflix_with(number) for number in steps]


def _convex(found: Problem) -> bool:
    """Whether every f_i that takes part is strongly convex."""
    return bool(found.smoothness.convex[found.shape > 0].min() > 0)


def _locodl(found: Problem, k: int, masks: str) -> Candidate:
    """LoCoDL on FLIX's objective, with rand-k."""
    dim, known = trees.size(found.params), found.smoothness
    omega = dim / k - 1

    def curve(mixed: Mixture) -> Curve:
        chosen = local_training.locodl(mixed.alpha, known, omega, masks=masks)
        return local_training.locodl_bound(chosen, mixed)

    def compose(loss: Loss, local: Solver, alpha: np.ndarray) -> Algorithm:
        chosen = local_training.locodl(alpha, known, omega, masks=masks)
        method = partial(
            locodl,
            work=Work(float(chosen.rates[0]), chosen.steps, None),
            compressor=rand_k(k),
            clients=len(alpha),
            moved=chosen.moved,
            masks=masks,
        )
        return flix(loss, method, alpha=alpha, local=local, smooth=known.smooth)

    return Candidate("locodl", f"rand-{k}, {masks}", (), curve, compose)


def _scafflix_with(steps: int) -> Candidate:
    def curve(known: Mixture) -> Curve:
        chosen = local_training.scafflix(known.alpha, known.smoothness, steps)
        return local_training.scafflix_bound(chosen, known)

    settings = ("algorithm.name=scafflix", f"algorithm.steps={steps}")
    return Candidate("scafflix", f"1/p = {steps}", settings, curve)


def _diana(dim: int, k: int) -> Candidate:
    def curve(known: Mixture) -> Curve:
        return bounds.diana(known, dim / k - 1)

    return Candidate("diana", f"rand-{k}", (RAND_K.format(k=k),), curve)
