# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Secure sums are those of the same encoding without masks, to the bit."""

import numpy as np
import pytest
from federations import CLIENTS, SecureFederation, models, same, without_masks
from trials import clock

_ = clock

STAGES = ("share", "round", "unmask")


def dropouts(rounds: int) -> dict[tuple[str, int], set[int]]:
    """In every round a third of the nodes are gone, from some exchange on."""
    rng, gone = np.random.default_rng(0), {}
    for number in range(rounds):
        lost = rng.permutation(CLIENTS)[: CLIENTS // 3].tolist()
        split = [(0, 2), (1, 1), (2, 0)][number % 3]
        stages = [STAGES[stage] for stage in split] if number else ["unmask"] * 2
        for stage, client in zip(stages, lost, strict=True):
            gone.setdefault((stage, number), set()).add(client)
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
    sent = masked.collection.sizes.up
    assert sent == 64 * 4  # four entries, of a model with more
