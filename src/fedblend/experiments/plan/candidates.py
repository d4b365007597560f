# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The solvers among which a plan chooses, each as settings of the configuration.

``theory`` gives each a step, so that its settings say what is left: k of rand-k, and
the mean number of local steps 1/p.
"""

from collections.abc import Callable
from typing import NamedTuple

from fedblend import trees
from fedblend.config import model, toml
from fedblend.config.config import Config, check
from fedblend.experiments.plan.problem import Problem
from fedblend.theory import bounds, local_training
from fedblend.theory.bounds import Curve
from fedblend.theory.constants import Mixture

PARTS = (64, 16, 4)
"""rand-k is tried with the dimension divided by these as k."""
LONGER = (0.5, 1, 2, 4)
"""Numbers of local steps that are tried, in units of theory's."""
FEW_COPIES, COPIES = 3, (4, 2)
"""Of CompressedScaffnew: copies where receiving is free, by theory, and the number of
clients divided by these."""
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
    "compressed_scaffnew": "TAMUNA",
}
"""Solvers as their papers spell them; CompressedScaffnew, a name too long for a column,
is TAMUNA with all clients."""
NESTEROV = "algorithm.server={ name = 'nesterov' }"
RAND_K = (
    "compress={{ how = 'diana', start = 'first', "
    "compressor = {{ name = 'rand_k', k = {k} }} }}"
)


class Candidate(NamedTuple):
    """A solver with its options."""

    solver: str
    """A key of ``NAMES``."""
    options: str
    """In words, such as "rand-8"."""
    settings: tuple[str, ...]
    """What ``fedblend run --set`` needs besides alpha, rate and rounds."""
    curve: Callable[[Mixture], Curve]
    """The bound of theory on ``f~(x^k) - min f~``, expected where it is random."""

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
        *(
            _locodl(found, k, masks)
            for masks in MASKS
            for k in sizes
            if _all_convex(found)
        ),
        *_compressed_scaffnew(found),
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


def _all_convex(found: Problem) -> bool:
    """Whether every f_i mixed is strongly convex: all take part, with convex losses."""
    return bool((found.shape * found.smoothness.convex).min() > 0)


def _locodl(found: Problem, k: int, masks: str) -> Candidate:
    """LoCoDL on FLIX's objective, with rand-k; its steps are the same for any alpha."""
    known, omega = found.smoothness, trees.size(found.params) / k - 1
    best = local_training.locodl(found.shape, known, omega, masks=masks).steps

    def curve(mixed: Mixture) -> Curve:
        chosen = local_training.locodl(
            mixed.alpha, mixed.smoothness, omega, masks=masks, steps=best
        )
        return local_training.locodl_bound(chosen, mixed)

    settings = (
        "algorithm.name=flix_locodl",
        f"algorithm.steps={best}",
        f"algorithm.compressor={{ name = 'rand_k', k = {k} }}",
        f"algorithm.masks={masks}",
    )
    return Candidate("locodl", f"rand-{k}, {masks}", settings, curve)


def _compressed_scaffnew(found: Problem) -> list[Candidate]:
    """CompressedScaffnew on FLIX's objective, with some numbers of copies."""
    clients = len(found.shape)
    if not _all_convex(found) or clients == 1:
        return []
    sizes = {FEW_COPIES, *(clients // part for part in COPIES)}
    return [
        _compressed_scaffnew_with(found, copies)
        for copies in sorted({min(max(size, 2), clients) for size in sizes})
    ]


def _compressed_scaffnew_with(found: Problem, copies: int) -> Candidate:
    """With theory's steps, which are the same for any alpha."""
    known = found.smoothness
    best = local_training.compressed_scaffnew(found.shape, known, copies).steps

    def curve(mixed: Mixture) -> Curve:
        chosen = local_training.compressed_scaffnew(
            mixed.alpha, mixed.smoothness, copies, steps=best
        )
        return local_training.scaffnew_bound(chosen, mixed)

    settings = (
        "algorithm.name=flix_compressed_scaffnew",
        f"algorithm.copies={copies}",
        f"algorithm.steps={best}",
    )
    return Candidate("compressed_scaffnew", f"s = {copies}", settings, curve)


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
