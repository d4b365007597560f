# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a node answers tells nothing of its rows, and no clip tells signs."""

import jax
import numpy as np
import pytest
from federations import CLIENTS, SecureFederation, problem
from trials import clock

from fedblend_federation.client import state as states
from fedblend_federation.secure.flatten import flatten

_ = clock


def updates(federation: SecureFederation, round: int) -> np.ndarray:
    """What nodes masked, as it is on their disks."""
    found = []
    for client in range(CLIENTS):
        place = federation.folder / f"node{client}" / "trial"
        record = states.read_record(place, f"masked-{round}")
        assert record is not None
        found.append(np.frombuffer(record.data, record.about["dtype"]))
    return np.array(found, np.float64)


def masked_lines(federation: SecureFederation, round: int) -> list[dict]:
    lines = [fields for event, fields in federation.notes if event == "masked"]
    return [fields for fields in lines if fields["round"] == round]


def test_who_overflows_is_in_no_reply(tmp_path):
    """A model whose answers overflow above a threshold told the largest row."""
    federation = SecureFederation(tmp_path, rounds=2)
    server = federation.server()
    while server.round < 1:
        server.step()
    data = problem().federated_data.train
    inputs = [np.abs(data.rows(c)[0]).sum(axis=1).max() for c in range(CLIENTS)]
    large = np.float32(3e38 / np.median(inputs))
    shared = jax.tree.map(lambda leaf: np.full_like(leaf, large), server.down.shared)
    server.down = server.down._replace(shared=shared)
    server.step()
    assert server.round == 2
    whole = np.isfinite(updates(federation, 1)).all(axis=1)
    lines = masked_lines(federation, 1)
    assert [line["zeros"] for line in lines] == (~whole).tolist()
    assert 0 < whole.sum() < CLIENTS
    assert np.isfinite(flatten(server.down.shared)).all()


@pytest.mark.parametrize("clip", [1e-9, 1e-4, 0.02])
def test_a_clip_tells_no_signs_and_picks_nobody(clip, tmp_path):
    """Numbers that are clipped are signs; with zeros in the place of too many of them
    the sum was the update of the one client whose numbers are small enough.
    """
    federation = SecureFederation(tmp_path, rounds=1, secure={"clip": clip})
    server, opened = federation.server(), []
    values = server.collector._values  # pyright: ignore

    def opening(summed):
        opened.append(values(summed))
        return opened[0]

    server.collector._values = opening  # pyright: ignore
    while server.round < 1:
        server.step()
    largest = server.weights.max()
    own = updates(federation, 0) * (server.weights / largest)[:, None]
    most = np.abs(own).max(axis=1, keepdims=True)
    shrunk = [line["shrunk"] for line in masked_lines(federation, 0)]
    assert shrunk == (most[:, 0] > clip).tolist() and sum(shrunk) > CLIENTS / 2
    whole = (own * np.minimum(1, clip / most)).sum(axis=0) * largest
    np.testing.assert_allclose(opened[0], whole, rtol=1e-9, atol=1e-9 * clip)
    assert not any(line["zeros"] for line in masked_lines(federation, 0))


def test_the_hash_of_an_audit_does_not_tell_what_is_in_it(tmp_path):
    """The server gets the hash of a line that says whether numbers were clipped."""
    federation = SecureFederation(tmp_path, rounds=1)
    federation.complete(federation.server())
    salts = {line["salt"] for line in masked_lines(federation, 0)}
    assert len(salts) == CLIENTS and all(len(salt) == 32 for salt in salts)
