# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""New clients of every algorithm by name, and clients that a run sets apart."""

import csv
import json
from copy import deepcopy

import jax
import jax.numpy as jnp
import pytest
from test_run import OWN

import example_arguments as examples
from fedblend.config.build import build
from fedblend.config.config import check
from fedblend.config.tables.model import loss_name
from fedblend.core import Down
from fedblend.errors import RunError
from fedblend.mixing import Blend
from fedblend.registry import ALGORITHMS
from fedblend.runs.personalize import client_work
from fedblend.runs.run import run_config
from fedblend.runs.run_folder import Folder
from fedblend.simulation.personalize import personalize
from tiny_config import TINY

pytestmark = pytest.mark.usefixtures("compiled")


def configured(tiny, name, **options):
    tiny |= examples.tables(name)
    tiny["algorithm"] |= {"name": name, **OWN[name], **options}
    if examples.needs_everyone(name):
        del tiny["run"]["cohort"]
    config = check(tiny, "here")
    return config, build(config)


def work_of(config, built, **asked):
    data = built.federated_data.select([0, 2])
    loss = loss_name(config, built.task), built.loss
    return *client_work(config, loss, data, **asked), data


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_model_for_new_clients(tiny, name):
    config, built = configured(tiny, name)
    algorithm, visits, data = work_of(config, built)

    def models(shared):
        down = Down(shared, jnp.zeros((), jnp.int32))
        key = jax.random.key(0)
        return personalize(algorithm, down, data, key, visits=visits).models

    shared = jax.eval_shape(built.model.init, jax.random.key(0))
    found = jax.eval_shape(models, shared)
    found = found.personal if isinstance(found, Blend) else found
    assert jax.tree.structure(found) == jax.tree.structure(shared)
    for mine, ours in zip(*map(jax.tree.leaves, (found, shared)), strict=True):
        assert mine.shape == (2, *ours.shape)
        assert mine.dtype == ours.dtype


@pytest.mark.parametrize(
    ("name", "options", "steps", "visits"),
    [
        ("apfl", {}, None, 10),
        ("apfl", {}, 3, 3),
        ("apfl_agnostic", {}, 3, 3),
        ("apfl", {"steps": [1, 3, 1, 3, 1, 3]}, None, 10),
        ("ditto", {}, 3, 1),
        ("scaffold", {}, 3, 0),
        ("finetune", {}, 3, 0),
        ("fedsim", {}, 3, 3),
        ("fedalt", {}, 3, 1),
        ("fedbabu", {}, 3, 0),
    ],
)
def test_where_all_moves_steps_come_one_by_one(tiny, name, options, steps, visits):
    config, built = configured(tiny, name, **options)
    assert work_of(config, built, steps=steps)[1] == visits


def test_in_either_order_a_new_client_takes_the_same_steps(tiny):
    """On its own part, while the shared one is fixed: as many as are asked for."""
    found = []
    for name, own in (("partial", {"personal_steps": 2}), ("fedsim", {})):
        config, built = configured(deepcopy(tiny), name, batch_size="all", **own)
        algorithm, visits, data = work_of(config, built, steps=4)
        down = Down(built.model.init(jax.random.key(0)), jnp.zeros((), jnp.int32))
        key = jax.random.key(1)
        models = personalize(algorithm, down, data, key, visits=visits).models
        found.append(models.bias)
    assert (found[0] != 0).any() and (found[0] == found[1]).all()


@pytest.mark.parametrize("asked", [{"steps": 3}, {"rate": 0.1}])
def test_flix_has_no_use_for_steps(tiny, asked):
    config, built = configured(tiny, "flix")
    with pytest.raises(RunError, match="solver") as error:
        work_of(config, built, **asked)
    assert str(error.value).startswith(next(iter(asked)))


class Stop(Exception):
    """Something that ends a run from outside."""


def stopped(step):
    if step.round == 2:
        raise Stop


def results(path):
    folder = Folder(path)
    runs = json.loads(folder.summary.read_text())["runs"]
    return folder.clients.read_text(), [run["unseen"] for run in runs]


@pytest.mark.slow
def test_clients_that_a_run_sets_apart(tiny, tmp_path):
    tiny["data"]["unseen"] = 0.3
    tiny["run"]["seed"] = [0, 4]
    tiny["measure"] |= {"metrics": ["accuracy"], "splits": ["test"]}
    config = check(tiny, "here")
    run_config(config, tmp_path / "whole")
    with pytest.raises(Stop):
        run_config(config, tmp_path / "stopped", on_step=stopped)
    run_config(config, tmp_path / "stopped", resume=True)
    table, unseen = results(tmp_path / "whole")
    assert (table, unseen) == results(tmp_path / "stopped")
    rows = list(csv.DictReader(table.splitlines()))
    training = [row["training"] for row in rows]
    assert training == (["seen"] * 4 + ["unseen"] * 2) * 2
    assert sorted(int(row["name"]) for row in rows[:6]) == list(range(6))
    for replica, one in enumerate(unseen):
        assert one["clients"] == 2
        mean = one["measures"]["test"]["personal"]["accuracy"]["mean"]
        mine = [
            float(row["test_personal_accuracy"]) for row in rows[6 * replica :][4:6]
        ]
        assert mean == pytest.approx(sum(mine) / 2)
        assert mean > one["measures"]["test"]["shared"]["accuracy"]["mean"]
    assert unseen[0] != unseen[1]


def test_clients_are_set_apart_by_the_seed_of_the_data():
    chosen = []
    for seed in (0, 0, 1):
        data = {**TINY["data"], "unseen": 0.3, "seed": seed}
        built = build(check({**TINY, "data": data}, "here"))
        chosen.append((built.federated_data.names, built.unseen[0].names))
    assert chosen[0] == chosen[1] != chosen[2]
