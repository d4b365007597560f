# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The cost of private rounds: epsilon at a delta, for a whole client.

The mechanism of ``transforms.dp_fedavg``, in every round: a cohort of K of the n
clients, drawn without replacement, and the sum of updates of norm C at most with noise
N(0, (z C)^2). Two datasets are neighbors if they differ in one client:

- ``"replace_one"``: that client has any other data. The sum moves by 2 C.
- ``"zero_out"``: that client sends zeros. The sum moves by C.

Rounds in which the client does not take part reveal nothing about it. Two bounds hold,
and the smaller one counts. If the client took part always, the rounds would be one
Gaussian mechanism of noise z / sqrt(rounds), whose epsilon is exact (Balle and Wang).
The Rényi bound for sampling without replacement (Wang, Balle and Kasiviswanathan) uses
the chance K/n to take part; it is about replacing one, and a client that sends zeros is
one of the replacements. Adding or removing a client would need cohorts of random size.
A client that drops out counts as one that sends zeros.

Where cohorts are fixed in advance (``simulate(epoch=...)``) each client takes part at
most once in an epoch, and sampling does not amplify privacy. The mechanism of
``transforms.dp_ftrl`` is then a Gaussian one for every node of a tree that a client is
in, at most as many as the tree's rounds have binary digits. All nodes of all epochs are
one Gaussian mechanism of noise z / sqrt(nodes), whose epsilon is exact, although later
updates depend on earlier ones. Rounds with independent noise are trees of one round.

Reference: Balle, Wang, "Improving the Gaussian mechanism for differential privacy",
ICML 2018, arXiv:1805.06530; Wang, Balle, Kasiviswanathan, "Subsampled Rényi
differential privacy and analytical moments accountant", AISTATS 2019, arXiv:1808.00087;
for trees Kairouz, McMahan, Song, Thakkar, Thakurta, Xu, "Practical and private (deep)
learning without sampling or shuffling", ICML 2021, arXiv:2103.00039.
"""

import importlib.util
import math
from typing import NamedTuple

from fedblend.checks import CHANCE, COUNT, NOT_NEGATIVE, WHOLE, gate, optional, words

MOVES = {"replace_one": 2, "zero_out": 1}
"""How far one client can move the sum, in units of the clip."""


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
        adjacency: "replace_one" or "zero_out".
    """
    if not 1 <= cohort <= clients:
        raise ValueError(
            f"cohort: {cohort} is not between 1 and the {clients} clients there are"
        )
    _check(adjacency)
    if noise == 0:
        return Guarantee(None, delta, adjacency, "there is no noise")
    if rounds == 0:
        return Guarantee(0.0, delta, adjacency)
    _check_installed()
    epsilon = _always_sampled(noise / MOVES[adjacency], rounds, delta)
    if cohort < clients:
        epsilon = min(epsilon, _randomly_sampled(noise, cohort, clients, rounds, delta))
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


def _randomly_sampled(
    noise: float, cohort: int, clients: int, rounds: int, delta: float
) -> float:
    import dp_accounting as dp
    from dp_accounting.rdp import RdpAccountant

    # This accountant takes noise in units of how far the sum moves, under any relation,
    # and replacing an update moves it by twice the clip.
    event = dp.GaussianDpEvent(noise / MOVES["replace_one"])
    sampled = dp.SampledWithoutReplacementDpEvent(clients, cohort, event)
    accountant = RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    accountant.compose(sampled, rounds)
    return accountant.get_epsilon(delta)


def _check_installed() -> None:
    if importlib.util.find_spec("dp_accounting") is None:
        raise ImportError(
            "privacy: needs dp-accounting: pip install 'fedblend[private]'"
        )


def _check(adjacency: str) -> None:
    if adjacency == "add_or_remove":
        raise ValueError(
            "adjacency: 'add_or_remove' needs cohorts of random size; those here have "
            "a fixed one, for 'replace_one' or 'zero_out'"
        )
    words(*MOVES)("adjacency", adjacency)
