# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A configuration of four keys: what is chosen, that it is shown, that it runs."""

import pytest

from example_arguments import needs_everyone
from fedblend.config.build import build
from fedblend.config.config import ROUNDS, check, dump, fill, keys_left_out, load, loads
from fedblend.errors import ConfigError
from fedblend.registry import ALGORITHMS
from tiny_config import TINY


def four(**algorithm):
    data = {"file": "own.csv", "client": "who", "target": "label"}
    return {"data": data, "algorithm": algorithm}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("source", ["digits", "breast_cancer", "femnist", "own.csv"])
def test_every_algorithm_needs_no_more_than_its_name(name, source):
    content = four(name=name)
    if source != "own.csv":
        content["data"] = {"source": source}
    config = check(content, "four.toml")
    assert loads(dump(config), "config.toml") == config


def test_what_is_chosen_for_a_table():
    config = check(four(name="fedavg"), "four.toml", name="four")
    assert (config.version, config.name, config.data.partition) == (1, "four", "by_key")
    assert (config.model.name, config.run.rounds, config.run.cohort) == (
        *("softmax", ROUNDS, None),
    )
    work = config.algorithm
    assert (work.rate, work.steps, work.batch_size) == (0.1, 10, 32)
    assert config.measure.local is True


@pytest.mark.parametrize(
    ("source", "partition", "model", "cohort", "local"),
    [
        ("femnist", "by_key", "cnn", 10, False),
        ("two_sines", "by_key", "mlp", 10, False),
        ("digits", "dirichlet", "softmax", None, True),
        ("breast_cancer", "dirichlet", "logistic", None, True),
        ("synthetic", "by_key", "softmax", None, True),
        ("mnist", "dirichlet", "cnn", None, False),
    ],
)
def test_what_is_chosen_for_a_dataset(source, partition, model, cohort, local):
    content = {"data": {"source": source}, "algorithm": {"name": "apfl"}}
    config = check(content, "four.toml")
    assert config.name == f"{source}-apfl"
    assert (config.data.partition, config.model.name) == (partition, model)
    assert (config.run.cohort, config.measure.local) == (cohort, local)


def test_what_a_file_states_is_not_changed():
    assert fill(TINY) == TINY
    for key in ("data", "model", "algorithm", "run", "measure"):
        without = {name: of for name, of in TINY.items() if name != key}
        after = fill(without)
        assert {name: after[name] for name in without} == without


def test_local_work_of_its_own_follows_that_of_the_round():
    adam = {"name": "adam", "rate": 0.01}
    config = check(four(name="finetune", optimizer=adam, epochs=2), "four.toml")
    inner = config.algorithm.model_dump()["finetune"]
    assert inner["optimizer"]["name"] == "adam" and inner["steps"] == 10
    config = check(four(name="ditto", rate=0.03, batch_size=7), "four.toml")
    inner = config.algorithm.model_dump()["personal"]
    assert (inner["rate"], inner["batch_size"]) == (0.03, 7)
    config = check(four(name="fedavg", rate=0.03, epochs=1), "four.toml")
    assert config.algorithm.steps is None


def test_rates_of_theory_come_with_all_rows():
    config = check(four(name="flix", rate="theory"), "four.toml")
    assert (config.algorithm.batch_size, config.algorithm.steps) == ("all", 1)


def test_the_algorithms_that_need_everybody_get_no_cohort():
    found = [name for name in ALGORITHMS if needs_everyone(name)]
    assert found == [name for name, entry in ALGORITHMS.items() if entry.everyone]
    content = {"data": {"source": "femnist"}, "algorithm": {"name": found[0]}}
    assert check(content, "four.toml").run.cohort is None


def test_what_was_chosen_is_known_by_key(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("data.source = 'digits'\nalgorithm = {name = 'fedavg', rate = 0.2}")
    found = keys_left_out(path, ["run.rounds=3"])
    assert load(path, ["run.rounds=3"]).run.rounds == 3
    assert found == {
        "version": 1,
        "name": "mine",
        "data.partition": "dirichlet",
        "data.clients": 10,
        "data.concentration": 1.0,
        "data.minimum": 20,
        "model.name": "softmax",
        "algorithm.steps": 10,
        "algorithm.batch_size": 32,
    }


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("run=3", "run: 3 is not a table"),
        ("model='cnn'", 'model: "cnn" is not a table'),
        ("algorithm.name='fedavgg'", 'algorithm.name: "fedavgg" is unknown; did you '),
        ("algorithm.rat=0.1", "algorithm.rat: unknown key; did you mean 'rate'?"),
        ("data.source='digit'", None),
        ("measure=1", "measure: 1 is not a table"),
    ],
)
@pytest.mark.parametrize("source", ["digits", "femnist"])
def test_wrong_values_are_still_one_line(setting, line, source, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(f"data.source = '{source}'\nalgorithm = {{ name = 'fedavg' }}")
    with pytest.raises(ValueError) as caught:
        build(load(path, [setting]))
    text = str(caught.value)
    assert "\n" not in text
    if line is not None:
        assert isinstance(caught.value, ConfigError)
        assert text.startswith(f"{path}: {line}")


def test_four_keys_build_a_run(tmp_path):
    rows = [
        f"{'abc'[i % 3]},{i % 7},{i % 5},{'yes' if i % 2 else 'no'}" for i in range(60)
    ]
    (tmp_path / "own.csv").write_text("\n".join(["who,x,y,label", *rows]))
    path = tmp_path / "mine.toml"
    path.write_text(
        "data = { file = 'own.csv', client = 'who', target = 'label' }\n"
        "algorithm.name = 'flix'\n"
    )
    made = build(load(path))
    assert made.federated_data.names == ("a", "b", "c")
    assert {"accuracy", "auc"} <= set(made.measures)
