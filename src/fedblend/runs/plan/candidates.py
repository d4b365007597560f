# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The solvers among which a plan chooses, each as settings of the configuration.

``theory`` gives each a rate, so that its settings say what is left: k of rand-k, and
the mean number of local steps 1/p. A candidate has the 1/p of the best proof, and
trials look for a better one: see ``offers``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from fedblend import trees
from fedblend.config import theory_rates, toml
from fedblend.config.config import Config, check
from fedblend.runs.plan.problem import Problem
from fedblend.theory import bounds, local_training
from fedblend.theory.bounds import Curve
from fedblend.theory.constants import Mixture
from fedblend.theory.local_training import LocalTraining

PARTS = (64, 16, 4)
"""rand-k is tried with the dimension divided by these as k."""
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
    label: str
    """The options but 1/p in words, such as "rand-8"."""
    fixed: tuple[str, ...]
    """What ``fedblend run --set`` needs besides 1/p, alpha, rate and rounds."""
    bound: Callable[..., Curve]
    """Theory's on ``f~(x^k) - min f~``, expected where it is random: from a mixture,
    and 1/p."""
    steps: int | None = None
    """1/p of a solver whose coin ends a round."""

    @property
    def options(self) -> str:
        """In words, such as "rand-8"."""
        coin = "" if self.steps is None else f"1/p = {self.steps}"
        return ", ".join(filter(None, (self.label, coin)))

    @property
    def settings(self) -> tuple[str, ...]:
        """What ``fedblend run --set`` needs besides alpha, rate and rounds."""
        coin = () if self.steps is None else (f"algorithm.steps={self.steps}",)
        return (*self.fixed, *coin)

    @property
    def name(self) -> str:
        """Solver and options."""
        return f"{NAMES[self.solver]} {self.options}".rstrip()

    @property
    def random(self) -> bool:
        """Whether its rounds depend on the seed."""
        return self.solver not in ("dgd", "accelerated")

    @property
    def compresses(self) -> bool:
        """Whether it needs a table ``[compress]``."""
        return self.solver in ("diana", "ef21")

    def curve(self, known: Mixture) -> Curve:
        """The bound of its 1/p."""
        return self.bound(known, *([] if self.steps is None else [self.steps]))


def candidates(
    found: Problem, parts: Sequence[int] = PARTS, copies: Sequence[int] = COPIES
) -> list[Candidate]:
    """All solvers and options that plans compare, gradient descent first.

    Args:
        found: the problem.
        parts: as ``PARTS``.
        copies: as ``COPIES``.
    """
    dim, clients = trees.size(found.params), len(found.shape)
    sizes = sorted({max(dim // part, 1) for part in parts})
    tried = [
        *configured(found),
        Candidate("accelerated", "", (NESTEROV,), bounds.accelerated),
        *(_diana(dim, k) for k in sizes),
    ]
    # Clients with alpha_i = 0 take no part in Scafflix; all others need everybody.
    if found.smoothness.convex[found.shape > 0].min() > 0:
        tried.append(_scafflix(found))
    if (found.shape * found.smoothness.convex).min() > 0:
        tried += [_locodl(found, k, masks) for masks in MASKS for k in sizes]
        numbers = {FEW_COPIES, *(clients // part for part in copies)}
        tried += [
            _compressed_scaffnew(found, number)
            for number in sorted({min(max(size, 2), clients) for size in numbers})
            if clients > 1
        ]
    return tried


def configured(found: Problem) -> list[Candidate]:
    """Gradient descent, and what the table ``[compress]`` of the file makes of it."""
    table = found.config.compress
    plain = Candidate("dgd", "", (), bounds.dgd)
    if table is None:
        return [plain]
    way = theory_rates.solver(table, trees.size(found.params), len(found.shape))

    def bound(known: Mixture) -> Curve:
        return bounds.curve(way.name, known, *way[1:])

    return [plain, Candidate(way.name, "of the file", (), bound)]


def config_of(found: Problem, candidate: Candidate, *settings: str) -> Config:
    """The configuration of a candidate at theory's step."""
    content = found.config.model_dump(exclude_none=True)
    if not candidate.compresses:
        content.pop("compress", None)
    for setting in ("algorithm.rate=theory", *candidate.settings, *settings):
        toml.put(content, setting)
    return check(content, "plan")


def _with_coin(
    found: Problem,
    solver: str,
    label: str,
    fixed: tuple[str, ...],
    choose: Callable[..., LocalTraining],
    bound: Callable[[LocalTraining, Mixture], Curve],
) -> Candidate:
    """A solver with the 1/p of its paper, or half of it if that has the better proof.

    Neither depends on alpha.
    """
    known = partial(choose, found.shape, found.smoothness)
    papers = known().steps
    steps = min(papers, -(-papers // 2), key=lambda number: known(steps=number).factor)

    def curve(mixed: Mixture, steps: int) -> Curve:
        return bound(choose(mixed.alpha, mixed.smoothness, steps=steps), mixed)

    return Candidate(solver, label, fixed, curve, steps)


def _scafflix(found: Problem) -> Candidate:
    settings = ("algorithm.name=scafflix",)
    theory = local_training.scafflix, local_training.scafflix_bound
    return _with_coin(found, "scafflix", "", settings, *theory)


def _locodl(found: Problem, k: int, masks: str) -> Candidate:
    """LoCoDL on FLIX's objective, with rand-k."""
    settings = (
        "algorithm.name=flix_locodl",
        f"algorithm.compressor={{ name = 'rand_k', k = {k} }}",
        f"algorithm.masks={masks}",
    )
    omega = trees.size(found.params) / k - 1
    choose = partial(local_training.locodl, omega=omega, masks=masks)
    options = ("locodl", f"rand-{k}, {masks}", settings)
    return _with_coin(found, *options, choose, local_training.locodl_bound)


def _compressed_scaffnew(found: Problem, copies: int) -> Candidate:
    """CompressedScaffnew on FLIX's objective."""
    settings = ("algorithm.name=flix_compressed_scaffnew", f"algorithm.copies={copies}")
    choose = partial(local_training.compressed_scaffnew, copies=copies)
    options = ("compressed_scaffnew", f"s = {copies}", settings)
    return _with_coin(found, *options, choose, local_training.scaffnew_bound)


def _diana(dim: int, k: int) -> Candidate:
    bound = partial(bounds.diana, omega=dim / k - 1)
    return Candidate("diana", f"rand-{k}", (RAND_K.format(k=k),), bound)
