# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Local steps that need fewer communications: rates, probabilities, and what they buy.

Scaffnew, Scafflix, LoCoDL and CompressedScaffnew communicate when a coin of probability
p says so, and minimize FLIX's f~ exactly. Each has a Lyapunov function Psi that a local
step shrinks by a factor ``1 - zeta`` in expectation. With ``l_i = alpha_i^2 L_i``,
``m_i = alpha_i^2 mu_i`` and ``c(gamma, L, mu) = 1 - max(|1 - gamma mu|, |1 - gamma
L|)^2``::

    Scaffnew   one rate 1/max l_i             zeta = min(min c(rate, l_i, m_i), p^2)
    Scafflix   rates gamma_i = 1/L_i of f_i   zeta = min(min c(gamma_i, L_i, mu_i), p^2)
    LoCoDL     one rate gamma                 zeta = min(c, p^2 rho/(1 + 2 omega))
               rho = 1/(1 + omega_av)         (one mask for all: 1 + omega in place)
    CompressedScaffnew, one rate              zeta = min(c, p^2 eta (s-1)/(n-1))
               eta = n (s-1)/(s (n-1))        each entry from s of n clients

with the Lyapunov functions, h_i* and u_i* being gradients at the minimizer x*::

    Scafflix   sum_i alpha_i^2/gamma_i |x_i - x*|^2 + gamma_i/p^2 |h_i - h_i*|^2
    LoCoDL     1/gamma (sum_i |x_i - x*|^2 + n |y - x*|^2)
               + gamma (1 + 2 omega)/(p^2 rho) (sum_i |u_i - u_i*|^2 + n |v - v*|^2)
    CompressedScaffnew  1/gamma sum_i |x_i - x*|^2
               + gamma (n-1)/(p^2 eta (s-1)) sum_i |h_i - h_i*|^2

The last one is proved as follows, entry by entry. Let ``y_i = xhat_i - x*``, m their
mean, ``V = sum |y_i - m|^2``, ``e_i = h_i - h_i*`` and ``a = (s-1)/(n-1)``. The mean of
s of n numbers without replacement, xbar, has ``n E|xbar - x*|^2 = n |m|^2 + (1 - eta)
V``, and ``E sum q_i |xbar - xhat_i|^2 = a V``, ``E q_i (xbar - xhat_i) = a (m - y_i)``.
As ``sum e_i = 0``, a communication makes Psi, in expectation, ``sum
|y_i|^2/gamma - 2/p sum <e_i, y_i> + gamma/(p^2 eta a) sum |e_i|^2``: the terms with V
cancel for this eta. That is Scaffnew's with another weight of the controls.

*A round* is one communication and the steps before it, geometric(p) of them. The papers
count steps: ``(1 - zeta)^t`` after t steps, pt of which communicate on average. For the
expected Psi after a given number of rounds the number of steps is random and not
independent of Psi, and this module proves its own factor 1 - d. Let P^2 be the second
part of zeta, and c the first one. Where a step ends at a distance ``|w + P v|`` from x*
with ``|w|^2 <= (1 - c) Psi_x`` and ``|v|^2 = Psi_h``, and stops with probability p, ``E
Psi <= (1 - d) Psi`` follows by induction over the steps of a round if, for some theta >
0::

    d (1 - (1-c) (1-p) (1 - P theta)) <= c
    d (1 - (1-p) (1 + P^2) + P (1-p)/theta) <= P^2

For p = 1 it is ``d = c``, gradient descent's; for small p, a round does between 2/3 and
all of what 1/p steps do.

LoCoDL needs a strongly convex g: half of the smallest m_i, as ``moved/2 |x|^2``, moves
from every f~_i to g, or comes on top of the server's loss. Where f~_i are not strongly
convex nothing is proved, and a large ``moved`` diverges: in a direction without data,
where every f~_i is flat, a step takes x_i and y apart by ``gamma moved (x_i + y)``, and
only the duals hold them. With s the mean of all x_i and y, e that of x_i - y after the
steps of a round, and ``w = moved s - v``, means over coins and compressors have, up to
higher orders::

    e = 2 gamma w/(p rho)        w <- w (1 + gamma/(p rho) (gamma moved^2/p - eta))

which shrinks for ``gamma moved < P``. ``stable_moved`` is half of that.

*Minibatches.* Gradients with variance sigma_i^2 add ``gamma sum_i sigma_i^2`` to the
expected Psi at every step, whatever is compressed, as noise enters w alone:
``E Psi <= (1 - zeta)^t Psi^0 + gamma sum_i sigma_i^2/zeta``.

Reference: Mishchenko, Malinovsky, Stich, Richtárik, ICML 2022, arXiv:2202.09357
(Scaffnew); Yi, Condat, Richtárik, arXiv:2305.13170 (Scafflix); Condat, Maranjyan,
Richtárik, ICLR 2025, arXiv:2403.04348 (LoCoDL); Condat, Agarský, Richtárik, 2026,
arXiv:2210.13277 (CompressedScaffnew).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fedblend.checks import (
    COUNT,
    FLAG,
    NOT_NEGATIVE,
    Number,
    gate,
    optional,
    words,
)
from fedblend.errors import UserError
from fedblend.theory.bounds import Bound, one_shot, start_distance
from fedblend.theory.constants import (
    MixtureConstants,
    Smoothness,
    alpha_squares,
    smoothness_of_parts,
)
from fedblend.theory.steps import KNOWN

THETA = np.geomspace(1e-3, 1e3, 601)
"""The values that are tried; each gives a valid bound."""


class LocalTraining(NamedTuple):
    """What theory chooses for a method whose coin says when to communicate.

    ``rates`` are the steps gamma_i of f_i (Scafflix) or of f~_i (all others), one for
    every client; ``steps`` is 1/p, the mean number of local steps of a round. A round
    multiplies the expected Psi by ``factor``. ``dual`` is P^2/p^2, 1 for Scafflix;
    ``moved`` is LoCoDL's.
    """

    rates: np.ndarray
    steps: int
    factor: float
    dual: float = 1.0
    moved: float = 0.0

    @property
    def p(self) -> float:
        """The probability of a communication."""
        return 1 / self.steps


@gate(**KNOWN, steps=optional(COUNT), longer=FLAG)
def scafflix(
    alpha, smoothness: Smoothness, steps: int | None = None, *, longer: bool = False
) -> LocalTraining:
    """Scafflix, with a rate ``1/L_i`` of its own for each client.

    Clients with alpha_i = 0 take no part in what is shared, and do not count.

    Args:
        alpha: the weight of the shared model, a number or one for every client.
        smoothness: of all f_i.
        steps: 1/p; None for about ``sqrt(max L_i/mu_i)``, half of that if longer.
        longer: rates ``2/(L_i + mu_i)``, the longest that c allows.
    """
    shares = alpha_squares(alpha, smoothness) > 0
    _positive(float(shares.max()), scafflix, "alpha of some client")
    rates = scafflix_rates(smoothness.smooth, smoothness.convex, longer)
    own, smooth, convex = (of[shares] for of in (rates, *smoothness[:2]))
    _positive(float(convex.min()), scafflix, "convexity of every f_i")
    usual = math.sqrt(1 / float((own * convex).min()))
    return _choose(rates, min(map(_shrinks, own, smooth, convex)), 1.0, steps or usual)


@gate(
    **KNOWN,
    omega=NOT_NEGATIVE,
    masks=words("own", "one"),
    steps=optional(COUNT),
)
def locodl(
    alpha,
    smoothness: Smoothness,
    omega: float,
    *,
    masks: str = "own",
    steps: int | None = None,
    moved: float | None = None,
) -> LocalTraining:
    """LoCoDL on f~ plus g, with one rate and compressors of variance omega.

    Args:
        alpha: the weight of the shared model, a number or one for every client.
        smoothness: of all f_i.
        omega: variance of the compressor.
        masks: "own" for compressors drawn independently, "one" if all clients send the
            same entries.
        steps: 1/p; None for about ``sqrt(kappa/((1 + omega_av) (1 + 2 omega)))``.
        moved: what moves from every f~_i to g; None for half of the smallest m_i.
    """
    parts = smoothness_of_parts(alpha, smoothness)
    convex = alpha_squares(alpha, smoothness) * smoothness.convex
    least = _positive(float(convex.min()), locodl, "convexity of every f_i mixed")
    own = least / 2 if moved is None else moved
    if not own < least:
        allowed = f"below {least:g}, the smallest convexity of all f_i mixed"
        raise UserError("locodl: moved", own, allowed)
    largest = max(float(parts.max()) - own, own)
    smallest = _positive(min(least - own, own), locodl, "convexity of g")
    rate, dual = 2 / (largest + smallest), locodl_scales(omega, len(parts), masks)[1]
    rates, primal = np.full(len(parts), rate), _shrinks(rate, largest, smallest)
    return _choose(rates, primal, dual, steps)._replace(moved=own)


def scafflix_rates(smooth: Any, convex: Any, longer: bool) -> Any:
    """The rates 1/L_i of Scafflix, or 2/(L_i + mu_i)."""
    if smooth is None:
        raise UserError("scafflix: smooth", smooth, 'L_i, for the rate "theory"')
    if longer and convex is None:
        raise UserError("scafflix: convex", convex, "mu_i, for longer rates")
    return 2 / (smooth + convex) if longer else 1 / smooth


def stable_moved(rate: Any, p: float, dual: float) -> Any:
    """What may move to g of LoCoDL where losses have flat directions: P/(2 rate).

    Args:
        rate: of a local step.
        p: the probability of a communication.
        dual: P^2/p^2, from ``locodl_scales``.
    """
    return p * math.sqrt(dual) / (2 * rate)


def locodl_scales(
    omega: float, clients: int, masks: str = "own"
) -> tuple[float, float]:
    """The factor rho of LoCoDL, and ``P^2/p^2 = rho/(1 + 2 omega)``; see ``locodl``."""
    if masks == "one":
        return 1 / (1 + omega), 1 / (1 + omega) ** 2
    relaxation = 1 / (1 + omega / clients)
    return relaxation, relaxation / (1 + 2 * omega)


@gate(**KNOWN, copies=Number(whole=True, least=2), steps=optional(COUNT))
def compressed_scaffnew(
    alpha, smoothness: Smoothness, copies: int, *, steps: int | None = None
) -> LocalTraining:
    """CompressedScaffnew on f~, with one rate ``2/(max l_i + min m_i)``.

    Args:
        alpha: the weight of the shared model, a number or one for every client.
        smoothness: of all f_i.
        copies: s, how many clients send each entry.
        steps: 1/p; None for about ``sqrt(kappa s/n)``, where c is P^2.
    """
    parts = smoothness_of_parts(alpha, smoothness)
    convex = alpha_squares(alpha, smoothness) * smoothness.convex
    what = "convexity of every f_i mixed"
    least = _positive(float(convex.min()), compressed_scaffnew, what)
    rate = 2 / (float(parts.max()) + least)
    primal, dual = (
        _shrinks(rate, float(parts.max()), least),
        dealt_scales(len(parts), copies)[1],
    )
    return _choose(np.full(len(parts), rate), primal, dual, steps)


def dealt_scales(clients: int, copies: int) -> tuple[float, float]:
    """The factor eta of CompressedScaffnew, and ``P^2/p^2 = eta (s - 1)/(n - 1)``."""
    if not 2 <= copies <= clients:
        allowed = f"from 2 to {clients}, the number of clients"
        raise UserError("compressed_scaffnew: copies", copies, allowed)
    part = (copies - 1) / (clients - 1)
    eta = clients / copies * part
    return eta, eta * part


def _choose(
    rates: np.ndarray, primal: float, dual: float, steps: float | None
) -> LocalTraining:
    """With the whole number of steps nearest to the best, if none is given."""
    whole = max(round(steps or math.sqrt(dual / primal)), 1)
    factor = 1 - round_contraction(1 / whole, math.sqrt(dual) / whole, primal)
    return LocalTraining(rates, whole, factor, dual)


def round_contraction(p: float, dual: float, primal: float) -> float:
    """d: a round multiplies the expected Psi by at most 1 - d.

    Args:
        p: the probability of a communication.
        dual: P, of this module's text; p itself for Scaffnew and Scafflix.
        primal: c, likewise.
    """
    near = 1 - (1 - primal) * (1 - p) * (1 - dual * THETA)
    far = 1 - (1 - p) * (1 + dual**2) + dual * (1 - p) / THETA
    return float(np.minimum(primal / near, dual**2 / far).max())


def scafflix_bound(chosen: LocalTraining, known: MixtureConstants) -> Bound:
    """E f~(x^k) - min f~ after k rounds of Scafflix from x_avg, with controls at 0.

    ``L_alpha/2 factor^k Psi^0/sum a_i`` with ``a_i = alpha_i^2/gamma_i``: all x_i are
    x^k after a communication. For minimizers x_i, ``Psi^0/sum a_i <= |x_avg - x*|^2 + n
    max(gamma_i L_i) L_alpha V/(p^2 sum a_i)``, by the inequalities of ``bounds``.
    """
    weights = known.alpha**2 / chosen.rates
    return _bound(chosen, known, weights, chosen.rates * known.smoothness.smooth)


def scaffnew_bound(chosen: LocalTraining, known: MixtureConstants) -> Bound:
    """The same of Scaffnew, also compressed, on f~: ``gamma_i = alpha_i^2 rate``."""
    parts = smoothness_of_parts(known.alpha, known.smoothness)
    return _bound(chosen, known, 1 / chosen.rates, chosen.rates * parts)


def _bound(chosen: LocalTraining, known: MixtureConstants, weights, reach) -> Bound:
    noise = known.clients * float(reach.max()) * known.L_alpha * known.V
    scale = chosen.p**2 * chosen.dual * float(weights.sum())
    start = start_distance(known) + noise / scale
    return Bound(known.L_alpha / 2 * start, chosen.factor, 0.0, one_shot(known))


def locodl_bound(chosen: LocalTraining, known: MixtureConstants) -> Bound:
    """E f~(y^k) - min f~ after k rounds of LoCoDL from x_avg, without a central loss.

    ``n/gamma |y - x*|^2 <= Psi``, and Psi^0 has ``sum |grad f~_i(x*)|^2 + 2 n moved^2
    |x*|^2`` for u_i = v = 0, where ``|x*| <= |x_avg| + |x_avg - x*|``.
    """
    away = start_distance(known)
    length = (float(np.linalg.norm(known.average)) + math.sqrt(away)) ** 2
    largest = float(smoothness_of_parts(known.alpha, known.smoothness).max())
    slopes = largest * known.L_alpha * known.V + 2 * chosen.moved**2 * length
    scale = float(chosen.rates[0]) ** 2 / (chosen.p**2 * chosen.dual)
    start = known.L_alpha / 2 * (2 * away + scale * slopes)
    return Bound(start, chosen.factor, 0.0, one_shot(known))


def _shrinks(rate: float, smooth: float, convex: float) -> float:
    """``1 - max(|1 - rate convex|, |1 - rate smooth|)^2``."""
    return 1 - max(abs(1 - rate * convex), abs(1 - rate * smooth)) ** 2


def _positive(value: float, method: Callable[..., Any], what: str) -> float:
    if not value > 0:
        raise ValueError(
            f"{method.__name__}: theory needs {what} above 0, not {value:g}"
        )
    return value
