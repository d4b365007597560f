# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Limits that hold: memory, time and what stays after an experiment."""

import gc
import resource
import time
import weakref

import pytest
from malicious import Attacker, Refused, config, write_node

from fedblend_federation.client import build, executor
from fedblend_federation.client.ledger import read_ledger
from fedblend_federation.policy import admit


def test_one_experiment_after_the_other_leaves_no_programs(tmp_path, monkeypatch):
    for module in (admit, build):
        monkeypatch.setattr(module, "EXPERIMENTS", 1)
    attacker, functions = Attacker(write_node(tmp_path / "node")), []
    for number in range(3):
        attacker.begin(config(algorithm={"rate": 0.1 + number / 100}))
        attacker.round(0)
        functions.append(weakref.ref(attacker.executor.setup.algorithm.client))
    gc.collect()
    assert functions[0]() is None and functions[-1]() is not None
    assert executor.update.cache_info().currsize == 1  # pyright: ignore


@pytest.mark.parametrize("discloses", [[], ["batches"]])
def test_rows_of_others_times_a_wide_layer_take_no_memory(discloses, tmp_path):
    policy = f"[limits]\nmemory_gb = 0.5\n[accept]\ndiscloses = {discloses}\n"
    attacker = Attacker(write_node(tmp_path / "node", policy=policy))
    whole = {"batch_size": "all", "steps": 1}
    wide = config(model={"name": "mlp", "hidden": [4000]}, algorithm=whole)
    room, before = {"train": 100_000, "test": 24}, _memory()
    if discloses:
        with pytest.raises(Refused, match=r"limits.memory_gb: what layers compute"):
            attacker.begin(wide, capacities=room)
    else:
        attacker.begin(wide, capacities=room)
        assert attacker.executor.setup.capacities == {"train": 64, "test": 24}
        attacker.round(0)
    assert _memory() - before < 0.5e9


def test_a_batch_of_few_rows_needs_little(tmp_path):
    policy = '[limits]\nmemory_gb = 0.5\n[accept]\ndiscloses = ["batches"]\n'
    attacker = Attacker(write_node(tmp_path / "node", policy=policy))
    wide = config(model={"name": "mlp", "hidden": [4000]})
    attacker.begin(wide, capacities={"train": 5000, "test": 24})
    attacker.round(0)


def test_training_alone_ends_when_its_time_is_over(tmp_path, monkeypatch):
    policy = "[limits]\nseconds = 50\n"
    attacker = Attacker(write_node(tmp_path / "node", policy=policy))
    attacker.begin(config(measure={"local": 1000}))
    updates, real, update = [], time.monotonic, executor.update

    def timed(*arguments):
        updates.append(arguments)
        return update(*arguments)

    monkeypatch.setattr(time, "monotonic", lambda: real() + 10 * len(updates))
    monkeypatch.setattr(executor, "update", timed)
    with pytest.raises(Refused, match=r"policy limits\.seconds: a request is 5.* s"):
        attacker.measure(1, last=True)
    assert len(updates) == 5
    assert (attacker.settings.folder / "experiment1" / "personal.safetensors").exists()
    assert read_ledger(attacker.settings.folder).accounts["experiment1"].longest > 50
    with pytest.raises(Refused, match=r"policy limits\.seconds"):
        attacker.measure(2)


def _memory() -> float:
    """The largest memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
