# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The cost of private rounds: epsilon at a delta, for a whole client or for a row.

Gaussian mechanisms with mu_1, mu_2, ... compose to one with mu^2 = sum of mu_k^2, also
where each query is chosen after the answers before (Dong, Roth, Su). Its epsilon at a
delta is exact (Balle and Wang): ``gaussian_epsilon``.

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

For a client that sends zeros there is a fourth bound. Draw K - 1 of the other clients,
and one more, j, of the rest: the cohort is these K - 1 with the client, at chance q =
K/n, or with j. Given both, with v the update of j and u that of the client, a round
is::

    A = (1 - q) N(v) + q N(u)   with the client     B = (1 - q) N(v) + q N(0)   without

around the same sum, so that, by advanced joint convexity (Balle, Barthe and Gaboardi),
with b = (1 + q (exp(e) - 1)) / exp(e) and H the delta at e::

    delta_round = q H(N(u), (1-b) N(v) + b N(0)) <= q ((1-b) d(e, 2C) + b d(e, C))
    delta_round = q H(N(0), (1-b) N(v) + b N(u)) <= q d(e, C)

of A against B, and of B against A: H is convex, and d(e, x) grows with the distance x.
By joint convexity the same holds if j and the K - 1 are not known. With v = 0 this
would be Poisson sampling; v = -u is worse, and the epsilon of Poisson sampling is no
bound here.

With Poisson sampling every client is in a round with the chance q, independently of
all others, and neighbors may also differ by one client that is there or is not:

- ``"add_or_remove"``: that client is missing. The sum moves by C, and q stays: it is a
  number of the plan, and not computed from the number of clients.

dp-accounting has the privacy loss distribution of such rounds for all three, and that
of a client who is missing is that of one who sends zeros. The size of a cohort is
binomial, and compiled programs have room for some number of clients. A larger cohort is
cut, which happens in a round with a probability of ``OVERFLOW`` at most. Runs without
and with this cut differ with a probability p of at most that of all rounds together, on
either of two neighbors, so that epsilon and delta of runs without it become::

    delta <- delta + (1 + exp(epsilon)) p

Where cohorts are fixed in advance (``Cohort(epoch=...)``) each client takes part at
most once in an epoch, and sampling does not amplify privacy. The rounds of all epochs
are then one Gaussian mechanism of noise z / sqrt(epochs), whose epsilon is exact,
although later updates depend on earlier ones: ``blt_cost`` without buffers.

The mechanism of ``transforms.dp_blt`` is one Gaussian mechanism, too: the noise of all
rounds has a sensitivity in ``theory.blt`` for clients that take part so often and so
far apart, whatever the strategy was optimized for.

Reference: Dong, Roth, Su, "Gaussian differential privacy", 2019, arXiv:1905.02383;
Balle, Wang, "Improving the Gaussian mechanism for differential privacy",
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
from collections.abc import Mapping
from typing import NamedTuple, cast

import numpy as np

from fedblend.checks import CHANCE, COUNT, NOT_NEGATIVE, WHOLE, gate, optional, words
from fedblend.errors import UserError
from fedblend.theory.blt import STRATEGY, Blt, sensitivity

MOVES = {"replace_one": 2, "zero_out": 1, "add_or_remove": 1}
"""How far one client can move the sum, in units of the clip."""
RELATIONS = {
    "replace_one": "REPLACE_ONE",
    "zero_out": "REPLACE_SPECIAL",
    "add_or_remove": "ADD_OR_REMOVE_ONE",
}
"""The names of dp-accounting."""
LOSS_STEP, MAX_STEPS = 1e-4, 50_000
"""Privacy losses of a round are multiples of this step, or of a larger one if these are
too many."""
MAX_LOSS = 700.0
"""Of a round; its exponential is finite."""
OVERFLOW = 1e-18
"""The largest probability of a round to have a cohort that there is no room for."""


def gaussian_epsilon(squared: float, delta: float) -> float:
    """Epsilon at a delta of a Gaussian mechanism with this mu^2.

    >>> round(gaussian_epsilon(1.0, 1e-5), 2)
    4.38
    """
    from scipy.optimize import brentq

    if squared in (0, math.inf):
        return float(squared)
    noise = 1 / math.sqrt(squared)

    def excess(epsilon: float) -> float:
        return float(_gaussian_delta(noise, epsilon)) - delta

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    # Not below the root: by the tolerance of the search, it is above.
    return cast(float, brentq(excess, 0.0, high, xtol=1e-18)) * (1 + 1e-12)


def row_epsilon(steps: Mapping[tuple[float, float], int], delta: float) -> float:
    """Epsilon at a delta of a row, whose gradients ``row_noise`` perturbs.

    A row that is in the batch of a step moves its sum by one clip. Where batches are
    drawn, half of delta is for the chance that a row was in more of them than counted.

    Args:
        steps: evaluations by their noise, in clips, and by the chance that a given row
            was in the batch.
        delta: of the guarantee.
    """
    from scipy.stats import binom

    drawn = sum(share < 1 for _, share in steps)
    squared = 0.0
    for (noise, share), times in steps.items():
        most = times
        if share < 1:
            most = float(binom.isf(delta / 2 / drawn, times, share))
        squared += most / noise**2 if noise else math.inf
    return gaussian_epsilon(squared, delta / 2 if drawn else delta)


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
def cohort_cost(
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
    ``blt_cost`` for epochs.

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
    if importlib.util.find_spec("dp_accounting") is None:
        raise ImportError(
            "privacy: needs dp-accounting: pip install 'fedblend[private]'"
        )
    if random:
        return _poisson_cost(noise, cohort, clients, rounds, delta, adjacency)
    epsilon = gaussian_epsilon(rounds * (MOVES[adjacency] / noise) ** 2, delta)
    if cohort < clients:
        run = noise / MOVES["replace_one"], cohort, clients, rounds, delta
        epsilon = min(
            epsilon,
            distribution_epsilon(*run),
            _renyi_epsilon(*run),
            *[distribution_epsilon(*run, zeros=True)] * (adjacency == "zero_out"),
        )
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
def blt_cost(
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

    No cohorts are sampled, their size does not matter.

    Args:
        noise: z, that a round adds in units of the clip.
        strategy: as of ``dp_blt``; ``blt.INDEPENDENT`` for ``dp_fedavg``.
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
    moved = 0.0
    if rounds > 0:
        far = sensitivity(strategy, rounds, separation, participations)
        moved = MOVES[adjacency] * far
    return _compose(runs, moved, noise, delta, adjacency)


def _compose(
    times: int, moved: float, noise: float, delta: float, adjacency: str
) -> Guarantee:
    """The guarantee of so many Gaussian mechanisms, each of which a client moves."""
    if noise == 0:
        return Guarantee(None, delta, adjacency, "there is no noise")
    epsilon = gaussian_epsilon(times * (moved / noise) ** 2, delta)
    return Guarantee(epsilon, delta, adjacency)


def _poisson_cost(
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


def _renyi_epsilon(
    noise: float, cohort: int, clients: int, rounds: int, delta: float
) -> float:
    """As ``distribution_epsilon``, by the Rényi bound."""
    import dp_accounting as dp
    from dp_accounting.rdp import RdpAccountant

    # This accountant takes noise in units of how far the sum moves.
    event = dp.GaussianDpEvent(noise)
    sampled = dp.SampledWithoutReplacementDpEvent(clients, cohort, event)
    accountant = RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    accountant.compose(sampled, rounds)
    return accountant.get_epsilon(delta)


def distribution_epsilon(
    noise: float,
    cohort: int,
    clients: int,
    rounds: int,
    delta: float,
    zeros: bool = False,
) -> float:
    """Epsilon of Gaussian rounds by their privacy loss distribution.

    Args:
        noise: in units of how far replacing one client moves the sum.
        cohort: clients of a round.
        clients: all there are.
        rounds: that are composed.
        delta: of all of them.
        zeros: whether the other client is one that sends zeros.
    """
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    chance = cohort / clients
    # At larger losses a Gaussian has less than exp(-50), which counts as infinite loss.
    most = 0.5 / noise**2 + 10 / noise
    if most > MAX_LOSS:
        return math.inf
    top = math.log1p(chance * math.expm1(most))
    step = max(LOSS_STEP, top / MAX_STEPS)
    last = math.ceil(top / step)
    loss = step * np.arange(last + 1)
    inner = np.log1p(np.expm1(loss) / chance)
    there = gone = chance * _gaussian_delta(noise, inner)
    if zeros:
        gone = chance * _gaussian_delta(2 * noise, inner)
        share = np.exp(loss - inner)
        there = (1 - share) * there + share * gone

    def distribution(ahead: np.ndarray, back: np.ndarray) -> pld_pmf.PLDPmf:
        negative = -np.expm1(-loss[:0:-1]) + np.exp(-loss[:0:-1]) * back[:0:-1]
        deltas = _convex(step, np.concatenate([negative, ahead]))
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
            step, -last, last, np.clip(deltas, 0.0, 1.0)
        )

    ways = [distribution(there, gone)]
    if zeros:
        ways.append(distribution(gone, there))
    composed = PrivacyLossDistribution(*ways).self_compose(rounds)
    return float(composed.get_epsilon_for_delta(delta))


def _gaussian_delta(noise: float, loss: float | np.ndarray) -> np.ndarray:
    """The delta of a Gaussian mechanism, with noise in units of how far it moves."""
    from scipy.special import log_ndtr

    upper = log_ndtr(0.5 / noise - loss * noise)
    lower = loss + log_ndtr(-0.5 / noise - loss * noise)
    return -np.exp(upper) * np.expm1(np.minimum(lower - upper, 0.0))


def _convex(step: float, deltas: np.ndarray) -> np.ndarray:
    """The deltas at losses around 0, made larger where they are not convex in exp(e).

    Those of all mechanisms are, and a bound of them need not be.
    """
    last = len(deltas) // 2
    gaps = np.diff(np.exp(step * np.arange(-last, last + 1)))
    slopes = np.minimum.accumulate((np.diff(deltas) / gaps)[::-1])
    falls = np.append(0.0, np.cumsum(-slopes * gaps[::-1]))
    return deltas[-1] + falls[::-1]


@gate(clients=COUNT, cohort=COUNT)
def largest_cohort(clients: int, cohort: int) -> int:
    """The number of clients that there has to be room for.

    Args:
        clients: n.
        cohort: K, clients of a round in the mean.
    """
    if cohort > clients:
        raise UserError("cohort", cohort, f"at most the {clients} clients there are")
    deviation = np.sqrt(cohort * (1 - cohort / clients))
    # Bernstein's inequality: a binomial is no further above its mean.
    most = min(clients, int(cohort + 10 * deviation + 30) + 1)
    sizes = np.arange(cohort, most + 1)
    return int(sizes[np.argmax(overflow(clients, cohort, sizes) <= OVERFLOW)])


def overflow(clients: int, cohort: int, room: np.ndarray) -> np.ndarray:
    """The probability that a cohort has more clients than there is room for.

    Args:
        clients: n.
        cohort: K, clients of a round in the mean.
        room: an array of numbers of clients.
    """
    from scipy.special import betainc

    short = np.maximum(clients - room, 1)
    tail = betainc(room + 1.0, short, cohort / clients)
    return np.where(room < clients, tail, 0.0)


def _check(adjacency: str, random: bool = False) -> None:
    """Refuse an adjacency that is unknown, or that is for cohorts of random size."""
    if adjacency == "add_or_remove" and not random:
        raise ValueError(
            "adjacency: 'add_or_remove' needs cohorts of random size, sampling = "
            "'poisson'; those here have a fixed one, for 'replace_one' or 'zero_out'"
        )
    words(*MOVES)("adjacency", adjacency)
