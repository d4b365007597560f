# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""From configuration to federation, model, measures: what fits and what does not."""

from typing import Any, get_args

import numpy as np
import pytest

from fedblend.config.build import build
from fedblend.config.config import check
from fedblend.config.tables.algorithm import OPTIONS
from fedblend.data.dataset import DataError
from fedblend.errors import ConfigError
from fedblend.registry import ALGORITHMS


def built(tiny, **changes):
    for path, value in changes.items():
        table, _, key = path.partition("__")
        tiny[table] = {**tiny[table], key: value} if key else value
    return build(check(tiny, "here"))


def _ditto(lam: Any = 0.5, steps: Any = 1):
    """Ditto's table, whose lists are one number for each client."""
    work = {"rate": 0.1, "steps": 2, "batch_size": 4}
    return {"name": "ditto", "lam": lam, **work, "personal": work | {"steps": steps}}


PARTITIONS = [
    {"partition": "iid", "clients": 5},
    {"partition": "contiguous", "clients": 5},
    {"partition": "classes_per_client", "clients": 5, "classes": 3},
    {"partition": "dirichlet", "clients": 5, "concentration": 0.3, "minimum": 4},
    {"partition": "shards", "clients": 5, "per_client": 3},
]


@pytest.mark.parametrize("options", PARTITIONS, ids=lambda o: o["partition"])
def test_partitions(options, tiny):
    made = built(tiny, data={"source": "digits", "test": 0.25, **options})
    assert made.federated_data.clients == 5
    assert set(made.federated_data.splits) == {"train", "test"}


def test_natural_clients_and_official_test(tiny):
    options = {"clients": 7, "first": 3, "test_points": 4}
    data = {"source": "two_sines", "options": options, "partition": "by_key"}
    data["test"] = "official"
    made = built(tiny, data=data, model={"name": "mlp", "hidden": [3]})
    assert made.federated_data.clients == 7
    assert made.federated_data.splits["test"].counts.tolist() == [4] * 7
    assert set(made.spec.measure) == {"loss", "mse", "mae", "r2"}


def test_own_table(tiny, tmp_path):
    rng = np.random.default_rng(0)
    lines = ["who,x1,x2,label"]
    for row in range(40):
        x = rng.normal(size=2)
        lines.append(f"{'ab'[row % 2]},{x[0]},{x[1]},{'yes' if x[0] > 0 else 'no'}")
    (tmp_path / "own.csv").write_text("\n".join(lines))
    data = {"file": str(tmp_path / "own.csv"), "target": "label", "client": "who"}
    made = built(tiny, data={**data, "partition": "by_key"}, model={"name": "logistic"})
    assert made.federated_data.names == ("a", "b")
    assert set(made.spec.measure) == {"loss", "accuracy", "auc", "brier"}


def test_an_empty_client_is_refused(tiny):
    data = {"source": "digits", "partition": "dirichlet", "clients": 400}
    data |= {"concentration": 1e-3, "minimum": 0}
    with pytest.raises(DataError, match=r"has no training rows .* clients are empty"):
        built(tiny, data=data)


def test_a_client_with_one_class_is_a_warning(tiny):
    (warning,) = built(tiny, data__classes=1).warnings
    assert warning.startswith("6 of 6 clients have training rows of one class only")


def test_the_hash_of_the_data_is_that_of_its_values(tiny):
    one = built(tiny).facts
    assert built(tiny, run__seed=3).facts == {**one, "splits": [3]}
    assert built(tiny, run__seed=3, data__split_seed=0).facts == one
    other = built(tiny, data__seed=1).facts
    assert other["sha256"] == one["sha256"]
    assert other["partition_sha256"] != one["partition_sha256"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model__loss": "squared_error"},
         'model.loss: "squared_error" is not for classes targets; it needs regression'),
        ({"model": {"name": "logistic"}},
         "model: logistic: 10 outputs, it has a single score (1 output, 2 classes)"),
        ({"model": {"name": "mlp", "activation": "sine"}},
         "model: mlp: activation: 'sine' is not 'relu', 'tanh', 'sigmoid', "
         "'softplus' or 'gelu'"),
        ({"algorithm__steps": [1, 2]},
         "algorithm.steps: 2 numbers for 6 clients; give one for each, or a single "
         "one"),
        ({"algorithm": _ditto(lam=[0.1, 0.2])},
         "algorithm.lam: 2 numbers for 6 clients; give one for each, or a single one"),
        ({"algorithm": _ditto(steps=[3])},
         "algorithm.personal.steps: 1 numbers for 6 clients; give one for each, or a "
         "single one"),
        ({"measure__metrics": ["mae"]},
         'measure.metrics.0: "mae" is not for classes targets; it needs regression'),
        ({"measure__metrics": ["loss", "recall@11"]},
         'measure.metrics.1: "recall@11": there are only 10 classes'),
        ({"data": {"source": "breast_cancer", "partition": "iid", "clients": 3},
          "model": {"name": "logistic", "loss": "cross_entropy"}},
         'model.loss: "cross_entropy" needs a score for each class, and logistic has a '
         "single one"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(changes, line, tiny):
    with pytest.raises(ConfigError) as caught:
        built(tiny, **changes)
    assert str(caught.value) == line


def test_every_algorithm_says_what_it_is():
    for name, entry in ALGORITHMS.items():
        assert len(entry.summary) > 10, name
        assert "\n" not in entry.summary
        assert get_args(OPTIONS[name].model_fields["name"].annotation) == (name,)
        assert entry.reference or name == "local_only"


def test_training_alone_tunes_its_rate_unless_its_rate_or_rounds_are_given(tiny):
    theory = {"name": "flix", "rate": "theory", "alpha": 0.5, "steps": 1,
              "batch_size": "all"}  # fmt: skip

    tiny["run"] = {"rounds": 4}

    def tunes(measure, **algorithm):
        own = {**tiny, "measure": measure, "model": {"name": "softmax", "l2": 0.1}}
        own["algorithm"] = algorithm or tiny["algorithm"]
        return build(check(own, "here")).local_at is not None

    assert tunes({}) and tunes({"local": 2, "local_rate": "tune"})
    for given in ({"local_rate": "same"}, {"local_rate": 0.3}, {"local": 2}):
        assert not tunes(given)
    assert not tunes({"local": False})
    assert not tunes({}, **theory)
