# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Movies by configuration: the dual encoder, a penalty at the server, rows by need."""

import lzma
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from fedblend.config.build import build
from fedblend.config.config import check, dump
from fedblend.errors import ConfigError
from fedblend.runs.run import run_config

pytestmark = pytest.mark.usefixtures("compiled", "no_figures")
TABLES = {
    "version": 1,
    "name": "movies",
    "model": {"name": "dual_encoder", "width": 4},
    "algorithm": {"name": "fedavg", "rate": 0.25, "steps": 2, "batch_size": 4},
    "central": {"how": "one_way", "penalty": "spreadout"},
    "select": {"parameters": ["embedding"]},
    "run": {"rounds": 2, "every": 2, "cohort": 3},
    "measure": {"local": False, "splits": ["test"], "metrics": ["loss", "recall@10"]},
}


@pytest.fixture(scope="module")
def ratings(tmp_path_factory):
    """Six users who rate 8 to 13 of the movies up to 30."""
    rng = np.random.default_rng(0)
    lines = [
        f"{user}::{movie}::5"
        for user in range(1, 7)
        for movie in rng.choice(np.arange(1, 31), 7 + user, replace=False)
    ]
    path = tmp_path_factory.mktemp("movies") / "ratings.dat.xz"
    path.write_bytes(lzma.compress("\n".join(lines).encode()))
    return str(path)


def config(ratings, **tables):
    data = {"source": "movielens", "options": {"file": ratings}, "partition": "by_key"}
    chosen = {**TABLES, "data": data, **tables}
    return check({key: t for key, t in chosen.items() if t is not None}, "here")


@pytest.mark.slow
def test_rows_by_need_change_what_travels_and_nothing_else(ratings, tmp_path):
    some, whole = (
        run_config(config(ratings, select=table), tmp_path / name)["runs"][0]
        for name, table in (("some", TABLES["select"]), ("whole", None))
    )
    measured = [one["measures"]["test"]["shared"] for one in (some, whole)]
    for name in ("loss", "recall@10"):
        first, other = (of[name]["mean"] for of in measured)
        assert first == pytest.approx(other, rel=1e-5)
    dense, table = 4 * 4 + 4, 3953 * 4
    # Three clients, two rounds; the penalty's gradient is that of the table alone.
    assert whole["bits"]["down"] == 3 * 2 * 32 * (2 * table + dense)
    assert some["bits"]["down"] < 3 * 2 * 32 * (2 * 14 * 4 + dense) + 1
    assert some["bits"]["last_broadcast"] >= 6 * 32 * (table + dense)


def test_a_penalty_takes_no_rows_and_is_written_out(ratings):
    one = config(ratings, central={**TABLES["central"], "strength": 0.01})
    assert 'penalty = "spreadout"' in dump(one) and "strength = 0.01" in dump(one)
    assert 'parameters = ["embedding"]' in dump(one)
    built = build(one)
    assert built.server is None and built.federated_data.clients == 6


def test_the_example_in_the_documents(ratings):
    text = (Path(__file__).parents[2] / "docs" / "communication.md").read_text("utf-8")
    blocks = re.findall(r"^```toml\n(.*?)^```", text, re.M | re.S)
    (block,) = (one for one in blocks if "[select]" in one)
    content = tomllib.loads(block)
    content["data"]["options"] = {"file": ratings}
    built = build(check(content, "docs/communication.md"))
    assert built.unseen and built.federated_data.clients == 5
    content["run"]["seed"] = [0, 1]
    with pytest.raises(ConfigError, match=r"data\.split_seed: is missing"):
        build(check(content, "docs/communication.md"))
    content["data"]["split_seed"] = 0
    assert len(build(check(content, "docs/communication.md")).federations) == 1


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (
            {"select": {"parameters": ["table"]}},
            'here: select.parameters: "table" is no table that dual_encoder looks rows '
            "up in; there is embedding",
        ),
        ({"select": {"parameters": []}}, "here: select.parameters: "),
        ({"model": {"name": "dual_encoder", "l2": 0.1}}, "model.l2 = 0.1 reads the"),
        (
            {"model": {"name": "dual_encoder", "loss": "cross_entropy"}},
            'select: model.loss = "cross_entropy" reads the whole table',
        ),
        ({"model": {"name": "softmax"}, "central": None}, "select: softmax looks no"),
        (
            {"model": {"name": "softmax"}, "select": None},
            'central.penalty: "spreadout" is of the embeddings of dual_encoder, and',
        ),
        (
            {"compress": {"compressor": {"name": "int8"}}},
            "select: does not go with [compress]",
        ),
        (
            {"privacy": {"clip": 1.0, "noise": 1.0, "delta": 1e-3}},
            "select: reveals to the server which rows are whose; no [privacy]",
        ),
        (
            {
                "algorithm": {
                    "name": "fedavg",
                    "optimizer": {"name": "adamw", "rate": 0.1},
                    "steps": 1,
                    "batch_size": 4,
                }
            },
            "select: weight_decay = 0.0001 moves rows that nobody uses",
        ),
        (
            {"central": {"how": "one_way", "penalty": "spreadout", "share": 0.5}},
            "central.share: is for rows, and a penalty needs none",
        ),
        (
            {"central": {"how": "one_way", "share": 0.5, "strength": 0.5}},
            "central.strength: goes with penalty",
        ),
        (
            {"data": {"source": "digits", "partition": "iid", "clients": 3}},
            'model.name: "dual_encoder" reads numbers of movies',
        ),
    ],
)
def test_what_does_not_go_together_is_one_line(ratings, tables, said):
    with pytest.raises(ConfigError) as error:
        config(ratings, **tables)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_other_losses_and_algorithms_are_refused_in_one_line(ratings, tmp_path):
    with pytest.raises(ConfigError, match="is dual_encoder's, not softmax's"):
        model = {"name": "softmax", "loss": "hinge"}
        build(config(ratings, model=model, select=None, central=None))
    options = {"name": "scaffold", "rate": 0.1, "steps": 1, "batch_size": 4}
    with pytest.raises(ConfigError, match="select: clients of the wrapped algorithm"):
        run_config(config(ratings, algorithm=options, central=None), tmp_path / "x")
