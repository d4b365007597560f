# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[privacy]``: what it builds, promises, and refuses in one line."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import jax
import pytest

from fedblend.cli import main
from fedblend.config.build import build
from fedblend.config.config import Config, dump, load
from fedblend.config.tables.adapt import Adapt
from fedblend.config.tables.central import Central
from fedblend.config.tables.compress import Compress
from fedblend.config.tables.data import AnyData
from fedblend.config.tables.federation import Federation
from fedblend.config.tables.model import NAMED_MODELS, ImportedModel
from fedblend.config.tables.privacy import EXAMINED, SCOPE, Privacy, report
from fedblend.config.tables.run import RunTable
from fedblend.data.dataset import DATASETS
from fedblend.errors import ConfigError
from fedblend.runs import tune
from fedblend.runs.plan.problem import problem
from fedblend.runs.run import run_config
from fedblend.simulation.simulate import set_up
from fedblend.theory.blt import optimal
from fedblend.theory.privacy import blt_cost, cohort_cost, gaussian_epsilon

TABLE: dict[str, Any] = {"clip": 0.5, "noise": 2.0, "delta": 1e-3}
ADAM = {"name": "adam", "rate": 0.1}
RAND = {"compressor": {"name": "rand_k", "k": 5}}


@pytest.fixture
def configured(tiny, write):
    """A configuration with the table, and with changes to it or to other tables."""

    def make(change: dict[str, Any] | None = None, **tables):
        content = {**tiny, "privacy": {**TABLE, **(change or {})}}
        for name, table in tables.items():
            content[name] = {**tiny.get(name, {}), **table}
        return load(write(content))

    return make


def promised(config, clients=6, raw=False):
    return report(config, clients, raw)["privacy"]


def test_it_is_written_and_read_again_and_may_be_left_out(tiny, write, configured):
    config = configured({"adaptive": True, "count_noise": 3.0})
    assert load(write(dump(config), "again.toml")) == config
    assert "privacy" not in dump(load(write(tiny)))
    assert report(load(write(tiny)), 6, False) == {}


def test_a_run_says_what_it_costs(configured, tmp_path, write, capsys, compiled):
    config = configured(measure={"metrics": ["loss"], "splits": ["test"]})
    path, out = write(dump(config), "private.toml"), tmp_path / "out"
    assert main(["run", str(path), "--out", str(out)]) == 0
    found = json.loads((out / "summary.json").read_text())["privacy"]
    expected = cohort_cost(noise=2.0, delta=1e-3, cohort=3, clients=6, rounds=4)
    assert found["epsilon"] == expected.epsilon
    assert found["sentence"] == f"{expected}, {SCOPE}"
    assert f"privacy: {expected}, {SCOPE}" in capsys.readouterr().out
    assert main(["show", str(out)]) == 0
    assert f"privacy: {expected}, {SCOPE}" in capsys.readouterr().out


def test_the_table_decides_what_is_built(configured):
    for change, extra in (({}, 0), ({"adaptive": True, "count_noise": 3.0}, 1)):
        made = build(configured(change))
        assert made.algorithm.needs.cohort == 3
        params = jax.eval_shape(made.model.init, made.key)
        start = jax.eval_shape(made.algorithm.start, params, None, None, made.key)
        assert len(jax.tree.leaves(start[0].extra)) == extra


def test_without_a_cohort_everyone_is_planned_with(tiny, configured):
    del tiny["run"]["cohort"]
    config = configured()
    assert build(config).algorithm.needs.cohort == 6
    everyone = cohort_cost(noise=2.0, cohort=6, clients=6, rounds=4, delta=1e-3)
    assert promised(config)["epsilon"] == everyone.epsilon


def test_several_seeds_cost_more_together(configured):
    found = promised(configured(run={"seed": [0, 1, 2]}))
    once, thrice = (
        cohort_cost(noise=2.0, cohort=3, clients=6, rounds=rounds, delta=1e-3).epsilon
        for rounds in (4, 12)
    )
    assert found["epsilon"] == thrice
    assert f"of all 3 seeds together, {once:.4g} of each" in found["sentence"]


def test_clients_that_are_dealt_take_part_once_in_an_epoch(configured):
    """Four rounds of epochs of two are two Gaussian mechanisms for a client."""
    config = configured(run={"epoch": 2, "seed": [0, 1]})
    once, both = (
        gaussian_epsilon(participations * (2 / 2.0) ** 2, 1e-3)
        for participations in (2, 4)
    )
    found = promised(config)
    assert found["epsilon"] == pytest.approx(both, rel=1e-9)
    assert f"of all 2 seeds together, {once:.4g} of each" in found["sentence"]
    assert build(config).spec.cohort.epoch == 2  # pyright: ignore


def test_a_private_run_that_is_resumed_costs_the_same(configured, tmp_path, compiled):
    """Nothing of the lost rounds was written, and the strategy begins anew."""
    config = configured(
        {"buffers": 2},
        run={"epoch": 2, "every": 1},
        measure={"metrics": ["loss"], "splits": ["test"]},
    )

    def stop(step):
        if step.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_config(config, tmp_path / "out", on_step=stop)
    summary = run_config(config, tmp_path / "out", resume=True)
    assert summary["privacy"]["epsilon"] == promised(config)["epsilon"]
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1, 2, 3, 4]


def test_buffers_for_clients_that_take_turns(configured):
    """The noise is optimal for the run, and epsilon is that of the same strategy."""
    config = configured({"buffers": 3}, run={"separation": 2, "seed": [0, 1]})
    strategy = optimal(rounds=4, separation=2)
    counted: dict[str, Any] = dict(noise=2.0, rounds=4, delta=1e-3, separation=2)
    both = blt_cost(**counted, strategy=strategy, runs=2)
    assert promised(config)["epsilon"] == both.epsilon
    assert strategy.decays
    spec = build(config).spec
    assert spec.cohort.separation == 2  # pyright: ignore
    assert set_up(spec).shapes.server.noise.shape == (4,)


def test_buffers_are_accounted_for_however_clients_are_drawn(configured):
    """Dealt in epochs: as often as there are epochs. Drawn anew: in every round."""
    dealt = configured({"buffers": 1}, run={"epoch": 2})
    strategy = optimal(rounds=4, participations=2, buffers=1)
    run: dict[str, Any] = {"noise": 2.0, "rounds": 4, "delta": 1e-3}
    expected = blt_cost(**run, strategy=strategy, participations=2)
    assert promised(dealt)["epsilon"] == expected.epsilon
    drawn = promised(configured({"buffers": 1}))["epsilon"]
    always = gaussian_epsilon(4 * (2 / 2.0) ** 2, 1e-3)
    assert drawn == pytest.approx(always)
    assert drawn > expected.epsilon


def test_buffers_know_the_momentum_of_the_server(configured):
    server = {"name": "momentum", "rate": 1.0, "momentum": 0.9}
    config = configured(
        {"buffers": 2},
        algorithm={"name": "fedopt", "server": server},
        run={"separation": 2, "rounds": 20},
    )
    found = config.privacy.strategy(config.run, config.algorithm.server)
    assert found == optimal(rounds=20, separation=2, buffers=2, momentum=0.9)
    assert found != optimal(rounds=20, separation=2, buffers=2)


def test_clients_that_take_turns_cost_as_much_as_dealt_ones(configured):
    """In two rounds in a row nobody is there twice, as in an epoch of two."""
    alone = promised(configured(run={"separation": 2}))
    assert alone == promised(configured(run={"epoch": 2}))


def test_poisson_sampling_counts_clients_that_are_added(configured):
    config = configured({"adjacency": "add_or_remove"}, run={"sampling": "poisson"})
    promise = promised(config)
    run: dict[str, Any] = {"noise": 2.0, "cohort": 3, "clients": 6, "rounds": 4}
    how: dict[str, Any] = {"adjacency": "add_or_remove", "sampling": "poisson"}
    found = cohort_cost(**run, **how, delta=1e-3)
    assert promise["epsilon"] == found.epsilon
    assert "(add or remove)" in promise["sentence"]
    fixed = cohort_cost(**run, delta=1e-3, adjacency="zero_out").epsilon or 0
    assert 1.8 * (found.epsilon or 0) < fixed


def test_independent_noise_for_clients_that_are_dealt_is_not_called_sampled(configured):
    """In four rounds a client is twice there, for certain and not by chance."""
    found = promised(configured(run={"epoch": 2}))
    twice = cohort_cost(noise=2.0, cohort=6, clients=6, rounds=2, delta=1e-3)
    assert found["epsilon"] == twice.epsilon


def test_what_the_accounting_does_not_cover_is_no_guarantee(configured):
    flix = {"name": "flix", "alpha": 0.5, "personal": {"solver": "lbfgs"}}
    flix |= {"rate": "theory", "steps": 1, "batch_size": "all"}
    for config, reason in (
        (configured({"noise": 0.0}), "there is no noise"),
        (configured({"noise_from": "seed"}), "the noise can be recomputed"),
        (
            configured({"adaptive": True, "count_noise": 3.0}, compress=RAND),
            "[compress] may make answers longer than a clip that is adaptive",
        ),
        (
            configured(compress={**RAND, "how": "diana"}),
            '[compress] how = "diana" sums memories that are not clipped',
        ),
        (configured(compress={"how": "perm_k"}), '[compress] how = "perm_k" makes'),
        (
            configured(compress={"down": {"name": "top_k", "k": 1}}),
            "[compress] down needs every client in every round",
        ),
        (
            configured(central={"how": "one_way", "share": 0.2}),
            "[central] gives the server rows of the clients, without noise",
        ),
        (
            configured(central={"how": "one_way", "classes": [0]}),
            "[central] gives the server rows of the clients, without noise",
        ),
        (
            configured(federation={"longest_update": 0.1}),
            "federation.longest_update is below privacy.clip",
        ),
        (configured(algorithm={"name": "scaffold"}), "clients of scaffold send more"),
        (configured(run={"reduction": "median"}), 'run.reduction = "median" is no sum'),
        (configured(run={"weights": "by_count"}), "run.weights are not uniform"),
        (configured(algorithm=flix), 'algorithm.rate = "theory" is computed from the'),
    ):
        found = promised(config)
        assert found["epsilon"] is None
        assert found["sentence"].startswith(f"no guarantee: {reason}")


def test_every_setting_was_examined_and_a_new_one_is_no_guarantee(
    configured, monkeypatch
):
    """Whoever adds a key decides here what it does to privacy."""
    known = {"run": RunTable, "privacy": Privacy, "compress": Compress}
    known |= {"central": Central, "federation": Federation, "adapt": Adapt}
    for name, table in {"config": Config, **known}.items():
        assert set(EXAMINED[name].split()) == set(table.model_fields), name
    inside = get_args(AnyData)[0]
    for name, one_of in (
        ("data", get_args(inside)),
        ("model", (*NAMED_MODELS, ImportedModel)),
    ):
        found = {key for table in one_of for key in table.model_fields}
        assert set(EXAMINED[name].split()) == found, name
    # Those whose loaders have a mean or the most frequent words of all rows.
    pooled = {name for name, one in DATASETS.items() if not one.by_row}
    assert pooled == {"breast_cancer", "stackexchange"}
    config = configured()
    assert promised(config)["epsilon"] is not None
    monkeypatch.setitem(EXAMINED, "run", EXAMINED["run"].replace("dropout ", ""))
    found = promised(config)["sentence"]
    assert found.startswith("no guarantee: run.dropout is not among the settings")
    monkeypatch.setitem(EXAMINED, "data", EXAMINED["data"].replace("unseen ", ""))
    found = promised(config)["sentence"]
    assert found.startswith("no guarantee: data.unseen is not among the settings")
    rows = configured(data={"source": "breast_cancer"})
    found = promised(rows)["sentence"]
    assert found.startswith("no guarantee: rows of breast_cancer depend on those of")


RAW = "no guarantee: the inputs are standardized by means of the clients' rows"


@pytest.mark.parametrize(("name", "epsilon"), [("auto", False), ("none", True)])
def test_a_raw_table_has_a_guarantee_only_as_it_is(
    name, epsilon, tiny, configured, tmp_path
):
    """Columns are standardized unless the configuration says to take them as is."""
    table = tmp_path / "table.csv"
    rows = [f"{row % 7},{row * row % 11},{row % 3},{row % 6}" for row in range(60)]
    table.write_text("\n".join(["a,b,kind,who", *rows]))
    data = {"file": str(table), "target": "kind", "client": "who", "test": 0.25}
    tiny["data"] = data | {"preprocess": name, "partition": "by_key"}
    summary = run_config(configured(), tmp_path / "out")
    sentence = summary["privacy"]["sentence"]
    assert (summary["privacy"]["epsilon"] is not None) == epsilon
    assert sentence.startswith(RAW) != epsilon


def test_spare_clients_are_drawn_and_accounted_for(tiny, write):
    """Nine of ten are drawn where three are planned."""
    nodes = {"partition": "nodes", "clients": 10, "kind": "classes", "classes": 3}
    content = {**tiny, "data": {**nodes, "shape": [4]}, "privacy": TABLE}
    content["federation"] = {"spare": 6}
    found = promised(load(write(content)), 10)["epsilon"]
    run: dict[str, Any] = {"noise": 2.0, "clients": 10, "rounds": 4, "delta": 1e-3}
    drawn, planned = (cohort_cost(cohort=size, **run).epsilon for size in (9, 3))
    assert found == drawn
    assert planned is not None
    assert found > 2 * planned
    content["federation"] = {"spare": 60}
    assert promised(load(write(content)), 10)["epsilon"] == pytest.approx(
        cohort_cost(cohort=10, **run).epsilon
    )


def test_what_is_compressed_is_clipped_again_and_has_a_guarantee(configured):
    config = configured(compress=RAND)
    assert promised(config)["epsilon"] == promised(configured())["epsilon"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"noise": -1.0}, "privacy.noise: -1.0 is not at least 0"),
        ({"clip": 0.0}, "privacy.clip: 0.0 is not above 0"),
        ({"delta": 1.0}, "privacy.delta: 1.0 is not in"),
        ({"delta": 0.0}, "privacy.delta: 0.0 is not in"),
        ({"quantile": 0.5}, "privacy.quantile: goes with adaptive = true"),
        ({"adaptive": True}, "privacy.count_noise: 0.15 is not above half of the"),
        ({"tree": 2}, "privacy.tree: unknown key"),
        ({"buffers": 11}, r"privacy.buffers: 11 is not in \[0, 10\]"),
        ({"buffers": 2, "adaptive": True}, "privacy.buffers: goes without adaptive"),
        (
            {"buffers": 2, "run": {"sampling": "poisson"}},
            "run.sampling: 'poisson' may draw rounds without clients",
        ),
        ({"run": {"separation": 3}}, "run.separation: 3 is not between 1 and 2, the"),
        (
            {"run": {"separation": 2, "epoch": 2}},
            "run.separation: goes without epoch",
        ),
        (
            {"run": {"sampling": "poisson", "epoch": 2}},
            "run.sampling: goes without epoch",
        ),
        ({"run": {"epoch": 3}}, "run.epoch: 3 is not between 1 and 2, the rounds th"),
        (
            {"buffers": 2, "algorithm": {"name": "fedopt", "server": ADAM}},
            "privacy: the wrapped algorithm's server is not linear in the mean update",
        ),
        (
            {"adjacency": "add_or_remove"},
            'privacy.adjacency: "add_or_remove" needs run.sampling = "poisson"',
        ),
        (
            {"run": {"weights": "by_count"}},
            "run.weights: .* needs 'uniform', not 'by_c",
        ),
        ({"run": {"reduction": "median"}}, "run.reduction: 'median' breaks"),
        (
            {"algorithm": {"name": "scaffold"}},
            "privacy: clients of the wrapped .* send more than an",
        ),
        ({"algorithm": {"name": "local_only"}}, "privacy: local_only sends nothing"),
    ],
)
def test_what_makes_no_sense_is_one_line(configured, tmp_path, change, line):
    tables = {key: value for key, value in change.items() if isinstance(value, dict)}
    own = {key: value for key, value in change.items() if key not in tables}
    with pytest.raises(ConfigError, match=line) as error:
        run_config(configured(own, **tables), tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_bad_input_has_exit_code_2(tiny, write, capsys):
    path = write({**tiny, "privacy": {**TABLE, "noise": -1.0}})
    assert main(["run", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_federation_of_nodes_does_not_deal(tiny, write):
    nodes = {"partition": "nodes", "clients": 6, "kind": "classes", "classes": 3}
    content = {**tiny, "data": {**nodes, "shape": [4]}}
    content["privacy"] = {**TABLE, "buffers": 2}
    for key, value in {"epoch": 2, "separation": 2, "sampling": "poisson"}.items():
        content["run"] = {**tiny["run"], key: value}
        with pytest.raises(ConfigError, match=rf"run.{key}: is not for a federation"):
            load(write(content))


def test_a_large_delta_is_warned_of(configured):
    assert not build(configured()).warnings
    (warning,) = build(configured({"delta": 0.2})).warnings
    assert warning.startswith("privacy.delta: 0.2 is not below 1/6")


def test_plans_and_choices_leave_it_out(configured):
    flix = {"name": "flix", "alpha": 0.5, "personal": {"solver": "lbfgs"}}
    flix |= {"steps": 1, "batch_size": "all"}
    config = configured(algorithm=flix, data={"validation": 0.2})
    with pytest.raises(ConfigError, match=r"^privacy: there are no plans"):
        problem(config)
    with pytest.raises(ConfigError, match=r"^privacy: a choice by cross-validation"):
        tune.tune_config(config, [0.5])


def test_what_is_not_installed_is_said(configured, monkeypatch):
    config = configured()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'fedblend\[private\]'"):
        report(config, 6, False)


PAGE = Path(__file__).parents[2] / "docs" / "privacy.md"


def shown(language: str) -> list[str]:
    """The blocks of docs/privacy.md in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.M | re.S)


def test_the_tables_of_the_page_are_taken():
    tables_shown = [tomllib.loads(block)["privacy"] for block in shown("toml")]
    found = [Privacy(**table) for table in tables_shown]
    assert len(found) == 3
    assert {table.noise_from for table in found} == {"system"}


@pytest.mark.slow
def test_the_examples_of_the_page_run(capsys):
    """With fewer rounds, and 40 clients in place of 400."""
    space: dict[str, Any] = {}
    changes = {"400)": "40)", "rounds=40": "rounds=2", "every=40": "every=2"}
    changes |= {"rounds=32": "rounds=8", "every=32": "every=8"}
    changes |= {"cohort=100": "cohort=10", "cohort=50": "cohort=5"}
    changes |= {"Cohort(100": "Cohort(10", "Cohort(50": "Cohort(5"}
    for block in shown("python"):
        for old, new in changes.items():
            block = block.replace(old, new)
        exec(block, space)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(re.match(r"accuracy 0\.\d\d, epsilon [\d.]+ at delta", x) for x in lines)
