# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A node's policy: what is refused and why, and which measures are sent."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import example_arguments as examples
from fedblend.config.build import build
from fedblend.config.config import check
from fedblend.config.tables.privacy import ProtectRows
from fedblend.core import Aggregate, Batch, is_ragged
from fedblend.errors import ConfigError
from fedblend.metrics import METRICS
from fedblend.metrics import build as build_metric
from fedblend.registry import ALGORITHMS, OWN_MODEL
from fedblend_federation.client.build import bound_metric
from fedblend_federation.contract import contract_of
from fedblend_federation.ops.credentials import template
from fedblend_federation.policy.limits import too_small_for
from fedblend_federation.policy.policy import (
    Accept,
    Budget,
    Limits,
    Metrics,
    Policy,
    Protect,
    Rows,
    load_policy,
)

EXPERIMENT = {
    "version": 1,
    "name": "asked",
    "data": {"source": "digits", "partition": "iid", "clients": 4},
    "model": {"name": "softmax"},
    "algorithm": {"name": "fedavg", "rate": 0.1, "steps": 1, "batch_size": 4},
    "run": {"rounds": 50},
}
TABLES = {
    "accept": Accept,
    "rows": Rows,
    "limits": Limits,
    "protect": Protect,
    "metrics": Metrics,
    "budget": Budget,
}
COMPRESS = {"compressor": {"name": "rand_k", "k": 4}}
MEASURED = {
    "train": {"shared": {"loss": 0.25, "accuracy": 0.5}},
    "test": {
        "shared": {"loss": 0.123456, "accuracy": 2 / 3, "auc": 0.9},
        "personal": {"loss": float("nan"), "auc": 0.8},
    },
}


def asked(**tables):
    return check({**EXPERIMENT, **tables}, "asked.toml")


def test_the_usual_experiment_is_accepted():
    assert Policy().refusal(asked()) is None
    assert Policy().refusal(asked(compress=COMPRESS)) is None


@pytest.mark.parametrize(
    ("policy", "tables", "line"),
    [
        (Policy(accept=Accept(algorithms=["flix", "apfl"])), {},
         "policy accept.algorithms: algorithm.name is fedavg; allowed: flix, apfl"),
        (Policy(accept=Accept(algorithms=[])), {},
         "policy accept.algorithms: algorithm.name is fedavg; allowed: none"),
        (Policy(protect=Protect(clip=1.0)), {"compress": COMPRESS},
         "policy protect.clip: compress is a table; allowed: no compression of "
         "clipped updates"),
        (Policy(), {"central": {"how": "two_way", "share": 0.1, "batch_size": 4,
                                "upload": True}},
         "policy accept.discloses: central.upload is true; allowed: a model and no "),
        (Policy(), {"run": EXPERIMENT["run"] | {"rounds": 1001}},
         "policy budget.answers: run.rounds is 1001; allowed: at most 1000"),
        (Policy(), {"algorithm": EXPERIMENT["algorithm"] | {"name": "scaffold"}},
         "policy accept.algorithms: algorithm.name is scaffold; allowed: apfl, "),
    ],
)  # fmt: skip
def test_refusals_name_key_value_and_what_is_allowed(policy, tables, line):
    said = policy.refusal(asked(**tables))
    assert said is not None
    assert said.startswith(line)
    assert "\n" not in said


def test_any_allows_everything():
    policy = Policy(accept=Accept(algorithms="any"))
    algorithm = EXPERIMENT["algorithm"] | {"name": "scaffold"}
    assert policy.refusal(asked(algorithm=algorithm)) is None


OWN = {
    "fedopt": {"server": 1.0},
    "reptile": {"server": 1.0},
    "fomaml": {"server": 1.0},
    "fedprox": {"mu": 0.1},
    "svrg": {"refresh": 0.5},
    "finetune": {"finetune": {"rate": 0.1, "steps": 1, "batch_size": 4}},
    "flix": {"alpha": 0.5, "personal": {"solver": "lbfgs"}},
    "flix_local_steps": {"alpha": 0.5, "personal": {"solver": "lbfgs"}},
    "apfl": {"alpha": 0.5},
    "apfl_agnostic": {"alpha": 0.5, "q_rate": 0.1},
    "perfedavg": {"inner_rate": 0.1},
    "pfedme": {"inner_rate": 0.1, "inner_steps": 1, "lam": 1.0},
    "ditto": {"lam": 0.5, "personal": {"rate": 0.1, "steps": 1, "batch_size": 4}},
    "l2gd": {"lam": 0.5, "steps": 2},
    "fedrep": {"head": ["bias"], "head_steps": 1},
    "agnostic": {"q_rate": 0.1},
}
"""Options of algorithms; of others they are examples."""
WEIGHTED = ("scafflix",)
"""Algorithms whose updates have a weight, alpha_i^2/rate: it has L_i of the client only
where ``accept.discloses`` told it already."""


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in ALGORITHMS
        if name != "local_only" and name not in examples.ON_ADAPTERS
    ],
)
def test_what_is_accepted_by_default_sends_models_and_nothing_else(name):
    own = OWN[name] if name in OWN else examples.options(name)
    algorithm = EXPERIMENT["algorithm"] | {"name": name} | own
    config = asked(algorithm=algorithm, measure={"local": False})
    more = set(ALGORITHMS[name].sends) - {"update"}
    bare = Protect(rows=ProtectRows(noise=0.0))
    hidden = ALGORITHMS[name].reads == "gradients" and "lbfgs" not in str(own)
    refusal, own = Policy(protect=bare).refusal(config), more == {OWN_MODEL}
    assert (refusal is None) == (not more)
    assert (str(refusal).startswith("policy accept.discloses: ")) == own
    agreed = Policy(protect=bare, accept=Accept(discloses=["own_models"])).refusal(
        config
    )
    assert (agreed is None) == (not more or own)
    for accepted in ("any", [name]):
        accept = Accept(algorithms=accepted)
        assert Policy(protect=bare, accept=accept).refusal(config) is None
        assert (Policy(accept=accept).refusal(config) is None) == hidden
    join, extra = _sent_besides(build(config))
    if name in WEIGHTED:
        (weight,) = extra
        assert weight.shape == ()
        extra = []
    if own:
        assert join and extra == []
    else:
        assert bool(join + extra) == bool(more)


def _sent_besides(built) -> list[list]:
    """By shape: what a client sends at enrollment, and besides an update."""
    algorithm, shard = built.algorithm, built.federated_data.train.shard(0)
    key = jax.random.key(0)

    def sent():
        params = built.model.init(key)
        join, client = algorithm.enroll(params, shard, key)
        everyone = Aggregate(join, jnp.float32(1), jnp.int32(1))
        down, _ = algorithm.start(params, everyone, None, key)
        told = algorithm.wire.tell(down, algorithm.wire.ask(client, shard))
        return join, algorithm.client(told, client, shard, key)[0].extra

    return [jax.tree.leaves(one, is_leaf=is_ragged) for one in jax.eval_shape(sent)]


def test_measures_are_filtered_and_rounded():
    counts = {"train": 100, "test": 20}
    told = Policy().disclose(MEASURED, counts)
    assert told == {
        "test": {
            "shared": {"loss": 0.123, "accuracy": 0.667},
            "personal": {"loss": 100.0},
        }
    }
    every = Policy(metrics=Metrics(names="any", round_to=1))
    assert every.disclose(MEASURED, counts) == {
        "test": {
            "shared": {"loss": 0.1, "accuracy": 0.7, "auc": 0.9},
            "personal": {"loss": 100.0, "auc": 0.8},
        },
    }


@pytest.mark.parametrize("counts", [{"test": 19}, {}, {"train": 1000}])
def test_few_rows_are_not_measured_for_others(counts):
    assert Policy().disclose(MEASURED, counts) == {}


def test_all_measures_may_be_withheld():
    assert Policy(metrics=Metrics(names=[])).disclose(MEASURED, {"test": 99}) == {}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[accept]\nalgorithms = ['fedavgg']",
         'accept.algorithms.0: "fedavgg" is not an algorithm'),
        ("[accept]\nfewest_row = 1", "accept.fewest_row: unknown key; did you mean"),
        ("[accept]\nsecure = 1", "accept.secure: 1 is not true or false"),
        ("[accept]\nown_models = true", "accept.own_models: unknown key"),
        ("[limits]\nsteps = 9", "limits.steps: unknown key"),
        ("[protect]\nnoise = 1.0", "protect.noise: is in units of clip, which is"),
        ("[protect]\nclip = 0.0", "protect.clip: 0.0 is not above 0"),
        ("[protect]\nclip = nan", "protect.clip: nan is not a finite number"),
        ("[metrics]\nnames = ['f1']", 'metrics.names.0: "f1" is not loss, accuracy'),
        ("[metrics]\nnames = ['rmse']", 'metrics.names.0: "rmse" is not loss, '),
        ("[metrics]\nround_to = 20", "metrics.round_to: 20 is not in [0, 15]"),
        ("[budget]\nepsilon = 1.0", "budget.epsilon: needs protect.noise, which is 0"),
        ("[rows]\nchanges = ['any']", 'rows.changes.0: "any" is not one of '),
        ("[limits]\nmemory_gb = 0.0", "limits.memory_gb: 0.0 is not "),
        ("[metric]", "metric: unknown key; did you mean 'metrics'?"),
    ],
)  # fmt: skip
def test_one_line_for_what_is_wrong_in_a_policy(text, line, tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_policy(path)
    assert str(error.value).startswith(f"{path}: {line}")


def test_an_empty_policy_has_the_defaults(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text("")
    assert load_policy(path) == Policy()
    path.write_text("[protect]\nclip = 2.0\nnoise = 0.5\n")
    assert load_policy(path).protect == Protect(clip=2.0, noise=0.5)


def test_the_documented_policy_is_the_default_and_every_key_is_explained(tmp_path):
    text = (Path(__file__).parents[3] / "docs" / "policy.md").read_text()
    (shown,) = re.findall(r"^```toml\n(.*?)^```", text, re.M | re.S)
    path = tmp_path / "policy.toml"
    path.write_text(shown)
    assert load_policy(path) == Policy()
    for table, section in TABLES.items():
        for key in section.model_fields:
            assert f"`{table}.{key}`" in text


def test_the_policy_that_init_writes_is_the_default_and_shows_every_key(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(template("policy.toml"))
    assert load_policy(path) == Policy()
    for section in TABLES.values():
        for key in section.model_fields:
            shown = rf"^((# )?{key} = |\[\w+\.{key}\])"
            assert re.search(shown, path.read_text(), re.M), key


def test_metrics_that_one_row_can_move_without_bound_stay_on_the_node():
    every = Policy(metrics=Metrics(names="any"))
    measured = dict.fromkeys(METRICS, 0.5) | {"recall@3": 0.25, "unheard": 0.5}
    sent = every.disclose({"test": {"shared": measured}}, {"test": 50})
    kept = {"rmse", "r2", "unheard"}
    assert set(sent["test"]["shared"]) == set(measured) - kept


def test_noise_is_for_means_over_rows_only():
    noisy = Policy(metrics=Metrics(names="any", noise=1.0, bound=10.0, round_to=12))
    names = ("loss", "mse", "mae", "log_loss", "deviance")
    of_rows = dict.fromkeys(names, 10.0)
    of_rows |= dict.fromkeys(("brier", "accuracy", "recall@2"), 1.0)
    measured = {"test": {"shared": dict.fromkeys([*METRICS, *of_rows], 0.5)}}
    sent = [noisy.disclose(measured, {"test": 50})["test"]["shared"] for _ in range(9)]
    assert set(sent[0]) == {*of_rows, "recall"}
    for name, most in of_rows.items():
        spread = np.std([one[name] for one in sent]) * 50 / most
        assert 0.2 < spread < 3  # of 9 draws, outside once in 10,000 times


def test_noise_on_measures_is_in_units_of_what_one_row_changes():
    noisy = Policy(metrics=Metrics(noise=2.0, round_to=12, bound=10.0, names="any"))
    shown = [noisy.disclose(MEASURED, {"test": 50})["test"] for _ in range(300)]
    assert {*shown[0]["personal"]} == {"loss"} and "auc" not in shown[0]["shared"]
    for name, most in (("loss", 10.0), ("accuracy", 1.0)):
        found = [
            one["shared"][name] - MEASURED["test"]["shared"][name] for one in shown
        ]
        assert np.std(found) == pytest.approx(2.0 * most / 50, rel=0.2)


def test_what_a_row_brings_to_a_mean_is_bounded_on_a_node():
    rows = Batch((jnp.array([1.0, 1.0, 1000.0]), jnp.zeros(3)))

    def value(name, most):
        metric = build_metric(name, "regression", lambda p, x: x[0], lambda p, x: x)
        return float(bound_metric(metric, most)(None, rows))

    assert value("mae", 4.0) == 2.0 and value("mse", 4.0) == 2.0
    assert value("rmse", 4.0) == value("rmse", 1e9)  # it stays on the node


def test_a_large_budget_of_answers_allows_more_rounds():
    run = EXPERIMENT["run"] | {"rounds": 1001}
    assert Policy(budget=Budget(answers=100_100)).refusal(asked(run=run)) is None
    for answers in (0, 100_000):
        assert Policy(budget=Budget(answers=answers)).refusal(asked(run=run))


def test_what_is_not_finite_is_as_wrong_as_can_be_and_is_never_left_out():
    rows = Batch((jnp.array([jnp.nan, 1.0, jnp.inf, 1.0]), jnp.ones(4)), jnp.ones(4))
    for name, kind, found in (("mae", "regression", 4.0), ("accuracy", "binary", 0.75)):
        metric = build_metric(name, kind, lambda p, x: x[0], lambda p, x: x)
        assert float(bound_metric(metric, 8.0)(None, rows)) == found
    every = Policy(accept=Accept(fewest_rows=0), metrics=Metrics(names="any"))
    measured = dict.fromkeys(METRICS, float("nan"))
    sent = every.disclose({"test": {"shared": measured}}, {"test": 3})["test"]
    worst = {"loss": 100.0, "accuracy": 0.0, "balanced_accuracy": 0.0, "brier": 1.0}
    assert worst.items() <= sent["shared"].items()
    # A ranking of one class is no number, and is never sent with noise.
    assert {*METRICS} - {*sent["shared"]} == {"auc", "average_precision", "rmse", "r2"}
    assert every.disclose({"test": {"shared": measured}}, {"test": 0}) == {}


def test_second_derivatives_of_fewer_rows_than_parameters_are_refused():
    """They have the span of the rows. The model has 3 x 7 parameters."""
    nodes = {"partition": "nodes", "clients": 4, "kind": "classes", "classes": 3}
    asked = {
        **EXPERIMENT,
        "data": {**nodes, "shape": [6]},
        "algorithm": {
            "name": "hierarchical",
            "rate": 1.0,
            "steps": 1,
            "batch_size": "all",
        },
    }
    contract = contract_of(check(asked, "asked"))

    def line(least, noise, rows):
        hidden = Protect(rows=ProtectRows(noise=noise))
        policy = Policy(accept=Accept(fewest_rows=least), protect=hidden)
        return too_small_for(policy, contract, rows)

    found = line(5, 0.0, 20)
    assert found is not None and "second derivatives" in found and "21" in found
    assert line(5, 0.0, 21) is None and line(0, 0.0, 3) is None
    # Noise covers them; few rows are few.
    assert line(5, 0.2, 20) is None and line(5, 0.2, 4) is not None
