# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a node answers tells nothing of its rows, and no clip tells signs."""

import jax
import numpy as np
import pytest
from federations import CLIENTS, SecureFederation, problem
from trials import clock

from fedblend.deploy.secure import records
from fedblend.deploy.secure.summand import as_vector

_ = clock


def updates(federation: SecureFederation, round: int) -> np.ndarray:
    """What nodes masked, as it is on their disks."""
    found = []
    for client in range(CLIENTS):
        place = federation.folder / f"node{client}" / "trial"
        record = records.read(place, "masked", round)
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
    assert np.isfinite(as_vector(server.down.shared)).all()


@pytest.mark.parametrize("clip", [1e-9, 1e-4])
def test_a_tiny_clip_tells_no_signs(clip, tmp_path):
    federation = SecureFederation(tmp_path, rounds=1, secure={"clip": clip})
    server = federation.server()
    server.step()
    before = as_vector(server.down.shared)
    while server.round < 1:
        server.step()
    clipped = np.abs(updates(federation, 0)) > clip
    assert (clipped.mean(axis=1) > 0.01).all()
    np.testing.assert_array_equal(as_vector(server.down.shared), before)
    assert all(line["zeros"] for line in masked_lines(federation, 0))


def test_the_hash_of_an_audit_does_not_tell_what_is_in_it(tmp_path):
    """The server gets the hash of a line that says whether numbers were clipped."""
    federation = SecureFederation(tmp_path, rounds=1)
    federation.complete(federation.server())
    salts = {line["salt"] for line in masked_lines(federation, 0)}
    assert len(salts) == CLIENTS and all(len(salt) == 32 for salt in salts)
