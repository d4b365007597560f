# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The solvers among which a plan chooses, and what their messages cost.

``theory`` gives each a rate, so that its settings say what is left: k of rand-k, and
the mean number of local steps 1/p. A candidate has the 1/p of the best proof, and
trials look for a better one: see ``offers``.

Bits are those that a run counts, plus the last broadcast, that of the model to deploy.
They come from the shapes of messages; one of variable length counts with its largest.
A mean of different masks is dense, and so is what the server sends.

Prices are relative: a number for a bit up and one for a bit down.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax

from fedblend.checks import NOT_NEGATIVE
from fedblend.config import theory_rates, toml
from fedblend.config.build import Method, method
from fedblend.config.config import Config, check
from fedblend.core import PyTree, Ragged, has_ragged, static_bits
from fedblend.errors import SettingError, UserError
from fedblend.registry import ALGORITHMS
from fedblend.runs.plan.problem import Problem, stack_rows, start_run
from fedblend.simulation.run import Run
from fedblend.solvers import given
from fedblend.theory import bounds, local_training
from fedblend.theory.bounds import Bound
from fedblend.theory.constants import MixtureConstants
from fedblend.theory.local_training import LocalTraining
from fedblend.trees import precision

PARTS = (64, 16, 4, 2)
"""rand-k is tried with the dimension divided by these as k."""
FEW_COPIES, COPIES = 3, (4, 2, 1)
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
    local_training.scafflix.__name__: "Scafflix",
    local_training.locodl.__name__: "LoCoDL",
    local_training.compressed_scaffnew.__name__: "TAMUNA",
}
"""Solvers as their papers spell them; CompressedScaffnew, a name too long for a column,
is TAMUNA with all clients."""
NESTEROV = "algorithm.server={ name = 'nesterov' }"
RAND_K = (
    "compress={{ how = 'diana', start = 'first', "
    "compressor = {{ name = 'rand_k', k = {k} }} }}"
)


class SolverOptions(NamedTuple):
    """A solver with its options."""

    solver: str
    """A key of ``NAMES``."""
    label: str
    """The options but 1/p in words, such as "rand-8"."""
    fixed: tuple[str, ...]
    """What ``fedblend run --set`` needs besides 1/p, alpha, rate and rounds."""
    bound: Callable[..., Bound]
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

    def curve(self, known: MixtureConstants) -> Bound:
        """The bound of its 1/p."""
        return self.bound(known, *([] if self.steps is None else [self.steps]))


def candidates(
    found: Problem, parts: Sequence[int] = PARTS, copies: Sequence[int] = COPIES
) -> list[SolverOptions]:
    """All solvers and options that plans compare, gradient descent first.

    Args:
        found: the problem.
        parts: as ``PARTS``.
        copies: as ``COPIES``.
    """
    clients = found.clients
    sizes = sorted({max(found.dim // part, 1) for part in parts})
    tried = [
        *file_solvers(found),
        SolverOptions("accelerated", "", (NESTEROV,), bounds.accelerated),
        *(_diana(found.dim, k) for k in sizes),
    ]
    # Clients with alpha_i = 0 take no part in Scafflix; all others need everybody.
    if found.smoothness.convex[found.shape > 0].min() > 0:
        tried.append(_scafflix(found))
    if (found.shape * found.smoothness.convex).min() > 0:
        tried += [_locodl(found, k, masks) for masks in MASKS for k in sizes]
        numbers = {FEW_COPIES, *(clients // part for part in copies)}
        tried += [
            _scaffnew_copies(found, number)
            for number in sorted({min(max(size, 2), clients) for size in numbers})
            if clients > 1
        ]
    return tried


def file_solvers(found: Problem) -> list[SolverOptions]:
    """Gradient descent, and what the table ``[compress]`` of the file makes of it."""
    table = found.config.compress
    plain = SolverOptions("dgd", "", (), bounds.dgd)
    if table is None:
        return [plain]
    way = theory_rates.solver(table, found.dim, found.clients)
    bound = partial(bounds.diana, omega=way.omega, memory_rate=way.memory_rate)
    if way.name == "ef21":
        bound = partial(bounds.ef21, delta=way.delta)
    return [plain, SolverOptions(way.name, "of the file", (), bound)]


def config_of(found: Problem, candidate: SolverOptions, *settings: str) -> Config:
    """The configuration of a candidate at theory's step."""
    content = found.config.model_dump(exclude_none=True)
    if not candidate.compresses:
        content.pop("compress", None)
    for setting in ("algorithm.rate=theory", *candidate.settings, *settings):
        toml.put(content, setting)
    return check(content, "plan")


def _coin_solver(
    found: Problem,
    theory: Callable[..., LocalTraining],
    label: str,
    settings: tuple[str, ...],
    bound: Callable[[LocalTraining, MixtureConstants], Bound],
    **options: Any,
) -> SolverOptions:
    """A solver with the 1/p of its paper, or half of it if that has the better proof.

    Neither depends on alpha. The solver is the method on mixtures that ``theory`` is
    registered for.
    """
    method = next(
        name
        for name, entry in ALGORITHMS.items()
        if entry.theory is theory and "alpha" in entry.parameters
    )
    choose = partial(theory, **options)
    known = partial(choose, found.shape, found.smoothness)
    papers = known().steps
    steps = min(papers, -(-papers // 2), key=lambda number: known(steps=number).factor)

    def curve(mixed: MixtureConstants, steps: int) -> Bound:
        return bound(choose(mixed.alpha, mixed.smoothness, steps=steps), mixed)

    fixed = (f"algorithm.name={method}", *settings)
    return SolverOptions(theory.__name__, label, fixed, curve, steps)


def _scafflix(found: Problem) -> SolverOptions:
    theory = local_training.scafflix
    return _coin_solver(found, theory, "", (), local_training.scafflix_bound)


def _locodl(found: Problem, k: int, masks: str) -> SolverOptions:
    settings = (
        f"algorithm.compressor={{ name = 'rand_k', k = {k} }}",
        f"algorithm.masks={masks}",
    )
    return _coin_solver(
        found,
        local_training.locodl,
        f"rand-{k}, {masks}",
        settings,
        local_training.locodl_bound,
        omega=found.dim / k - 1,
        masks=masks,
    )


def _scaffnew_copies(found: Problem, copies: int) -> SolverOptions:
    return _coin_solver(
        found,
        local_training.compressed_scaffnew,
        f"s = {copies}",
        (f"algorithm.copies={copies}",),
        local_training.scaffnew_bound,
        copies=copies,
    )


def _diana(dim: int, k: int) -> SolverOptions:
    bound = partial(bounds.diana, omega=dim / k - 1)
    return SolverOptions("diana", f"rand-{k}", (RAND_K.format(k=k),), bound)


def method_for(found: Problem, config: Config, rates: Any = None) -> Method:
    """What a configuration of the same data computes, from x_i that are known.

    Args:
        found: the problem.
        config: a candidate's, with alpha.
        rates: those of theory, if they are known.
    """
    models = stack_rows(found.personal, found.params, config.run.precision)
    clients, own = found.clients, {"algorithm.personal": given(models)}
    known, task = found.smoothness, found.built.task
    return method(config, task, clients, clients, known, rates, values=own)


def run_of(found: Problem, config: Config, algorithm: Any, **options: Any) -> Run:
    """A run in the precision of the configuration, which has not begun."""
    width = config.run.precision
    params = jax.tree.map(lambda leaf: leaf.astype(width), found.params)
    return start_run(found.built, algorithm, params, **options)


class Traffic(NamedTuple):
    """The bits of rounds, over all clients.

    ``first`` is round 1 (the pure local models up, x_avg down), ``later`` every round
    of the solver, ``start`` is sent once before the solver's first round: uncompressed
    gradients, if DIANA's memories start at them.
    """

    first: float
    later: float
    start: float = 0.0

    def bits(self, rounds: float) -> float:
        """The bits of this many rounds, on average if not whole."""
        if rounds == 0:
            return 0.0
        solving = self.start + (rounds - 1) * self.later if rounds > 1 else 0.0
        return self.first + solving

    def affordable_rounds(self, bits: float) -> int:
        """The number of rounds that fit into these bits."""
        left = bits - self.first
        if left < 0:
            return 0
        return 1 + max(math.floor((left - self.start) / self.later), 0)


class Prices(NamedTuple):
    """Of a bit, up and down."""

    up: float = 1.0
    down: float = 1.0


SAME = Prices()
"""Both ways cost the same."""


class Price(NamedTuple):
    """What rounds cost, in bits up and down, and in all."""

    rounds: int
    up: float
    down: float
    cost: float


class Ways(NamedTuple):
    """The bits of all clients, up and down, and their prices."""

    up: Traffic
    down: Traffic
    at_most: bool
    """They are upper bounds, because messages vary in length."""
    prices: Prices

    @property
    def both(self) -> Traffic:
        """Both ways together."""
        return Traffic(*map(sum, zip(self.up, self.down, strict=True)))

    def price(self, rounds: float) -> Price:
        """Of this many rounds, which need not be whole."""
        up, down = self.up.bits(rounds), self.down.bits(rounds)
        cost = self.prices.up * up + self.prices.down * down
        return Price(cast(int, rounds), up, down, cost)

    def rounds_within(self, cost: float) -> float:
        """The rounds of a cost, of which it is a linear function from the second on."""
        first, second = self.price(2).cost, self.price(3).cost
        return 2 + (cost - first) / (second - first)


def ways(found: Problem, config: Config, prices: Prices = SAME) -> Ways:
    """What the messages of a configuration cost, from those that a run counts."""
    with precision(config.run.precision):
        actual = run_of(found, config, method_for(found, config).algorithm)
        usual, table = actual, config.compress
        if table is not None and table.how == "diana" and table.start != "zero":
            zero = {"compress": table.model_copy(update={"start": "zero"})}
            plain = config.model_copy(update=zero)
            usual = run_of(found, plain, method_for(found, plain).algorithm)
    clients, sizes = found.clients, actual.message_bits
    last = static_bits(actual.shapes.last._replace(round=None))
    up = _largest_bits(usual.shapes.up)
    more = _largest_bits(actual.shapes.up) - up
    # What a message has of variable length is the whole model, in the first round.
    first = _largest_bits(actual.shapes.message._replace(round=None)) - sizes.down
    return Ways(
        Traffic(clients * sizes.join, clients * up, clients * more),
        Traffic(clients * (sizes.params + last), clients * sizes.down, clients * first),
        has_ragged(usual.shapes.up),
        prices,
    )


def _largest_bits(message: PyTree) -> int:
    """Bits of a message whose parts of variable length have their largest size."""

    def is_ragged(leaf: Any) -> bool:
        return isinstance(leaf, Ragged)

    def largest(leaf: Any) -> Any:
        return leaf.buffer if is_ragged(leaf) else leaf

    return static_bits(jax.tree.map(largest, message, is_leaf=is_ragged))


def check_prices(up: float | None, down: float | None) -> Prices:
    """The prices of both ways; 1 for both if neither is given."""
    if up is None and down is None:
        return SAME
    for name, price in (("up", up), ("down", down)):
        if price is None:
            raise SettingError(name, "is missing; give the prices of both ways")
        NOT_NEGATIVE(name, price)
    if up == down == 0:
        raise UserError("up, down", 0, "a pair of prices of which one is above 0")
    return Prices(cast(float, up), cast(float, down))
