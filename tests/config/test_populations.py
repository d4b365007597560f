# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Populations in a configuration: who is in which, and what is refused."""

import tomllib
from pathlib import Path

import numpy as np
import pytest

from fedblend.config.build import build
from fedblend.config.config import check, dump
from fedblend.data.dataset import DataError
from fedblend.errors import ConfigError
from fedblend.simulation.sampling import Strata
from fedblend.simulation.simulate import set_up

TWO = {
    "low": {"clients": "[0-3]", "weight": 0.25, "cohort": 2},
    "high": {"clients": ["[4-8]", "9"], "weight": 0.75},
}


def config(populations, **run):
    return check(
        {
            "version": 1,
            "name": "two",
            "data": {"source": "digits", "partition": "iid", "clients": 10},
            "model": {"name": "softmax"},
            "algorithm": {"name": "fedavg", "rate": 0.1, "steps": 1, "batch_size": 8},
            "populations": populations,
            "run": {"rounds": 10, **run},
        },
        "test",
    )


def test_populations_are_strata_and_survive_being_written():
    one = config(TWO)
    assert check(tomllib.loads(dump(one)), "again") == one
    built = build(one)
    strata = built.spec.cohort.size  # pyright: ignore
    assert isinstance(strata, Strata)
    assert np.array_equal(strata.of, [0] * 4 + [1] * 6)
    assert (strata.weights, strata.sizes) == ([0.25, 0.75], [2, 6])
    set_up(built.spec)


def changed(name, **values):
    return {**TWO, name: {**TWO[name], **values}}


@pytest.mark.parametrize(
    ("populations", "run", "said"),
    [
        (changed("low", weight=0.5), {}, "populations: the weights sum to 1.25"),
        (TWO, {"cohort": 3}, "run.cohort: 3 goes without populations"),
        (changed("low", weight=0.0), {}, "populations.low.weight: 0.0"),
        (changed("low", clients=[]), {}, "populations.low.clients"),
        (changed("low", size=3), {}, "populations.low.size: unknown key"),
        ({}, {}, "populations"),
    ],
)
def test_bad_tables_are_refused_in_one_line(populations, run, said):
    with pytest.raises(ConfigError, match=said) as caught:
        config(populations, **run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("populations", "said"),
    [
        (changed("low", clients="x*"), "populations.low.clients: match none of the 10"),
        (changed("low", clients="[0-4]"), "client '4' is in low and in high"),
        (changed("low", clients="[0-2]"), "client '3' is in none of low, high"),
        (changed("low", cohort=5), "populations.low.cohort: 5 is more than its 4"),
    ],
)
def test_clients_that_do_not_fit_are_refused_in_one_line(populations, said):
    with pytest.raises((ConfigError, DataError), match=said) as caught:
        build(config(populations))
    assert "\n" not in str(caught.value)


def test_the_documents_fragment_is_valid():
    text = (Path(__file__).parents[2] / "docs" / "mixed.md").read_text(encoding="utf-8")
    (block,) = [one for one in text.split("```") if "[populations." in one]
    tables = tomllib.loads(block.removeprefix("toml\n"))["populations"]
    assert set(config(tables).populations or ()) == {"phones", "speakers"}
