# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[compress]``: what it builds, and what it refuses in one line."""

import pytest

from fedblend.config.build import build
from fedblend.config.config import dump, load
from fedblend.errors import ConfigError
from fedblend.transforms.compressed import Ef21Client
from fedblend.transforms.diana import DianaClient
from fedblend.transforms.downlink import DownlinkClient

RAND, TOP = {"name": "rand_k", "k": 5}, {"name": "top_k", "k": [1, 2, 3, 4, 5, 650]}


def built(tiny, write, **table):
    return build(load(write({**tiny, "compress": table})))


def state_of(made):
    import jax

    params = jax.eval_shape(made.model.init, made.key)
    shard = made.federated_data.train.shard(0)
    return jax.eval_shape(made.algorithm.enroll, params, shard, made.key)[1]


def test_each_way_builds_its_wrapper(tiny, write):
    assert state_of(built(tiny, write, compressor=RAND)) == ()
    diana = built(tiny, write, how="diana", compressor=RAND, start="first")
    assert isinstance(state_of(diana), DianaClient)
    assert isinstance(
        state_of(built(tiny, write, how="ef21", compressor=TOP)), Ef21Client
    )
    one = built(tiny, write, how="diana", compressor=RAND, masks="one")
    assert isinstance(state_of(one), DianaClient)
    assert built(tiny, write, compressor={"name": "natural"}).algorithm
    both = built(tiny, write, how="perm_k", down={"name": "top_k", "k": 5})
    assert isinstance(state_of(both), DownlinkClient)
    assert both.algorithm.needs.cohort == 6
    downlink = built(tiny, write, down={"name": "top_k", "k": 5})
    assert isinstance(state_of(downlink), DownlinkClient)
    assert downlink.algorithm.needs.cohort is None


def test_long_runs_start_memories_at_the_first_gradient(tiny, write):
    """650/5 = omega + 1 is 130, and a client answers in every round."""

    def is_new(rounds, **more):
        tiny["run"] = {"rounds": rounds, **more}
        made = built(tiny, write, how="diana", compressor=RAND)
        return state_of(made).new != ()

    assert is_new(910)
    assert not is_new(909)
    assert not is_new(910, cohort=5)
    assert is_new(1092, cohort=5)
    zero = built(tiny, write, how="diana", compressor=RAND, start="zero")
    assert state_of(zero).new == ()


def test_it_survives_being_written(tiny, write):
    table = {"how": "diana", "compressor": RAND, "rate": 0.01}
    config = load(write({**tiny, "compress": table}))
    assert load(write(dump(config), "again.toml")) == config
    assert config.compress is not None
    assert config.compress.rate == 0.01
    assert "compress" not in dump(load(write(tiny)))


@pytest.mark.parametrize(
    ("table", "line"),
    [
        (
            {"compressor": {"name": "rand_k", "k": 651}},
            "651 is more than .* 650",
        ),
        ({"compressor": {"name": "rand_k", "k": 0}}, r"compressor.*k: 0"),
        ({"compressor": {"name": "top_k", "k": [1, 2]}}, "2 numbers for 6 clients"),
        ({"how": "diana", "compressor": TOP}, '"diana" needs an unbiased .* not top_k'),
        ({"how": "ef21", "compressor": RAND}, "needs one that contracts"),
        (
            {"how": "ef21", "compressor": {"name": "dithering", "levels": 1}},
            r"compress.compressor: dithering\(1\) does not contract 650 parameters",
        ),
        ({"compressor": RAND, "rate": 0.5}, 'rate: goes with how = "diana", not'),
        ({"how": "diana", "compressor": RAND, "rate": 2.0}, r"2.0 is not in \(0, 1\]"),
        (
            {"how": "diana", "compressor": RAND, "rate": 0.5},
            r"compress\.rate: 0\.5 is not in \(0, 1/\(omega \+ 1\)\] = \(0, 0\.0",
        ),
        ({"compressor": {"name": "dithering", "levels": 0}}, r"levels: 0"),
        ({"how": "other", "compressor": RAND}, r"compress\.how: .*other"),
        ({"how": "ef21"}, r"compress\.compressor: is missing"),
        ({}, r"compress\.compressor: is missing"),
        ({"how": "perm_k", "compressor": RAND}, "perm_k.* has no other compressor"),
        (
            {"how": "ef21", "compressor": TOP, "masks": "one"},
            r'compress\.masks: "one" goes with how = "plain" or "diana", not',
        ),
        (
            {"compressor": {"name": "natural"}, "masks": "one"},
            r'compress\.masks: "one" needs rand_k with one k',
        ),
        (
            {"compressor": {**RAND, "places": "sent"}, "masks": "one"},
            r'compress\.masks: "one" needs rand_k .* not "sent"',
        ),
        (
            {"down": {"name": "top_k", "k": 5}, "masks": "one"},
            r"compress\.compressor: is missing",
        ),
        (
            {"down": RAND},
            r"compress\.down: needs a compressor that contracts",
        ),
        ({"down": {"name": "top_k", "k": 651}}, r"compress\.down\.k: 651 is more"),
        (
            {"down": {"name": "dithering", "levels": 1}},
            r"compress\.down: dithering\(1\) does not contract 650",
        ),
    ],
)
def test_what_does_not_go_together_is_one_line(tiny, write, table, line):
    with pytest.raises(ConfigError, match=line) as error:
        built(tiny, write, **table)
    assert "\n" not in str(error.value)
    assert "compress" in str(error.value)


def test_training_alone_has_nothing_to_compress(tiny, write):
    tiny["algorithm"]["name"] = "local_only"
    with pytest.raises(ConfigError, match="local_only sends nothing"):
        built(tiny, write, compressor=RAND)


def test_what_may_add_up_is_warned_of_once(tiny, write):
    """Scaffnew carries noise of answers on, L2GD errors of broadcasts; EF21 under
    compressed broadcasts does both."""
    top = {"name": "top_k", "k": 5}
    tiny["algorithm"] |= {"name": "scaffnew"}
    tiny["run"].pop("cohort")
    (line,) = built(tiny, write, how="diana", compressor=RAND, down=top).warnings
    assert line.startswith("compress.how: clients carry") and "locodl" in line
    assert not built(tiny, write, how="ef21", compressor=TOP).warnings
    (line,) = built(tiny, write, how="ef21", compressor=TOP, down=top).warnings
    assert line.startswith("compress.down: clients carry")
    tiny["algorithm"] |= {"name": "l2gd", "lam": 0.5}
    up, down = built(tiny, write, how="perm_k", down=top).warnings
    assert up.startswith("compress.how: ") and down.startswith("compress.down: ")
