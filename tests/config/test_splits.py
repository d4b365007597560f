# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Every seed its own split."""

import csv

import numpy as np
import pytest

from fedblend.config.build import build
from fedblend.config.config import check
from fedblend.config.theory_rates import theory_values
from fedblend.data.dataset import Task
from fedblend.data.federated import hold_out_rows
from fedblend.data.shards import write_shards
from fedblend.errors import InputError
from fedblend.runs.run import run_config
from fedblend.simulation.simulate import set_up

FLIX = {
    "name": "flix",
    "rate": "theory",
    "alpha": 0.5,
    "steps": 1,
    "batch_size": "all",
    "personal": {"solver": "gradient_descent", "most": 5},
}


def table(path) -> list[dict[str, str]]:
    with open(path) as file:
        return list(csv.DictReader(file))


def rows_by_client(built, replica=0) -> list[set[bytes]]:
    test = built.federations[replica].test
    return [
        {row.tobytes() for row in test.rows(client)[0]}
        for client in range(built.federated_data.clients)
    ]


def test_a_seed_draws_its_own_split_of_the_same_clients(tiny):
    tiny["run"]["seed"] = [0, 3]
    both = build(check(tiny, "here"))
    tiny["run"]["seed"] = 3
    alone = build(check(tiny, "here"))
    first, second = (rows_by_client(both, replica) for replica in (0, 1))
    assert all(one != other for one, other in zip(first, second, strict=True))
    assert second == rows_by_client(alone)
    for name, split in both.federated_data.splits.items():
        np.testing.assert_array_equal(
            split.counts, alone.federated_data.splits[name].counts
        )
    tiny["run"]["seed"] = [3, 0]
    tiny["data"]["split_seed"] = 0
    fixed = build(check(tiny, "here"))
    assert len(fixed.federations) == 1
    assert rows_by_client(fixed) == first
    assert fixed.facts["splits"] == [0]
    assert both.facts["splits"] == [0, 3]


def test_seed_zero_keeps_the_split_it_always_had():
    train, validation, test = hold_out_rows(
        np.arange(20), 3, validation=0.2, test=0.25, seed=7
    )
    order = np.random.default_rng((7, 3)).permutation(20)
    np.testing.assert_array_equal(np.concatenate([test, validation, train]), order)


def test_constants_are_those_of_each_split(tiny):
    tiny |= {"algorithm": FLIX, "model": {"name": "softmax", "l2": 0.1}}
    tiny["run"] |= {"cohort": 6, "seed": [2, 5]}
    both = build(check(tiny, "here")).by_split
    tiny["run"]["seed"] = 5
    config = check(tiny, "here")
    one = build(config)
    assert both is not None and one.by_split is None and one.smoothness is not None
    np.testing.assert_allclose(both.over["smooth"][1], one.smoothness.smooth, rtol=1e-5)
    together, _ = theory_values(config, one.smoothness, 650)
    assert both.over["rates"][1, 0] == pytest.approx(together["rate"], rel=1e-5)
    assert both.over["rates"][0, 0] != both.over["rates"][1, 0]


@pytest.mark.slow
def test_a_seed_alone_comes_to_what_it_does_among_others(tiny, tmp_path):
    """The constants of theory, and with them the rate, are those of each split."""
    tiny["measure"]["local"] = True
    tiny["algorithm"] = FLIX
    tiny["run"] |= {"rounds": 2, "cohort": 6}
    tiny["model"]["l2"] = 0.1
    tiny["run"]["seed"] = [2, 5]
    run_config(check(tiny, "here"), tmp_path / "both")
    tiny["run"]["seed"] = 5
    run_config(check(tiny, "here"), tmp_path / "one")
    both, one = (table(tmp_path / name / "clients.csv") for name in ("both", "one"))
    both = [row for row in both if row["seed"] == "5"]
    for mine, theirs in zip(one, both, strict=True):
        for name in ("test_personal_loss", "test_local_loss"):
            assert float(mine[name]) == pytest.approx(float(theirs[name]), abs=1e-4)


@pytest.fixture
def folder(tmp_path):
    """Clients of uneven size in a folder; says what its targets are."""
    draw = np.random.default_rng(0)

    def clients():
        for number, count in enumerate((6, 9, 4, 8)):
            labels = np.arange(count, dtype=np.int32) % 3
            inputs = draw.normal(size=(count, 5)).astype(np.float32)
            yield f"ward {number}", (inputs, labels)

    task = Task("classes", 3, (5,), ("a", "b", "c"))
    write_shards(tmp_path / "wards", clients(), task=task)
    return str(tmp_path / "wards")


def test_a_configuration_runs_from_a_folder(tiny, folder, tmp_path):
    tiny["data"] = {"file": folder, "partition": "folder", "test": 0.25}
    tiny["run"] |= {"rounds": 2, "rows": "host", "seed": [0, 1]}
    built = build(check(tiny, "here"))
    assert isinstance(built.federated_data.train.examples[0], np.memmap)
    assert len(built.federations) == 1 and len(built.facts["sha256"]) == 64
    assert getattr(built.spec.store, "rows", None) == "host" and built.task.labels == (
        "a",
        "b",
        "c",
    )
    run = set_up(built.spec).complete()
    assert np.isfinite(run.history()[-1].measures.test.personal.loss.mean)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("target", "x", "data.target: is not for a folder of rows"),
        ("test", "official", "official"),
        ("file", "nowhere", "has no shards.json"),
    ],
)
def test_what_a_folder_cannot_have_is_refused(key, value, words, tiny, folder):
    tiny["data"] = {"file": folder, "partition": "folder"} | {key: value}
    with pytest.raises(InputError, match=words):
        build(check(tiny, "here"))
