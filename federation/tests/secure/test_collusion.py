# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How many nodes must collude with a server that lies to open one answer."""

import pytest
from parties import Parties

from fedblend_federation.secure import masks
from fedblend_federation.secure.masks import KEY_BYTES, SecureError, add_mask, unseal
from fedblend_federation.secure.session import (
    COMPLETE,
    _readable,
    degree_and_threshold,
    most_colluding,
    pair_mask_seed,
    self_mask_seed,
)


def opened_answer(parties: Parties, colluding: int):
    """The first node's answer, from its masked one.

    The server tells half of the honest nodes that all have answered, and the other half
    that the first node has not. Colluding nodes follow the protocol for both views.

    Raises:
        SecureError: what honest nodes gave cannot be read.
    """
    members, graph = parties.members, parties.attempt.graph
    victim, others = members[0], members[1:]
    honest, colluders = members[:-colluding], members[-colluding:]
    half = (len(honest) + 1) // 2
    shared = {c: parties.parties[c].share() for c in members}
    view = parties.view(members)
    digest = view.digest(parties.attempt.digest)

    def secret(answered, told) -> bytes:
        openings = {
            c: parties.parties[c].open(view, answered, parties.boxes_for(c, shared))
            for c in (*told, *colluders)
        }
        seeds = {c: one.seeds for c, one in shared.items()}
        found = _readable(graph, seeds, answered, openings)
        shares = {holder + 1: own[victim] for holder, own in found.items()}
        return masks.combine(shares, graph.threshold)

    answer = parties.parties[victim].mask(parties.answers[victim], view)
    add_mask(answer, self_mask_seed(secret(members, honest[:half]), digest), -1)
    seeds = unseal(secret(others, honest[half:]), shared[victim].seeds)
    for at, other in enumerate(others):
        pair = seeds[at * KEY_BYTES : (at + 1) * KEY_BYTES]
        add_mask(answer, pair_mask_seed(pair, digest), -1 if victim < other else +1)
    return answer


@pytest.mark.parametrize(("nodes", "colluding"), [(3, 1), (6, 2), (9, 3)])
def test_a_third_of_the_nodes_opens_one_answer(nodes, colluding):
    parties = Parties(nodes)
    found = opened_answer(parties, colluding)
    assert (found == parties.answers[parties.members[0]]).all()
    assert most_colluding(nodes) < colluding


@pytest.mark.parametrize(("nodes", "colluding"), [(4, 1), (7, 2), (8, 2), (10, 3)])
def test_fewer_than_a_third_do_not(nodes, colluding):
    with pytest.raises(SecureError, match="are needed"):
        opened_answer(Parties(nodes), colluding)
    assert most_colluding(nodes) >= colluding


def test_the_bound_is_that_of_two_thresholds():
    """No n - c honest nodes make up two sets of t - c; above 50 nodes one in ten."""
    for nodes in range(1, COMPLETE + 1):
        most, (_, threshold) = most_colluding(nodes), degree_and_threshold(nodes)
        assert 2 * (threshold - most) > nodes - most
        assert nodes >= 3 * most + 1 and nodes < 3 * (most + 1) + 1
    assert [most_colluding(nodes) for nodes in (51, 60, 200)] == [5, 6, 20]
