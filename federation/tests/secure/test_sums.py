# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Masks cancel for every set that takes part, and for nobody else."""

import dataclasses
from itertools import combinations

import numpy as np
import pytest
from parties import Parties

from fedblend_federation.secure import masks
from fedblend_federation.secure.masks import SecureError, seal, unseal
from fedblend_federation.secure.session import Party, _readable, least_of, unmask


def subsets(clients):
    """All that are large enough."""
    for size in range(least_of(6), len(clients) + 1):
        yield from map(list, combinations(clients, size))


def test_every_way_to_drop_out_leaves_the_exact_sum():
    parties = Parties(6)
    for sharing in subsets(parties.members):
        for answering in subsets(sharing):
            found = parties.run(sharing, answering, answering[: least_of(6)])
            np.testing.assert_array_equal(found, parties.sum(answering))


@pytest.mark.parametrize("bits", [32, 64])
def test_a_third_may_be_gone_of_a_sparse_graph(bits):
    parties = Parties(60, bits)
    assert len(parties.attempt.graph.holders[2]) < 60
    order = np.random.default_rng(0).permutation(parties.members).tolist()
    sharing = sorted(order[:54])
    answering = sorted(set(sharing) - set(order[:7]))
    opening = sorted(set(answering) - set(order[7:14]))
    assert len(opening) == 40
    found = parties.run(sharing, answering, opening)
    np.testing.assert_array_equal(found, parties.sum(answering))


def test_boxes_that_do_not_open_are_made_up_for_by_others():
    """Two of six holders have nothing of the first node, or one of one that is gone."""
    parties = Parties(6)
    first, last = parties.members[0], parties.members[-1]
    spoiled = {(first, c) for c in parties.members[1:3]}
    whole, size = parties.boxes_for, 2 * masks.SHARE_BYTES + 28
    parties.boxes_for = lambda holder, shared: {
        c: bytes(size) if (c, holder) in spoiled else box
        for c, box in whole(holder, shared).items()
    }
    found = parties.run(parties.members, parties.members, parties.members)
    np.testing.assert_array_equal(found, parties.sum(parties.members))
    spoiled |= {(first, parties.members[3])}
    with pytest.raises(
        SecureError, match="client 2: 3 shares of a secret, 4 are needed"
    ):
        parties.run(parties.members, parties.members, parties.members)
    spoiled.clear()
    spoiled.add((last, parties.members[1]))
    found = parties.run(parties.members, parties.members[:-1], parties.members[:-1])
    np.testing.assert_array_equal(found, parties.sum(parties.members[:-1]))


def test_a_box_with_anything_but_two_shares_does_not_open():
    parties = Parties(3)
    holder, owner, _ = parties.members
    key = parties.parties[owner]._pair_key(holder, "shares", owner, holder)
    for content in (b"", bytes(masks.SHARE_BYTES), bytes(2 * masks.SHARE_BYTES + 1)):
        assert parties.parties[holder].find_damaged({owner: seal(key, content)}) == [
            owner
        ]
    assert not parties.parties[holder].find_damaged({owner: seal(key, bytes(66))})


def test_too_few_open_nothing():
    parties = Parties(6)
    with pytest.raises(SecureError, match="0 shares of a secret, 4 are needed"):
        parties.run(parties.members, parties.members, parties.members[:3])


def test_a_masked_answer_says_nothing_of_the_answer():
    """Its bits are even whatever the answer is; 6 standard deviations are allowed."""
    parties = Parties(3, size=100_000)
    one = parties.members[0]
    zeros = np.zeros(100_000, np.uint64)
    masked = parties.parties[one].mask(zeros, parties.view(parties.members))
    ones = np.unpackbits(masked.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 6 * 0.5 / np.sqrt(6_400_000)
    other = dataclasses.replace(parties.attempt, number=1)
    again = Party(other, one, parties.private[one], bytes(32))
    view = parties.view(parties.members)
    view = view._replace(nonces={**view.nonces, one: again.nonce})
    assert not (again.mask(zeros, view) == masked).any()


def test_masks_depend_on_all_that_a_node_was_told():
    parties = Parties(4)
    first, *rest = parties.members
    view, answer = parties.view(parties.members), parties.answers[first]
    known = [parties.parties[first].mask(answer, view)]
    for told in (
        view._replace(broadcast="another model"),
        view._replace(largest=2.0),
        view._replace(nonces={**view.nonces, rest[0]: "00"}),
        parties.view(parties.members[:3]),
    ):
        known.append(parties.parties[first].mask(answer, told))
    for one, other in combinations(known, 2):
        assert not (one == other).any()


def test_a_node_masks_only_as_what_it_shared():
    parties = Parties(3)
    first = parties.members[0]
    view = parties.view(parties.members)
    forged = view._replace(nonces={**view.nonces, first: "00" * 32})
    with pytest.raises(SecureError, match="did not share so"):
        parties.parties[first].mask(parties.answers[first], forged)


def both_views(count: int, told_else: int):
    """A server tells some nodes that the first client has not answered.

    Returns the parties, what all sent, and the openings.
    """
    parties = Parties(count)
    members, victim = parties.members, parties.members[0]
    shared = {c: parties.parties[c].share() for c in members}
    view = parties.view(members)
    without = members[1:]
    openings = {
        c: parties.parties[c].open(
            view,
            without if c in members[-told_else:] else members,
            parties.boxes_for(c, shared),
        )
        for c in members
    }
    return parties, shared, view, victim, openings


def test_nodes_that_are_told_different_things_give_nothing_that_can_be_read():
    parties, shared, view, victim, openings = both_views(9, 4)
    seeds = {c: one.seeds for c, one in shared.items()}
    masked = parties.parties[victim].mask(parties.answers[victim], view)
    for answered in (parties.members, parties.members[1:]):
        with pytest.raises((SecureError, ValueError)):
            unmask(
                masked,
                parties.attempt.graph,
                view.digest(parties.attempt.digest),
                seeds,
                answered,
                openings,
            )


def test_only_one_of_two_views_can_be_read():
    """Three of nine lie low: six agree, and what the three give stays in its box."""
    parties, shared, _, victim, openings = both_views(9, 3)
    agreeing = {c: o for c, o in openings.items() if c not in parties.members[-3:]}
    seeds = {c: one.seeds for c, one in shared.items()}
    graph = parties.attempt.graph
    readable = _readable(graph, seeds, parties.members, agreeing)
    assert set(readable) == set(agreeing)
    envelope = {
        holder + 1: shares[victim]
        for holder, shares in readable.items()
        if holder in parties.members[-3:]
    }
    assert not envelope  # no share of the key of the victim's seeds


def test_without_the_tokens_a_lying_server_would_have_both():
    """Thresholds alone: five of nine colluding or lied to would be no protection."""
    parties = Parties(9)
    members, victim = parties.members, parties.members[0]
    party = parties.parties[victim]
    graph = parties.attempt.graph
    assert graph.threshold == 6
    shares = party._shares("envelope")
    some = {c + 1: shares[c + 1] for c in members[:6]}
    seeds = unseal(masks.combine(some, 6), party.share().seeds)
    assert seeds[:32] == party._pair(members[1])
