# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A node whose boxes do not open is named, and the others go on without it."""

import numpy as np
import pytest
from federations import CLIENTS, SecureFederation, models, same
from trials import clock

from fedblend_federation import message as messages
from fedblend_federation.server.settings import BelowQuorum

_ = clock
GUILTY = 5


def spoiling(folder, holders, gone=None, guilty=GUILTY, **more) -> SecureFederation:
    """A node puts noise into the boxes for these holders, by place, in round 1."""
    federation = SecureFederation(folder, gone=gone, quorum=0.5, **more)

    def spoil(address: int, data: bytes) -> list[bytes]:
        reply = messages.decode(data)
        asked = (reply.kind, reply.round, address)
        if asked != ("share", 1, 1000 + guilty):
            return [data]
        boxes = reply.arrays["['boxes']"].copy()
        boxes[holders] = np.arange(boxes.shape[1])
        payload = {"boxes": boxes, "seeds": reply.arrays["['seeds']"]}
        return [messages.encode(reply._replace(arrays={}), payload)]

    federation.transport.spoil = spoil
    return federation


def finished(federation: SecureFederation):
    server = federation.server()
    # All exchanges of a round apart: nobody shares for the next one.
    server.collector._following = list  # pyright: ignore
    return federation.complete(server)


def named(federation: SecureFederation) -> dict[int, list[int]]:
    found = [one for event, one in federation.notes if event == "damaged boxes"]
    return {one["client"]: one["holders"] for one in found}


def test_a_round_goes_on_without_a_node_whose_boxes_do_not_open(tmp_path):
    federation = spoiling(tmp_path / "spoiled", slice(None))
    server = finished(federation)
    assert server.round == 3
    assert named(federation) == {GUILTY: [c for c in range(CLIENTS) if c != GUILTY]}
    lines = [one["others"] for _, one in federation.notes if "others" in one]
    why = f"client {GUILTY} rejected: boxes that it made or holds do not open"
    assert lines == ["all replied", why, "all replied"]
    # The models are those of a round in which that node is not.
    gone = {("share", 1): {GUILTY}}
    without = SecureFederation(tmp_path / "gone", gone=gone, quorum=0.5)
    expected = finished(without)
    mine, theirs = models(federation, server), models(without, expected)
    for name in [one for one in mine if one.startswith("server")]:
        np.testing.assert_allclose(mine[name], theirs[name], atol=1e-6)


def test_a_few_bad_boxes_are_made_up_for_by_others(tmp_path):
    """Two of seven: the node is named, and its answer counts."""
    federation = spoiling(tmp_path / "spoiled", slice(0, 2))
    server = finished(federation)
    assert named(federation) == {GUILTY: [0, 1]}
    assert [record.rejected for record in server.records][-1] == 0
    whole = SecureFederation(tmp_path / "whole", quorum=0.5)
    assert same(models(federation, server), models(whole, finished(whole)))


def test_too_few_others_are_one_line_that_names_the_node(tmp_path):
    federation = spoiling(tmp_path, slice(None), secure={"least": 8})
    line = f"7 of 8 clients answered, 8 are needed; client {GUILTY} rejected: boxes"
    with pytest.raises(BelowQuorum, match=line):
        finished(federation)
