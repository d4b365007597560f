# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Secure sums are those of the same encoding without masks, to the bit."""

from collections import Counter
from typing import cast

import numpy as np
import pytest
from federations import CLIENTS, SecureFederation, models, same, without_masks
from trials import clock

from fedblend_federation.secure.server import SecureCollector

_ = clock

STAGES = ("share", "round", "unmask")


def dropouts(rounds: int) -> dict[tuple[str, int], set[int]]:
    """In every round a third of the nodes are gone, from some exchange on.

    Who does not share was gone before the sum of the round before was open: all others
    have shared when they opened it.
    """
    rng, gone = np.random.default_rng(0), {("unmask", 0): {0, 1}}
    before = 0
    for number in range(1, rounds):
        other = int(rng.choice([c for c in range(CLIENTS) if c != before]))
        split = [(0, 2), (1, 1), (0, 1)][number % 3]
        for stage, client in zip(split, (before, other), strict=True):
            gone.setdefault((STAGES[stage], number), set()).add(client)
        before = other
    return gone


def unanswered(gone):
    """The same for a server that asks once in a round."""
    plain = {}
    for (stage, number), clients in gone.items():
        if stage != "unmask":
            plain.setdefault(("round", number), set()).update(clients)
    return plain


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("fedavg", 10),
        pytest.param("apfl", 10, marks=pytest.mark.slow),
        pytest.param("flix", 10, marks=pytest.mark.slow),
        pytest.param("scaffold", 10, marks=pytest.mark.slow),
        pytest.param("quantized", 10, marks=pytest.mark.slow),
        pytest.param("flix, diana", 10, marks=pytest.mark.slow),
        ("flix", 3),
    ],
)
def test_a_third_may_drop_out_of_every_exchange(name, rounds, tmp_path):
    gone, rules = dropouts(rounds), {"rounds": rounds, "quorum": 0.5}
    first = SecureFederation(tmp_path / "one", name, gone, **rules)
    masked = first.complete(first.server())
    plain = {**rules, "secure": None}
    other = SecureFederation(tmp_path / "other", name, unanswered(gone), **plain)
    unmasked = other.complete(without_masks(other))
    lost = sum(len(some) for (stage, _), some in gone.items() if stage != "unmask")
    assert masked.records[-1].received == CLIENTS * rounds - lost
    assert same(models(first, masked), models(other, unmasked))


@pytest.mark.parametrize("rounds", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_entries_that_all_clients_send_are_masked_alone(rounds, tmp_path):
    """LoCoDL with one mask needs all clients: they are gone when the sum is opened."""
    gone = {("unmask", n): {n % CLIENTS, (n + 3) % CLIENTS} for n in range(rounds)}
    first = SecureFederation(tmp_path / "one", "one mask", gone, rounds=rounds)
    masked = first.complete(first.server())
    other = SecureFederation(tmp_path / "other", "one mask", rounds=rounds, secure=None)
    unmasked = other.complete(without_masks(other))
    assert same(models(first, masked), models(other, unmasked))
    sent = masked.collector.sizes.up
    assert sent == 64 * 4  # four entries, of a model with more


def test_a_round_after_the_first_has_two_exchanges(tmp_path):
    """Members share while they open the round before; who did not is asked to."""
    gone = {("unmask", 1): {2, 5}}
    federation = SecureFederation(tmp_path, gone=gone, rounds=4, quorum=0.5)
    federation.complete(federation.server())
    sent = Counter(federation.transport.kinds)
    shared = [sent["share", number] for number in range(4)]
    assert shared == [CLIENTS, 0, 2, 0]
    assert [sent["round", number] for number in range(4)] == [CLIENTS] * 4


def test_what_was_shared_for_other_members_is_not_used(tmp_path):
    """A client that is enrolled between two rounds makes another cohort."""
    first = SecureFederation(tmp_path / "one", rounds=2, quorum=0.5)
    server = first.server()
    while server.round < 1:
        server.step()
    early = cast(SecureCollector, server.collector).early
    (((number, members), found),) = early.items()
    assert number == 1 and len(members) == len(found) == CLIENTS
    early[1, members[:-1]] = found
    del early[1, members]
    server = first.complete(server)
    assert Counter(first.transport.kinds)["share", 1] == CLIENTS
    other = SecureFederation(tmp_path / "two", rounds=2, secure=None)
    unmasked = other.complete(without_masks(other))
    assert same(models(first, server), models(other, unmasked))
