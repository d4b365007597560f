# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Configurations: every kind of mistake is one line, and what is written reads back."""

import time
from pathlib import Path

import numpy as np
import optax
import pytest

from fedblend.config import toml
from fedblend.config.config import check, difference, dump, load
from fedblend.errors import ConfigError
from fedblend.local import Epochs, Scheduled

CASES = {
    "run.round=3": "run.round: unknown key; did you mean 'rounds'?",
    "model.hidden=[3]": "model.hidden: unknown key; known are l2, loss, "
    "ensemble, products, name, intercept",
    "run.rounds='10'": 'run.rounds: "10" is not a whole number',
    "run.rounds=true": "run.rounds: true is not a whole number",
    "run.rounds=2.5": "run.rounds: 2.5 is not a whole number",
    "run.rounds=-1": "run.rounds: -1 is not at least 0",
    "run.rounds=99999999999": "run.rounds: 99999999999 is not at most 2147483647",
    "run.dropout=1": "run.dropout: 1 is not in [0, 1)",
    "run.dropout=true": "run.dropout: true is not a number",
    "run.seed=-1": "run.seed: -1 is not at least 0",
    "run.seed=[1, 1]": "run.seed: [1, 1] has the same seed twice",
    "run.store=tape": "run.store: \"tape\" is not one of 'auto', 'device', 'host', "
    "'disk'",
    "algorithm.alpha=1.5": "algorithm.alpha: 1.5 is not in [0, 1]",
    "algorithm.alpha=-0.1": "algorithm.alpha: -0.1 is not in [0, 1]",
    "algorithm.alpha=0.5": "algorithm.alpha: fedavg takes no alpha, it mixes no models",
    "algorithm.name=fedavgg": 'algorithm.name: "fedavgg" is unknown; did you mean '
    "'fedavg'?",
    "algorithm.rate=0": "algorithm.rate: 0 is not above 0",
    "algorithm.rate=inf": "algorithm.rate: inf is not a finite number",
    "algorithm.epochs=1": "algorithm.steps or epochs: both are given; exactly one is "
    "needed",
    "algorithm.steps=[1, 'a']": 'algorithm.steps.1: "a" is not a whole number',
    "algorithm.batch_size=half": 'algorithm.batch_size: "half" is not a whole number '
    "or 'all'",
    "algorithm.optimizer={rate = 1}": "algorithm.optimizer.name: is missing",
    "algorithm.optimizer={name = 'adm', rate = 1}": "algorithm.optimizer.name: "
    "\"adm\" is unknown; did you mean 'adam'?",
    "algorithm.schedule={name = 'cosine', unit = 'epoch', over = 3}": (
        "algorithm.schedule.unit: \"epoch\" is not one of 'step', 'round'"
    ),
    "data.partition=dirchlet": 'data.partition: "dirchlet" is unknown; did you mean '
    "'dirichlet'?",
    "data=3": "data: 3 is not a table",
    "data.test=1.0": "data.test: 1.0 is not in [0, 1)",
    "data.validation=0.9": "data.validation + test: 1.15 leaves no rows to train on",
    "data.file=a.csv": "data.source or file: both are given; exactly one is needed",
    "data.target=y": "data.target: goes with file, not with source",
    "measure.metrics=['acc']": 'measure.metrics.0: "acc" is not loss, accuracy, '
    "balanced_accuracy, auc, average_precision, log_loss, brier, calibration_error, "
    "calibration_gap, mse, rmse, mae, r2, deviance or recall@K",
    "measure.local_rate=fast": 'measure.local_rate: "fast" is not a number or one of '
    "'tune', 'same'",
    "measure.splits=[]": "measure.splits: [] is not of length 1 or more",
    "version=2": "version: 2 is newer than this fedblend, which reads up to 1; update "
    "fedblend",
    "version=0": "version: 0 is not 1",
    "name=1979-05-27": "name: 1979-05-27 is not text",
}


@pytest.mark.parametrize(
    "text",
    [
        "{many}b = 1",
        "[{many}b]",
        "{quoted}b = 1",
        "{spaced}b = 1",
        'x = { y = """a"""", {many}b = 1 }',
        "x = { y = '''a''''', {many}b = 1 }",
    ],
)
def test_keys_of_many_parts_are_not_parsed(text):
    for name, part in {"many": "a.", "quoted": '"a".', "spaced": "a ."}.items():
        text = text.replace(f"{{{name}}}", part * 12_000)
    started = time.monotonic()
    with pytest.raises(ConfigError, match="a key has more than 8 parts"):
        toml.parse(text, "message")
    assert time.monotonic() - started < 1.0


def test_dots_in_texts_comments_and_numbers_are_no_parts():
    text = '''a.b.c.d.e.f.g.h = "1.2.3.4.5.6.7.8.9.10" # a.b.c.d.e.f.g.h.i.j
x = ["""a.b.c.d.e.f.g.h.i""", 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5]'''
    assert len(toml.parse(text, "here")["x"]) == 10


@pytest.mark.parametrize("setting", CASES)
def test_a_mistake_is_one_line(setting, tiny, write):
    path = write(tiny)
    with pytest.raises(ConfigError) as caught:
        load(path, [setting])
    assert str(caught.value) == f"{path}: {CASES[setting]}"


def test_a_missing_key_and_a_missing_table(tiny, write):
    with pytest.raises(ConfigError, match=r": data: is missing$"):
        load(write(""))
    del tiny["data"]["partition"]
    with pytest.raises(ConfigError, match=r"data\.partition: is missing$"):
        load(write(tiny))
    with pytest.raises(ConfigError, match=r": algorithm: is missing$"):
        load(write("data.source = 'digits'"))
    with pytest.raises(
        ConfigError, match=r"data\.client: is missing; it names the col"
    ):
        load(write("data = { file = 'a.csv', target = 'y' }\nalgorithm.name = 'apfl'"))
    with pytest.raises(ConfigError, match=r"algorithm\.name: is missing$"):
        load(write("data.source = 'digits'\nalgorithm.rate = 0.1"))


def test_toml_mistakes_name_file_and_line(write, tmp_path):
    path = write("version = 1\nname = \n")
    with pytest.raises(ConfigError, match=rf"^{path}: not valid TOML: .*line 2"):
        load(path)
    with pytest.raises(ConfigError, match="byte 0 is not UTF-8"):
        load(write(b"\xff\xfe"))
    with pytest.raises(ConfigError, match="nested too deeply"):
        load(write("a = " + "[" * 100_000))
    with pytest.raises(ConfigError, match=r"nothing\.toml: No such file"):
        load(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("rounds", "--set rounds: not a setting; write key=value, such as "
         "algorithm.rate=0.1"),
        ("run..x=1", "--set run..x=1: not a setting; write key=value, such as "
         "algorithm.rate=0.1"),
        ("run.rounds.x=1", "--set run.rounds.x=1: run.rounds is 4, not a table"),
    ],
)  # fmt: skip
def test_broken_settings(setting, line, tiny, write):
    with pytest.raises(ConfigError) as caught:
        load(write(tiny), [setting])
    assert str(caught.value) == line


def test_settings_are_toml_or_bare_words(tiny, write):
    config = load(
        write(tiny),
        ["run.seed=[1, 2]", "run.store=host", "name=a = b", "measure.on=3"],
    )
    assert config.run.seed == [1, 2]
    assert config.run.store == "host"
    assert config.name == "a = b"
    assert config.measure.on == 3


def test_a_written_config_reads_back(tiny, write):
    tiny["algorithm"] = {
        "name": "fedopt",
        "optimizer": {"name": "adamw", "rate": 1e-5, "b1": 0.5},
        "server": {"name": "yogi", "rate": 0.01},
        "schedule": {"name": "cosine", "unit": "round", "over": 4, "end": 0.1},
        "steps": [1, 2, 3, 4, 5, 6],
        "batch_size": "all",
    }
    config = load(write(tiny))
    again = load(write(dump(config), "again.toml"))
    assert again == config
    assert difference(again, config) is None


def test_odd_texts_and_numbers_survive_writing():
    content = {
        "a": 'quote " back \\ tab \t newline \n del \x7f ü 🙂',
        "with space": {"x.y": [1e-5, -0.0, 1e300, 3, True, "q"], "empty": {}},
        "list": [[1, 2], []],
        "table": {"deep": {"deeper": 1}},
        "inline": [{"k": "v"}],
    }
    assert toml.parse(toml.write(content), "here") == content


def test_the_first_difference_is_named(tiny):
    one = check(tiny, "here")
    tiny["algorithm"]["steps"] = 3
    other = check(tiny, "here")
    assert difference(one, other) == "algorithm.steps: 2 there, 3 here"
    del tiny["run"]["cohort"]
    assert (
        difference(other, check(tiny, "here")) == "run.cohort: 3 there, not given here"
    )


def test_paths_are_relative_to_the_file(tiny, write):
    tiny["data"] = {"file": "x.csv", "target": "y", "partition": "iid", "clients": 2}
    path = write(tiny)
    assert load(path).data.file == str(Path(path).parent / "x.csv")


def test_local_work_becomes_what_the_library_takes(tiny):
    def work(**options):
        base = {"name": "fedavg", "batch_size": 4, **options}
        return check({**tiny, "algorithm": base}, "here").algorithm

    plain = work(rate=0.1, steps=2)
    assert (plain.rule(), plain.work().steps, plain.rows()) == (0.1, 2, 4)
    named = work(optimizer={"name": "sgd", "rate": 1}, epochs=3)
    assert (named.rule(), named.work().steps) == (1.0, Epochs(3))
    each = work(rate=0.1, steps=[1, 2])
    assert np.array_equal(np.asarray(each.work().steps), [1, 2])
    for name in ("momentum", "adam", "adamw", "yogi", "adagrad", "rmsprop"):
        optimizer = {"name": name, "rate": 0.1}
        chosen = work(optimizer=optimizer, steps=1).rule()
        assert isinstance(chosen, optax.GradientTransformation)
        schedule = {"name": "constant", "unit": "round"}
        made = work(optimizer=optimizer, steps=1, schedule=schedule).rule()
        assert isinstance(made, Scheduled)
        assert isinstance(made.make(0.1), optax.GradientTransformation)


@pytest.mark.parametrize(
    ("schedule", "middle", "end"),
    [
        ({"name": "constant"}, 0.5, 0.5),
        ({"name": "exponential", "decay": 0.5, "over": 2}, 0.25, 0.125),
        ({"name": "cosine", "over": 4, "end": 0.5}, 0.375, 0.25),
        ({"name": "linear", "over": 4}, 0.25, 0.0),
        ({"name": "polynomial", "over": 4, "power": 2.0}, 0.125, 0.0),
    ],
)
def test_schedules(schedule, middle, end, tiny):
    tiny["algorithm"] |= {"rate": 0.5, "schedule": {"unit": "step", **schedule}}
    chosen = check(tiny, "here").algorithm.rule()
    assert isinstance(chosen, Scheduled)
    assert chosen.unit == "step"
    rates = [float(np.asarray(chosen.schedule(count))) for count in (0, 2, 4)]
    assert rates == pytest.approx([0.5, middle, end])
