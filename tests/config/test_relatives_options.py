# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""L2GD, partial methods and MAPPER in a configuration: what is refused, and words."""

import jax
import pytest

from fedblend.config.build import build
from fedblend.config.config import check, fill
from fedblend.errors import ConfigError

L2GD = {"name": "l2gd", "lam": 0.5}
FEDREP = {"name": "fedrep", "head": ["bias"], "head_steps": 2}
RAND_K = {"compressor": {"name": "rand_k", "k": 11}}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({**L2GD, "steps": 1}, "steps: 1 is not a mean number of steps in a round, "
         "above 1, the same for all clients"),
        ({**L2GD, "rate": None, "optimizer": {"name": "adam", "rate": 0.1}},
         "optimizer: an optimizer is not a learning rate (a number)"),
        ({**L2GD, "schedule": {"name": "cosine", "unit": "step", "over": 9}},
         "schedule.unit: 'step' is not 'round'"),
        ({"name": "mapper", "grid": 1},
         "grid: 1 is not a number of weights, 2 or more, nor 0, which keeps alpha"),
        ({"name": "mapper", "held_out": 0.0},
         "held_out: 0.0 is not in (0, 1), which a grid needs; grid=0 needs none"),
        ({**FEDREP, "head": ["bias", "last"]}, 'head: "last" is no part of the model, '
         "whose parameters are weight, bias"),
        ({"name": "apfl", "alpha": 0.5, "mix": ["last"]}, 'mix: "last" is no part of '
         "the model, whose parameters are weight, bias"),
        ({"name": "fedbn", "normalization": "normalization"}, "normalization: the "
         "model has no normalization; its parameters are weight, bias"),
        ({"name": "fedper", "head": "tail"}, "head: \"tail\" is not one of 'head', "
         "'body', 'biases', 'normalization' or a list"),
        ({"name": "partial", "personal": "head", "order": "together",
          "personal_steps": 2}, "personal_steps: 2 is not left out, as order = "
         '"together" needs'),
    ],
)  # fmt: skip
def test_what_makes_no_sense(options, line, tiny):
    given = {**tiny["algorithm"], **options}
    tiny["algorithm"] = {k: v for k, v in given.items() if v is not None}
    with pytest.raises(ConfigError) as caught:
        build(check(tiny, "here"))
    assert str(caught.value).removeprefix("here: ") == f"algorithm.{line}"


def test_no_more_is_compressed_than_travels(tiny):
    tiny["algorithm"] |= {**FEDREP, "head": ["weight"]}
    tiny["compress"] = {"how": "plain", **RAND_K}
    with pytest.raises(ConfigError, match="k: 11 is more than the model's 10 param"):
        build(check(tiny, "here"))
    tiny["algorithm"] |= FEDREP
    assert build(check(tiny, "here")).algorithm.needs.weights == "uniform"


def test_the_rate_of_l2gd_may_follow_a_schedule(tiny):
    schedule = {"name": "exponential", "unit": "round", "decay": 0.5}
    tiny["algorithm"] |= {**L2GD, "schedule": schedule}
    assert build(check(tiny, "here")).algorithm.needs.everyone


def test_an_ensemble_has_as_many_models_as_the_configuration_says(tiny):
    tiny["algorithm"] |= {"name": "fedem"}
    for stated, found in (({}, 3), ({"ensemble": 2}, 2)):
        tiny["model"] |= stated
        params = build(check(tiny, "here")).model.init(jax.random.key(0))
        assert params.log_weights.shape == (found,)
    tiny["model"] |= {"ensemble": 0}
    with pytest.raises(ConfigError, match=r"model\.ensemble: "):
        check(tiny, "here")


def test_products_are_those_that_the_configuration_says(tiny):
    plain = build(check(tiny, "here"))
    tiny["model"] |= {"products": "bfloat16"}
    low = build(check(tiny, "here"))
    params = jax.tree.map(lambda leaf: leaf + 0.3, plain.model.init(jax.random.key(0)))
    row = 0.1 * jax.numpy.ones((1, *plain.task.shape))
    exact, found = (one.model.apply(params, row) for one in (plain, low))
    assert found.dtype == exact.dtype
    assert 0 < abs(found - exact).max() < 0.01 * abs(exact).max()
    tiny["model"] |= {"products": "half"}
    with pytest.raises(ConfigError, match=r"model\.products: "):
        check(tiny, "here")


@pytest.mark.parametrize(
    ("name", "stays"),
    [
        ("fedper", {"last"}),
        ("lg_fedavg", {"hidden", "norm"}),
        ("fedbn", {"norm"}),
        ("bitfit", {"hidden", "norm", "last"}),
    ],
)
def test_a_word_stands_for_a_part_of_any_model(name, stays, tiny):
    """The default of each, for a network of the package; by shapes alone."""
    tiny["algorithm"] |= {"name": name}
    tiny["model"] = {"name": "mlp", "hidden": [3], "norm": True}
    built = build(check(fill(tiny), "here"))
    shard, key = built.federated_data.train.shard(0), jax.random.key(0)
    params = jax.eval_shape(built.model.init, key)
    _, state = jax.eval_shape(built.algorithm.enroll, params, shard, key)
    found = jax.tree_util.tree_leaves_with_path(state.personal)
    assert {path[0].name for path, _ in found} == stays  # pyright: ignore
