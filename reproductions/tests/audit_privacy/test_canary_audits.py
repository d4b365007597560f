# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Audits: below the promise where it is kept, above it where a bug is planted.

The noise is the operating system's, so that nothing here repeats itself. Where a
promise is kept the confidence is 0.9999: a false alarm in one of 10,000 runs at most.
Bugs are found with the usual confidence, and by a wide margin.
"""

import sys
from typing import Any

import jax
import numpy as np
import pytest

from fedblend.config.build import build
from fedblend.config.config import check
from fedblend.errors import ConfigError
from fedblend.simulation import sampling
from fedblend.theory import privacy as accountant
from fedblend.transforms import blt_noise, noise
from fedblend_reproductions.audit_privacy import audit as audits
from fedblend_reproductions.audit_privacy.audit import Audit, audit
from fedblend_reproductions.audit_privacy.canaries import directions
from fedblend_reproductions.audit_privacy.columns import leak

clipping = sys.modules["fedblend.transforms.clip"]
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "everyone": ({"rounds": 4, "cohort": 6}, {"noise": 4.0}, 0.5),
    "zero_out": (
        {"rounds": 4, "cohort": 6},
        {"noise": 2.0, "adjacency": "zero_out"},
        0.5,
    ),
    "sampled": ({"rounds": 4, "cohort": 3}, {"noise": 2.0}, 0.3),
    "sampled, zero_out": (
        {"rounds": 4, "cohort": 3},
        {"noise": 1.0, "adjacency": "zero_out"},
        0.05,
    ),
    "adaptive": (
        {"rounds": 4, "cohort": 6},
        {"noise": 4.0, "adaptive": True, "count_noise": 4.0},
        0.3,
    ),
    "dealt": ({"rounds": 2, "cohort": 3, "epoch": 2}, {"noise": 1.0}, 0.5),
    "blt": (
        {"rounds": 4, "cohort": 3, "separation": 2},
        {"noise": 4.0, "buffers": 2},
        0.3,
    ),
    "blt, everyone": (
        {"rounds": 4, "cohort": 6},
        {"noise": 3.0, "buffers": 3, "adjacency": "zero_out"},
        0.3,
    ),
}
"""[run] and [privacy], and the least part of the promised epsilon to be shown."""


@pytest.fixture
def audited(tiny):
    def play(name: str, **options: Any) -> Audit:
        run, table, _ = SETTINGS[name]
        content = {**tiny, "run": run, "privacy": {"clip": 0.5, "delta": 1e-3, **table}}
        return audit(check(content, "audited"), **options)

    return play


ADDING = (noise, blt_noise)
"""The modules that add noise to sums."""


def half_the_noise(monkeypatch):
    add = noise.add_on_grid

    def less(leaves, std, *rest):
        return add(leaves, std / 2, *rest)

    for module in ADDING:
        monkeypatch.setattr(module, "add_on_grid", less)
    secret = noise.add_secret_noise
    monkeypatch.setattr(
        noise, "add_secret_noise", lambda tree, std: secret(tree, std / 2)
    )


def noise_of_the_first_leaf_only(monkeypatch):
    add = noise.add_secret_noise

    def less(tree, std):
        leaves, structure = jax.tree.flatten(tree)
        noisy = [add(leaves[0], std), *leaves[1:]]
        return jax.tree.unflatten(structure, noisy)

    monkeypatch.setattr(noise, "add_secret_noise", less)


def no_clipping(monkeypatch):
    clip_tree = clipping.clip_tree
    skipped = lambda tree, bound: (tree, clip_tree(tree, bound)[1])  # noqa: E731
    monkeypatch.setattr(clipping, "clip_tree", skipped)


def one_more_participation(monkeypatch):
    """Who was dealt first in an epoch takes part in its last round too."""
    deal = sampling.deal

    def again(root, rounds, clients, size, population=0, *, epoch):
        def first_of_epoch(number):
            last = number % epoch == epoch - 1
            return number - number % epoch if last else number

        numbers = [first_of_epoch(number) for number in rounds]
        return deal(root, numbers, clients, size, population, epoch=epoch)

    monkeypatch.setattr(sampling, "deal", again)


def replacing_counts_as_leaving(monkeypatch):
    """The accountant forgets that another update moves the sum by two clips."""
    monkeypatch.setitem(accountant.MOVES, "replace_one", 1)


BUGS = [
    (half_the_noise, "everyone", 240),
    (no_clipping, "everyone", 240),
    (one_more_participation, "dealt", 240),
]
MORE_BUGS = [
    (half_the_noise, "sampled", 240),
    (half_the_noise, "adaptive", 240),
    (half_the_noise, "zero_out", 240),
    (half_the_noise, "blt", 240),
    (half_the_noise, "blt, everyone", 240),
    (no_clipping, "blt", 240),
    (no_clipping, "sampled", 240),
    (no_clipping, "adaptive", 240),
    (noise_of_the_first_leaf_only, "everyone", 240),
    (replacing_counts_as_leaving, "everyone", 240),
]
"""The bug, where it is planted, and how many runs there are to find it."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_the_lower_bound_is_below_a_promise_that_is_kept(name, audited):
    """``test_audit_privacy_command.py`` has a quick one."""
    found = audited(name, trials=600, confidence=0.9999)
    assert not found.violated
    assert found.any_mechanism <= found.lower <= found.promised
    assert found.lower >= SETTINGS[name][2] * found.promised


@pytest.mark.parametrize(
    ("bug", "name", "trials"),
    [*BUGS, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE_BUGS)],
)
def test_a_planted_bug_is_found(bug, name, trials, audited, monkeypatch):
    bug(monkeypatch)
    found = audited(name, trials=trials)
    assert found.violated
    assert found.lower >= found.promised


@pytest.mark.slow
def test_one_canary_in_each_run_finds_it_too(audited, monkeypatch):
    """Games that share no run need no assumption; they are fewer."""
    kept = audited("everyone", trials=600, canaries=1, confidence=0.9999)
    assert not kept.violated
    assert kept.games == 450
    half_the_noise(monkeypatch)
    assert audited("everyone", trials=600, canaries=1).violated


def test_directions_are_orthogonal_unit_vectors_of_disjoint_entries():
    along = directions([30, 10, 3], 5, seed=7)
    vectors = np.where(along.block == np.arange(10)[:, None], along.entries, 0.0)
    assert vectors @ vectors.T == pytest.approx(np.eye(10))
    assert along.parts.sum(axis=0) == pytest.approx(np.ones(10))
    shares = [(vectors[:, along.group == group] ** 2).sum(axis=1) for group in range(3)]
    assert np.stack(shares) == pytest.approx(along.parts)


def test_most_exposed_canaries_are_played_for():
    """In a tree of four the first leaf is below three nodes, the last one below one."""
    precision = np.diag([3.0, 1.0, 2.0, 1.0])
    known = audits.Attack(np.ones(1), precision, "replace_one")
    chances = np.broadcast_to(np.eye(4), (500, 4, 4))
    assert audits._chosen(known, chances).mean(axis=0).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("kind", ["classes", "regression"])
def test_columns_of_one_client_that_change_others_are_found(
    kind, tiny, tmp_path, monkeypatch
):
    """Of a table that is standardized, were it not known to have no guarantee."""
    table = tmp_path / "table.csv"
    rows = [f"{row % 7},{row * row % 11},{row % 3},{row % 6}" for row in range(60)]
    table.write_text("\n".join(["a,b,kind,who", *rows]))
    tiny["data"] = {"file": str(table), "target": "kind", "client": "who"}
    tiny["data"] |= {"kind": kind, "partition": "by_key"}
    tiny["run"] = {"rounds": 1, "cohort": 3}
    tiny["privacy"] = {"clip": 0.5, "delta": 1e-3, "noise": 4.0}
    with pytest.raises(ConfigError, match="no guarantee: the inputs are standardized"):
        audit(check(tiny, "audited"))
    promise = audits.privacy.report

    def careless(config, clients, raw):
        return promise(config, clients, False)

    monkeypatch.setattr(audits.privacy, "report", careless)
    changed = "the inputs of 5 other clients"
    if kind == "regression":
        changed = "what the model is trained for"
    with pytest.raises(ConfigError, match=f"one client change {changed}, without"):
        audit(check(tiny, "audited"))
    tiny["data"]["preprocess"] = "none"
    numbers = check(tiny, "audited")
    assert leak(numbers, build(numbers)) == ""
