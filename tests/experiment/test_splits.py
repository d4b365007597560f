# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Every seed its own split, and what a run says of gains and of divergence."""

import copy
import csv
import io
import json

import numpy as np
import pytest
from rich.console import Console

from fedblend.experiment.build import build
from fedblend.experiment.config import check
from fedblend.experiment.outputs import Folder, read_rows
from fedblend.experiment.run import run_config
from fedblend.experiment.section import ConfigError
from fedblend.report.terminal import show

from .tiny_config import TINY

FLIX = {
    "name": "flix",
    "rate": "theory",
    "alpha": 0.5,
    "steps": 1,
    "batch_size": "all",
    "personal": {"solver": "newton", "most": 5},
}


@pytest.fixture
def tiny():
    return copy.deepcopy(TINY)


def table(path) -> list[dict[str, str]]:
    with open(path) as file:
        return list(csv.DictReader(file))


def rows_by_client(built, lane=0) -> list[set[bytes]]:
    test = built.federations[lane].test
    return [
        {row.tobytes() for row in test.rows(client)[0]}
        for client in range(built.federation.clients)
    ]


def test_a_seed_draws_its_own_split_of_the_same_clients(tiny):
    tiny["run"]["seed"] = [0, 3]
    both = build(check(tiny, "here"))
    tiny["run"]["seed"] = 3
    alone = build(check(tiny, "here"))
    first, second = (rows_by_client(both, lane) for lane in (0, 1))
    assert all(one != other for one, other in zip(first, second, strict=True))
    assert second == rows_by_client(alone)
    for name, split in both.federation.splits.items():
        np.testing.assert_array_equal(split.counts, alone.federation.splits[name].counts)
    tiny["run"]["seed"] = [3, 0]
    tiny["data"]["split_seed"] = 0
    fixed = build(check(tiny, "here"))
    assert len(fixed.federations) == 1
    assert rows_by_client(fixed) == first
    assert fixed.facts["splits"] == [0]
    assert both.facts["splits"] == [0, 3]


def test_seed_zero_keeps_the_split_it_always_had(tiny):
    built = build(check(tiny, "here"))
    parts = [np.concatenate([f.rows(c)[1] for f in (built.federation.test,
             built.federation.train)]) for c in range(6)]  # fmt: skip
    again = build(check({**tiny, "data": {**tiny["data"], "test": 0.0}}, "here"))
    for client, labels in enumerate(parts):  # the order, whatever is held out of it
        np.testing.assert_array_equal(again.federation.train.rows(client)[1], labels)
    assert [len(part) for part in parts] == built_counts(built)
    # The shuffle of client 0 as it was before splits had numbers.
    order = np.random.default_rng((0, 0)).permutation(len(parts[0]))
    inverse = np.argsort(order)
    ascending = parts[0][inverse]
    redone = ascending[np.random.default_rng((0, 0)).permutation(len(ascending))]
    np.testing.assert_array_equal(redone, parts[0])


def built_counts(built) -> list[int]:
    splits = built.federation.splits.values()
    return np.sum([split.counts for split in splits], axis=0).tolist()


@pytest.mark.parametrize("algorithm", [None, FLIX], ids=["fedavg", "flix"])
def test_a_seed_alone_comes_to_what_it_does_among_others(tiny, tmp_path, algorithm):
    """Also where the constants of theory are those of each split."""
    tiny["measure"]["local"] = True
    if algorithm is not None:
        tiny["algorithm"] = algorithm
        tiny["run"] |= {"rounds": 2, "cohort": 6}
        tiny["model"]["l2"] = 0.1
    tiny["run"]["seed"] = [2, 5]
    run_config(check(tiny, "here"), tmp_path / "both")
    tiny["run"]["seed"] = 5
    run_config(check(tiny, "here"), tmp_path / "one")
    both, one = (table(tmp_path / name / "clients.csv") for name in ("both", "one"))
    both = [row for row in both if row["seed"] == "5"]
    for mine, theirs in zip(one, both, strict=True):
        for name in ("test_personal_loss", "test_local_loss", "gain_low", "gain_high"):
            assert float(mine[name]) == pytest.approx(float(theirs[name]), abs=1e-4)
        assert mine["harmed"] == theirs["harmed"]


def test_terminal_summary_table_and_figure_count_alike(tiny, tmp_path):
    """Training alone is long, the shared model hardly trained: some are harmed."""
    tiny["data"] |= {"partition": "dirichlet", "concentration": 0.4, "test": 0.5}
    del tiny["data"]["classes"]
    tiny["measure"]["local"] = 30
    tiny["run"] |= {"seed": [0, 1, 2], "rounds": 2}
    out = tmp_path / "out"
    summary = run_config(check(tiny, "here"), out)
    harmed = summary["harmed"]["test"]["accuracy"]["than_local"]
    rows = table(out / "harm.csv")
    assert 0 < harmed["count"] < 6
    assert isinstance(harmed["count"], int)
    assert harmed["count"] == sum(row["harmed"] == "yes" for row in rows)
    assert all((row["harmed"] == "yes") == (float(row["gain_high"]) < 0) for row in rows)
    assert harmed["by_chance"] == pytest.approx(0.025 * 6)
    said = f"{harmed['count']} of 6 clients do worse than alone"
    assert said in summary["harm"]
    assert said in (out / "figures" / "gains_test.svg").read_text()
    console = Console(file=io.StringIO(), width=200)
    show(read_rows(Folder(out)), summary["runs"], console, summary)
    assert said in console.file.getvalue()  # pyright: ignore
    for lane, one in enumerate(summary["runs"]):
        own = [r for r in table(out / "clients.csv") if r["seed"] == str(lane)]
        counted = one["harmed"]["test"]["accuracy"]["than_local"]["count"]
        assert counted == sum(float(row["harmed"]) for row in own)


def test_a_run_that_diverges_ends_with_its_summary(tiny, tmp_path):
    tiny["algorithm"] |= {
        "name": "finetune",
        "tune": {"rate": 1e38, "steps": 2, "batch_size": 4},
    }
    tiny["measure"] |= {"local": 1, "metrics": ["loss"]}
    out = tmp_path / "out"
    summary = run_config(check(tiny, "here"), out)
    assert "6 clients have a model that is not finite" in summary["harm"]
    counted = summary["harmed"]["test"]["loss"]["than_local"]
    assert (counted["not_finite"], counted["clients"]) == (6, 0)
    assert {row["harmed"] for row in table(out / "harm.csv")} == {"not finite"}
    assert (out / "figures" / "harm.png").exists()
    assert run_config(check(tiny, "here"), out, resume=True) == json.loads(
        (out / "summary.json").read_text()
    )


def test_tables_of_used_rows_are_of_one_split(tiny):
    tiny["data"] |= {"source": "movielens", "partition": "by_key"}
    config = check(copy.deepcopy(TINY), "here")
    select = type("Select", (), {"parameters": ["embedding"]})()
    run = config.run.model_copy(update={"seed": [0, 1]})
    config = config.model_copy(update={"select": select, "run": run})
    with pytest.raises(ConfigError, match="data.split_seed: is missing"):
        build(config)
