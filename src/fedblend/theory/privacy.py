# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The cost of private rounds: epsilon at a delta, for a whole client.

The mechanism of ``transforms.dp_fedavg``, in every round: a cohort of K of the n
clients, drawn without replacement, and the sum of updates of norm C at most with noise
N(0, (z C)^2). Two datasets are neighbors if they differ in one client:

- ``"replace_one"``: that client has any other data. The sum moves by 2 C.
- ``"zero_out"``: that client sends zeros. The sum moves by C.

Rounds in which the client does not take part reveal nothing about it, if nobody knows
which they are. Three bounds hold, and the smallest one counts. If the client took part
always, the rounds would be one Gaussian mechanism of noise z / sqrt(rounds), whose
epsilon is exact (Balle and Wang). The others use the chance q = K/n to take part. With
d(e) the delta of the Gaussian mechanism at epsilon e, a round has at log(1 + q (exp(e)
- 1)) a delta of at most q d(e) (Balle, Barthe and Gaboardi). As neighbors are
symmetric, this bounds the whole privacy loss distribution of a round, by (Zhu, Dong and
Wang)::

    delta_round(-e) = 1 - exp(-e) + exp(-e) delta_round(e)

and rounds are composed by convolution, with a grid that is rounded upwards (Doroshenko
et al.). The last bound is the Rényi bound of Wang, Balle and Kasiviswanathan. Both are
about replacing one, and a client that sends zeros is one of the replacements. A client
that drops out counts as one that sends zeros.

For a client that sends zeros there is a fourth bound, in ``loss_distribution``.

With Poisson sampling every client is in a round with the chance q, independently of
all others, and neighbors may also differ by one client that is there or is not:

- ``"add_or_remove"``: that client is missing. The sum moves by C, and q stays: it is a
  number of the plan, and not computed from the number of clients.

dp-accounting has the privacy loss distribution of such rounds for all three, and that
of a client who is missing is that of one who sends zeros. The chance that a cohort is
too large for its room goes into delta (``theory.poisson``).

Where cohorts are fixed in advance (``Cohort(epoch=...)``) each client takes part at
most once in an epoch, and sampling does not amplify privacy. The mechanism of
``transforms.dp_ftrl`` is then a Gaussian one for every node of a tree that a client is
in, at most as many as the tree's rounds have binary digits. All nodes of all epochs are
one Gaussian mechanism of noise z / sqrt(nodes), whose epsilon is exact, although later
updates depend on earlier ones. Rounds with independent noise are trees of one round.

The mechanism of ``transforms.dp_blt`` is one Gaussian mechanism, too: the noise of all
rounds has a sensitivity in ``theory.blt`` for clients that take part so often and so
far apart, whatever the strategy was optimized for.

Reference: Balle, Wang, "Improving the Gaussian mechanism for differential privacy",
ICML 2018, arXiv:1805.06530; Balle, Barthe, Gaboardi, "Privacy amplification by
subsampling: tight analyses via couplings and divergences", NeurIPS 2018,
arXiv:1807.01647; Zhu, Dong, Wang, "Optimal accounting of differential privacy via
characteristic function", AISTATS 2022, arXiv:2106.08567; Doroshenko, Ghazi, Kamath,
Kumar, Manurangsi, "Connect the dots: tighter discrete approximations of privacy loss
distributions", PETS 2022, arXiv:2207.04380; Wang, Balle, Kasiviswanathan,
"Subsampled Rényi differential privacy and analytical moments accountant", AISTATS 2019,
arXiv:1808.00087; for Poisson sampling Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar,
Zhang, "Deep learning with differential privacy", CCS 2016, arXiv:1607.00133; for trees
Kairouz, McMahan, Song, Thakkar, Thakurta, Xu, "Practical and private (deep) learning
without sampling or shuffling", ICML 2021, arXiv:2103.00039.
"""

import importlib.util
import math
from typing import NamedTuple

from fedblend.checks import CHANCE, COUNT, NOT_NEGATIVE, WHOLE, gate, optional, words
from fedblend.theory.blt import STRATEGY, Blt, sensitivity
from fedblend.theory.loss_distribution import MAX_LOSS, by_loss_distribution
from fedblend.theory.poisson import OVERFLOW, largest_cohort

MOVES = {"replace_one": 2, "zero_out": 1, "add_or_remove": 1}
"""How far one client can move the sum, in units of the clip."""
RELATIONS = {
    "replace_one": "REPLACE_ONE",
    "zero_out": "REPLACE_SPECIAL",
    "add_or_remove": "ADD_OR_REMOVE_ONE",
}
"""The names of dp-accounting."""


class Guarantee(NamedTuple):
    """(epsilon, delta)-differential privacy of all rounds, or why there is none."""

    epsilon: float | None
    delta: float
    adjacency: str
    reason: str = ""

    def __str__(self) -> str:
        if self.epsilon is None:
            return f"no guarantee: {self.reason}"
        neighbors = self.adjacency.replace("_", " ")
        return f"epsilon {self.epsilon:.4g} at delta {self.delta:g} ({neighbors})"


@gate(
    **dict.fromkeys(("cohort", "clients"), COUNT),
    noise=NOT_NEGATIVE,
    rounds=WHOLE,
    delta=CHANCE,
)
def spent(
    *,
    noise: float,
    cohort: int,
    clients: int,
    rounds: int,
    delta: float,
    adjacency: str = "replace_one",
    sampling: str = "fixed",
) -> Guarantee:
    """The privacy that rounds of ``dp_fedavg`` cost a client.

    Needs the extra ``private``. For cohorts drawn anew in every round; see
    ``spent_by_tree`` for epochs.

    Args:
        noise: z, of the sum in units of the clip; with a quantile, of both together.
        cohort: K, the number of clients of a round.
        clients: n, the number of all clients.
        rounds: of the whole run, whichever of them are published.
        delta: the probability of failure; far below 1/n.
        adjacency: "replace_one", "zero_out" or, with Poisson sampling, "add_or_remove".
        sampling: "fixed" or "poisson", as in ``simulate``.
    """
    if not 1 <= cohort <= clients:
        raise ValueError(
            f"cohort: {cohort} is not between 1 and the {clients} clients there are"
        )
    random = words("fixed", "poisson")("sampling", sampling) == "poisson"
    _check(adjacency, random)
    if noise == 0:
        return Guarantee(None, delta, adjacency, "there is no noise")
    if rounds == 0:
        return Guarantee(0.0, delta, adjacency)
    _check_installed()
    if random:
        return _spent_by_poisson(noise, cohort, clients, rounds, delta, adjacency)
    epsilon = _always_sampled(noise / MOVES[adjacency], rounds, delta)
    if cohort < clients:
        run = noise / MOVES["replace_one"], cohort, clients, rounds, delta
        epsilon = min(
            epsilon,
            by_loss_distribution(*run),
            _by_renyi_divergence(*run),
            *[by_loss_distribution(*run, zeros=True)] * (adjacency == "zero_out"),
        )
    return Guarantee(float(epsilon), delta, adjacency)


@gate(
    noise=NOT_NEGATIVE,
    rounds=WHOLE,
    delta=CHANCE,
    tree=COUNT,
    epoch=optional(COUNT),
    runs=COUNT,
)
def spent_by_tree(
    *,
    noise: float,
    tree: int,
    epoch: int | None,
    rounds: int,
    delta: float,
    adjacency: str = "replace_one",
    runs: int = 1,
) -> Guarantee:
    """The privacy that rounds cost a client that takes part at most once in an epoch.

    Needs the extra ``private``. No cohorts are sampled, their size does not matter.

    Args:
        noise: z, of a node in units of the clip.
        tree: rounds of a tree of ``dp_ftrl``; 1 for ``dp_fedavg``.
        epoch: as in ``simulate``; None if cohorts are drawn anew in every round.
        rounds: of the whole run, whichever of them are published.
        delta: the probability of failure; far below 1/n.
        adjacency: "replace_one" or "zero_out".
        runs: number of runs of all rounds, with other seeds.
    """
    _check(adjacency)
    if noise == 0:
        return Guarantee(None, delta, adjacency, "there is no noise")
    if (epoch or 1) % tree:
        drawn = (
            f"drawn in epochs of {epoch} rounds" if epoch else "drawn in every round"
        )
        reason = (
            f"clients are {drawn}, and one may take part more than once in a tree of "
            f"{tree}; epochs of {tree} or a multiple are needed"
        )
        return Guarantee(None, delta, adjacency, reason)
    if rounds == 0:
        return Guarantee(0.0, delta, adjacency)
    _check_installed()
    nodes = runs * _nodes(rounds, epoch or 1, tree)
    epsilon = _always_sampled(noise / MOVES[adjacency], nodes, delta)
    return Guarantee(float(epsilon), delta, adjacency)


@gate(
    noise=NOT_NEGATIVE,
    strategy=STRATEGY,
    rounds=WHOLE,
    delta=CHANCE,
    separation=COUNT,
    participations=optional(COUNT),
    runs=COUNT,
)
def spent_by_blt(
    *,
    noise: float,
    strategy: Blt,
    rounds: int,
    delta: float,
    separation: int = 1,
    participations: int | None = None,
    adjacency: str = "replace_one",
    runs: int = 1,
) -> Guarantee:
    """The privacy that rounds of ``dp_blt`` cost a client.

    Needs the extra ``private``. No cohorts are sampled, their size does not matter.

    Args:
        noise: z, that a round adds in units of the clip.
        strategy: as of ``dp_blt``.
        rounds: of the whole run, whichever of them are published.
        delta: the probability of failure; far below 1/n.
        separation: as in ``simulate``: rounds from one update of a client to its next,
            at least; 1 if cohorts are drawn or dealt otherwise.
        participations: updates of a client at most, such as the number of epochs; as
            many as fit if None.
        adjacency: "replace_one" or "zero_out".
        runs: number of runs of all rounds, with other seeds.
    """
    _check(adjacency)
    if noise == 0:
        return Guarantee(None, delta, adjacency, "there is no noise")
    if rounds == 0:
        return Guarantee(0.0, delta, adjacency)
    _check_installed()
    moved = MOVES[adjacency] * sensitivity(strategy, rounds, separation, participations)
    epsilon = _always_sampled(noise / moved, runs, delta)
    return Guarantee(float(epsilon), delta, adjacency)


def _nodes(rounds: int, epoch: int, tree: int) -> int:
    """The most nodes that a client can be in, taking part once in every epoch.

    In a tree of T rounds the first leaf is below a node of every size up to T: 1, 2,
    4, .., as many as T has binary digits.
    """
    whole, rest = divmod(rounds, epoch)
    return whole * tree.bit_length() + min(rest, tree).bit_length()


def _always_sampled(noise: float, rounds: int, delta: float) -> float:
    from dp_accounting import get_epsilon_gaussian

    return get_epsilon_gaussian(noise / math.sqrt(rounds), delta)


def _spent_by_poisson(
    noise: float, cohort: int, clients: int, rounds: int, delta: float, adjacency: str
) -> Guarantee:
    """Epsilon with delta less the chance of cohorts without room.

    Noise is in units of the clip.
    """
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant

    relation = getattr(dp.NeighboringRelation, RELATIONS[adjacency])
    sampled = dp.PoissonSampledDpEvent(cohort / clients, dp.GaussianDpEvent(noise))
    accountant = PLDAccountant(neighboring_relation=relation).compose(sampled, rounds)
    cut = largest_cohort(clients, cohort) < clients
    failure, epsilon, left = rounds * OVERFLOW * cut, 0.0, delta
    while left > 0:
        needed = float(accountant.get_epsilon(left))
        if needed <= epsilon:
            return Guarantee(epsilon, delta, adjacency)
        # A little more than needed, so that the next turn finds it enough.
        epsilon = needed * (1 + 1e-9)
        left = delta - (1 + math.exp(min(epsilon, MAX_LOSS))) * failure
    reason = f"delta {delta:g} is below the chance of a cohort that is too large"
    return Guarantee(None, delta, adjacency, reason)


def _by_renyi_divergence(
    noise: float, cohort: int, clients: int, rounds: int, delta: float
) -> float:
    """As ``_by_loss_distribution``, by the Rényi bound."""
    import dp_accounting as dp
    from dp_accounting.rdp import RdpAccountant

    # This accountant takes noise in units of how far the sum moves.
    event = dp.GaussianDpEvent(noise)
    sampled = dp.SampledWithoutReplacementDpEvent(clients, cohort, event)
    accountant = RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    accountant.compose(sampled, rounds)
    return accountant.get_epsilon(delta)


def _check_installed() -> None:
    if importlib.util.find_spec("dp_accounting") is None:
        raise ImportError(
            "privacy: needs dp-accounting: pip install 'fedblend[private]'"
        )


def _check(adjacency: str, random: bool = False) -> None:
    """Refuse an adjacency that is unknown, or that is for cohorts of random size."""
    if adjacency == "add_or_remove" and not random:
        raise ValueError(
            "adjacency: 'add_or_remove' needs cohorts of random size, sampling = "
            "'poisson'; those here have a fixed one, for 'replace_one' or 'zero_out'"
        )
    words(*MOVES)("adjacency", adjacency)
