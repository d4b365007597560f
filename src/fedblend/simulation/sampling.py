# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Sampling clients: cohorts by client id, without replacement, and what clients weigh.

Cohorts are drawn from the keys alone, whatever block of rounds they are drawn with.
With ``Strata`` every round has so many clients of each of several populations. With an
``epoch`` clients are dealt: in so many rounds nobody takes part twice. With a
``separation`` they take turns in one order, again and again, so that nobody takes part
twice in any so many rounds in a row. Poisson sampling has every client in a round with
the same chance, independently of all others. Where privacy relies on nobody knowing who
takes part, cohorts come from the operating system instead.
"""

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys
from fedblend.checks import PART, Number, fits, optional, words
from fedblend.core import Key, Needs
from fedblend.data.federated import FederatedData
from fedblend.errors import UserError
from fedblend.theory.privacy import largest_cohort

NOBODY = -1
"""In place of an id, after the last client of a cohort of random size."""
Draw = Callable[[Key, Sequence[int]], np.ndarray]
"""``draw(root, rounds)``: the sorted client ids of each of these rounds, then
``NOBODY``."""
MEASURE_AT_MOST = 10_000
"""Federations up to this size are measured whole, of larger ones a sample of 1000."""
_MEASURED = Number(least=0, whole=True, clients=True, each="the ids of some clients")


class Strata(NamedTuple):
    """Populations of clients, such as phones and speakers: a cohort for ``simulate``.

    The objective is ``sum_p weights[p] f_p``, where f_p is the mean over the clients of
    population p, weighted among them as ``simulate(weights=...)`` says.

    of: the number of its population, from 0 on, for every client.
    weights: of the populations, which sum to 1.
    sizes: clients of each population in a round; all of them if None.
    """

    of: Sequence[int] | np.ndarray
    weights: Sequence[float]
    sizes: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True)
class Cohort:
    """Which clients take part in a round, in place of a number for ``cohort``.

    Clients are drawn anew in every round, unless one of ``epoch``, ``separation`` and
    ``sampling`` says otherwise. For a private algorithm the operating system draws
    them, see ``dp_fedavg``.

    size: the number of clients; all of them if None; ``Strata`` for so many of each of
        several populations; an array of ids for the same clients in every round.
    epoch: rounds in which no client takes part twice: clients are dealt, in another
        order in each epoch.
    separation: rounds in a row, any of them, in which no client takes part twice:
        clients take turns in one order, again and again. For ``dp_blt``.
    sampling: "fixed", or "poisson": each client takes part by chance, independently of
        the others, and ``size`` is the number on average. For ``dp_fedavg``.
    dropout: the probability that a client that is drawn does not answer.
    """

    size: int | Strata | np.ndarray | None = None
    epoch: int | None = None
    separation: int | None = None
    sampling: str = "fixed"
    dropout: float = 0.0


def make_cohort(given: int | Strata | np.ndarray | Cohort | None) -> Cohort:
    """What ``simulate`` is given for ``cohort``, as a ``Cohort``."""
    return given if isinstance(given, Cohort) else Cohort(given)


class Cohorts(NamedTuple):
    """How the clients of each round are drawn; the strata are complete.

    ``size`` is the planned one, ``most`` the largest one that there is room for.
    """

    size: int
    strata: Strata | None
    draw: Draw
    most: int
    asked: Cohort


def plan_cohorts(asked: Cohort, clients: int, secret: bool = False) -> Cohorts:
    """How cohorts of these clients are drawn; ``secret`` as in ``draw_with``."""
    given, always = asked.size, None
    if isinstance(given, np.ndarray):
        always = np.sort(_client_ids("cohort", given, clients))
        given = len(always)
    strata, size = complete_strata(given, clients)
    size = Number(whole=True)("cohort", size)
    if not 1 <= size <= clients:
        allowed = f"between 1 and the {clients} clients there are"
        raise UserError("cohort", size, allowed)
    words("fixed", "poisson")("sampling", asked.sampling)
    PART("dropout", asked.dropout)
    ways = []
    for name in ("epoch", "separation"):
        rounds = optional(Number(whole=True))(name, getattr(asked, name))
        if rounds is not None:
            there, sizes = [clients], [size]
            if strata is not None:
                there, sizes = np.bincount(strata.of), strata.sizes or ()
            most = min(int(all) // some for all, some in zip(there, sizes, strict=True))
            if not 1 <= rounds <= most:
                raise ValueError(
                    f"{name}: {rounds} is not between 1 and {most}, the rounds that "
                    f"the {clients} clients are enough for"
                )
            ways.append(name)
    ways += [] if asked.sampling == "fixed" else ["sampling"]
    if len(ways) > 1:
        raise ValueError(f"{ways[1]}: goes without {ways[0]}, which draws otherwise")
    if asked.sampling == "poisson":
        if strata is not None or always is not None:
            raise ValueError("sampling: 'poisson' needs a number of clients as cohort")
        most = largest_cohort(clients, size)
        draw = partial(poisson, clients=clients, size=size, most=most, secret=secret)
        return Cohorts(size, None, draw, most, asked)
    draw = draw_with(
        clients, size, strata, asked.epoch, always, secret, asked.separation
    )
    return Cohorts(size, strata, draw, size, asked)


def choose_measured(
    measure_on: int | Sequence[int] | np.ndarray | None, clients: int, key: Key
) -> np.ndarray:
    """The clients that are measured, see ``measure_on`` of ``simulate``."""
    if measure_on is None:
        measure_on = clients if clients <= MEASURE_AT_MOST else 1000
    ids = _MEASURED("measure_on", measure_on)
    if isinstance(ids, int):
        if not 1 <= ids <= clients:
            raise UserError("measure_on", ids, f"between 1 and the {clients} clients")
        if ids == clients:  # no program is compiled to draw them
            return np.arange(clients)
        root = keys.named(key if key.ndim == 0 else key[0], "measure_on")
        return cohorts(root, [0], clients, ids)[0]
    return _client_ids("measure_on", ids, clients)


def _client_ids(name: str, ids: Sequence[int] | np.ndarray, clients: int) -> np.ndarray:
    ids = np.asarray(ids, np.int64)
    if not ids.size or ids.min() < 0 or ids.max() >= clients:
        raise UserError(name, ids, f"made of ids between 0 and {clients - 1}")
    if len(np.unique(ids)) < len(ids):
        raise ValueError(f"{name}: {ids.tolist()} has the same client twice")
    return ids


def complete_strata(
    cohort: int | Strata | None, clients: int
) -> tuple[Strata | None, int]:
    """The strata, if there are some, with nothing left open, and the cohort's size."""
    if not isinstance(cohort, Strata):
        return None, clients if cohort is None else cohort
    of, weights = np.asarray(cohort.of), np.asarray(cohort.weights, float)
    if of.shape != (clients,) or of.dtype.kind not in "iu":
        raise ValueError(
            f"strata: of is {of.dtype} of shape {of.shape}, not the number of a "
            f"population for each of the {clients} clients"
        )
    if set(of.tolist()) != set(range(len(weights))):
        raise ValueError(
            f"strata: of names the populations {sorted(set(of.tolist()))}, and there "
            f"are {len(weights)} weights; all from 0 on need clients and a weight"
        )
    if not (weights > 0).all() or abs(weights.sum() - 1) > 1e-6:
        raise ValueError(
            f"strata: weights {weights.tolist()} are not positive numbers that sum to 1"
        )
    there = np.bincount(of)
    sizes = there if cohort.sizes is None else np.asarray(cohort.sizes)
    if len(sizes) != len(there) or not ((sizes >= 1) & (sizes <= there)).all():
        raise ValueError(
            f"strata: sizes {sizes.tolist()} are not between 1 and the "
            f"{there.tolist()} clients of the populations"
        )
    complete = Strata(of, tuple(weights.tolist()), tuple(sizes.tolist()))
    return complete, int(sizes.sum())


class Weights(NamedTuple):
    """What each client weighs when all of them enroll, and in a round."""

    enrollment: np.ndarray
    rounds: np.ndarray


def client_weights(
    needs: Needs,
    federated_data: FederatedData,
    cohort: int,
    strata: Strata | None = None,
    *,
    weights: str | None,
    dropout: float,
    reduction: str,
    sampling: str = "fixed",
) -> Weights:
    """What clients weigh; refuses what an algorithm with these needs cannot run with.

    Arguments are those of ``simulate``, the strata settled ones.
    """
    name = needs.weights if weights is None else weights
    clients = federated_data.clients
    fits(needs, clients)
    if needs.everyone and (cohort < clients or dropout > 0):
        raise ValueError(
            f"cohort: this algorithm needs all {clients} clients in every round, "
            f"not {cohort} with dropout {dropout:g}"
        )
    if needs.mean and reduction != "mean":
        raise ValueError(
            f"reduction: {reduction!r} breaks this algorithm, whose server keeps "
            "the mean of the clients' memories, or counts on a mean; it needs 'mean'"
        )
    if needs.cohort not in (None, cohort):
        raise ValueError(
            f"cohort: this algorithm was built for {needs.cohort} clients in a round, "
            f"not {cohort}"
        )
    if needs.answers and sampling != "fixed":
        raise ValueError(
            f"sampling: {sampling!r} may draw rounds without clients, but this "
            "algorithm's noise needs cohorts of a fixed size; use dp_fedavg"
        )
    if needs.uniform and name != "uniform":
        raise ValueError(f"weights: this algorithm needs 'uniform', not {name!r}")
    words("by_count", "uniform")("weights", name)
    values = federated_data.train.counts.astype(float)
    if name == "uniform":
        values = np.ones(clients)
    if strata is None:
        return Weights(values, values)
    if needs.uniform:
        raise ValueError("strata: this algorithm needs clients of equal weight")
    there, sizes = np.bincount(strata.of), np.asarray(strata.sizes)
    if needs.memories and not (sizes * there[0] == sizes[0] * there).all():
        raise ValueError(
            "strata: this algorithm's server keeps a mean of the clients' memories and "
            f"needs the same part of every population, not {sizes.tolist()} of "
            f"{there.tolist()} clients"
        )
    if reduction != "mean":
        raise ValueError(f"strata: {reduction!r} ignores weights; it has to be 'mean'")
    return weigh_strata(strata, values)


def weigh_strata(strata: Strata, values: np.ndarray) -> Weights:
    """Weights of the clients when all of them join, and in a round.

    Those of a round make up for how often a population's clients are drawn, so that
    sums over cohorts are right in the mean. Both have the same total.

    Args:
        strata: settled ones.
        values: what clients weigh beside others of their population.
    """
    of, sizes = np.asarray(strata.of), np.asarray(strata.sizes)
    joining = np.asarray(strata.weights)[of] * values / np.bincount(of, values)[of]
    rounds = joining * (np.bincount(of) / sizes)[of]
    return Weights(joining * rounds.sum(), rounds)


def draw_with(
    clients: int,
    size: int,
    strata: Strata | None = None,
    epoch: int | None = None,
    always: np.ndarray | None = None,
    secret: bool = False,
    separation: int | None = None,
) -> Draw:
    """How cohorts of this size are drawn, from settled strata if there are some.

    Args:
        clients: all there are.
        size: clients of a round.
        strata: populations, each of which is drawn from.
        epoch: rounds in which nobody is drawn twice; anew in every round if None.
        always: the same clients in every round, in place of any draw.
        secret: draws from the operating system and from no key. Clients who are dealt
            are not: nobody's privacy relies on their order.
        separation: in any so many rounds in a row nobody is there twice.
    """
    if always is not None:
        return lambda root, rounds: np.broadcast_to(always, (len(rounds), size))
    if secret and epoch is None and separation is None and strata is None:
        return lambda root, rounds: secret_cohorts(len(rounds), clients, size)
    some = cohorts if epoch is None else partial(deal, epoch=epoch)
    some = some if separation is None else take_turns
    if strata is None:
        return partial(some, clients=clients, size=size)
    of, sizes = np.asarray(strata.of), strata.sizes or ()
    members = [np.flatnonzero(of == population) for population in range(len(sizes))]

    def draw(root: Key, rounds: Sequence[int]) -> np.ndarray:
        drawn = [
            ids[some(root, rounds, len(ids), sizes[population], population)]
            for population, ids in enumerate(members)
        ]
        return np.sort(np.concatenate(drawn, axis=1), axis=1)

    return draw


def cohorts(
    root: Key, rounds: Sequence[int], clients: int, size: int, population: int = 0
) -> np.ndarray:
    """The sorted client ids of each of these rounds, ``[rounds, size]``.

    Floyd's algorithm: the price is that of the cohort, whatever the federation's size.
    Populations are drawn independently of each other.
    """
    if size == clients:
        return np.broadcast_to(np.arange(clients), (len(rounds), clients))
    numbers = jnp.asarray(rounds, jnp.int32)
    draws = np.asarray(_draws(root, numbers, population, clients, size))
    chosen = np.empty((len(rounds), size), np.int64)
    for row, lots in enumerate(draws.tolist()):
        members = set()
        for newest, lot in enumerate(lots, start=clients - size):
            members.add(newest if lot in members else lot)
        chosen[row] = sorted(members)
    return chosen


def secret_cohorts(rounds: int, clients: int, size: int) -> np.ndarray:
    """As ``cohorts``, from the operating system: new in every call."""
    draw = secrets.SystemRandom().sample
    found = [sorted(draw(range(clients), size)) for _ in range(rounds)]
    return np.array(found, np.int64).reshape(rounds, size)


def deal(
    root: Key,
    rounds: Sequence[int],
    clients: int,
    size: int,
    population: int = 0,
    *,
    epoch: int,
) -> np.ndarray:
    """As ``cohorts``, but within each ``epoch`` of rounds nobody is there twice.

    Every epoch has an order of its own in which the clients are dealt out; those who
    are left over sit it out. The price is that of shuffling the federation.
    """
    chosen = np.empty((len(rounds), size), np.int64)
    orders: dict[int, np.ndarray] = {}
    for row, number in enumerate(rounds):
        turn, place = divmod(number, epoch)
        if turn not in orders:
            orders[turn] = np.asarray(_order(root, turn, population, clients))
        hand = orders[turn][place * size : (place + 1) * size]
        chosen[row] = np.sort(hand)
    return chosen


def take_turns(
    root: Key, rounds: Sequence[int], clients: int, size: int, population: int = 0
) -> np.ndarray:
    """As ``cohorts``, but everybody's turn comes in one order, again and again.

    Who takes part does so again after ``clients // size`` rounds, or one more.
    """
    order = np.asarray(_order(root, 0, population, clients))
    first = np.asarray(rounds, np.int64)[:, None] * size
    return np.sort(order[(first + np.arange(size)) % clients], axis=1)


def poisson(
    root: Key,
    rounds: Sequence[int],
    clients: int,
    size: int,
    most: int,
    secret: bool = False,
) -> np.ndarray:
    """As ``cohorts``, each client with the chance size / clients by itself.

    A round's ids are followed by ``NOBODY``. Of a cohort for which there is no room the
    last clients are left out; ``theory.privacy`` accounts for the chance of it.

    Args:
        root: the lots are a function of it, unless they are secret.
        rounds: numbers of rounds.
        clients: all there are.
        size: clients of a round, in the mean.
        most: for which there is room.
        secret: whether lots come from the operating system.
    """
    found = np.full((len(rounds), most), NOBODY, np.int64)
    for row, number in enumerate(rounds):
        if secret:
            lots = np.frombuffer(secrets.token_bytes(8 * clients), np.uint64)
        else:
            lots = np.asarray(_lots(root, number, clients)).view(np.uint64)
        # Whole numbers: no chance is rounded up.
        chosen = np.flatnonzero(lots // np.uint64(2**64 // clients) < size)[:most]
        found[row, : len(chosen)] = chosen
    return found


def _lots(root: Key, number: int, clients: int) -> jax.Array:
    key = keys.derive(root, "cohort", number)
    return jax.random.bits(key, (2 * clients,), jnp.uint32)


def _order(root: Key, turn: int, population: int, clients: int) -> jax.Array:
    key = keys.derive(root, "order", turn, population)
    return jax.random.permutation(key, clients)


def _draws(
    root: Key, rounds: jax.Array, population: int, clients: int, size: int
) -> jax.Array:
    """For every round, one draw from 0..j for each j from clients - size on."""
    ends = jnp.arange(clients - size + 1, clients + 1)

    def draw(round):
        key = keys.derive(root, "cohort", round, population)
        return jax.random.randint(key, (size,), 0, ends)

    return jax.vmap(draw)(rounds)


_draws = jax.jit(_draws, static_argnums=(3, 4))
_order = jax.jit(_order, static_argnums=3)
_lots = jax.jit(_lots, static_argnums=2)
