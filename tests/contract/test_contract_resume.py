# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Where states are kept, and where a run was stopped, changes not a single bit."""

from typing import Any

import pytest
from registry import CASES, others_later

import fedblend as fb
from fedblend.simulation import checkpoint
from runs import new_run, outcome, same_bits, usual_run

STATEFUL = ("scaffold", "local only", "finetune(scaffold)", "fedadam")


@pytest.mark.parametrize("name", others_later(CASES))
def test_states_in_host_memory_give_the_same_bits(name):
    same_bits(outcome(usual_run(name)), outcome(new_run(name, store="host")))
    assert usual_run(name).store_kind == "device"


@pytest.mark.parametrize("name", STATEFUL)
def test_states_on_disk_give_the_same_bits(name, tmp_path):
    run = new_run(name, store=fb.Storage("disk", folder=tmp_path))
    same_bits(outcome(usual_run(name)), outcome(run))


@pytest.mark.parametrize(
    "store",
    [
        "disk",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("device", "host")),
    ],
)
@pytest.mark.parametrize(
    ("name", "blocks"),
    [("scaffold", 0), ("scaffold", 2), *((name, 1) for name in STATEFUL)],
)
def test_stop_and_resume_is_going_on(name, store, blocks, tmp_path):
    """A fresh run that takes up a checkpoint ends where the unbroken one does."""
    settings: dict[str, Any] = {"store": fb.Storage(store, folder=tmp_path / "states")}
    run = iter(stopped := new_run(name, **settings))
    for _ in range(blocks + 1):
        next(run)
    checkpoint.save(tmp_path / "here", stopped, {"who": "me"})
    assert checkpoint.read_about(tmp_path / "here") == {"who": "me"}
    resumed = new_run(name, compile_anew=True, **settings)
    checkpoint.restore(tmp_path / "here", resumed)
    assert resumed.round == stopped.round == 2 * blocks
    same_bits(outcome(usual_run(name)), outcome(resumed.complete()))
    assert resumed.summary()["bits"] == usual_run(name).summary()["bits"]
    assert len(resumed.records) == len(usual_run(name).records)
    for mine, other in zip(resumed.records, usual_run(name).records, strict=True):
        assert mine.row() | {"seconds": 0} == other.row() | {"seconds": 0}


@pytest.mark.parametrize("name", others_later(CASES))
def test_every_case_resumes(name, tmp_path):
    run = iter(stopped := new_run(name))
    next(run)
    next(run)
    checkpoint.save(tmp_path / "here", stopped)
    resumed = new_run(name)
    checkpoint.restore(tmp_path / "here", resumed)
    same_bits(outcome(usual_run(name)), outcome(resumed.complete()))


def test_a_run_goes_on_after_its_own_checkpoint(tmp_path):
    run = new_run("scaffold")
    for record in run:
        checkpoint.save(tmp_path / str(record.round), run)
    same_bits(outcome(usual_run("scaffold")), outcome(run))
