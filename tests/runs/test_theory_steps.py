# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``rate = "theory"`` of a configuration: every round of every solver keeps its bound.

The objective is evaluated in NumPy, apart from what is run.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedblend.config.build import build
from fedblend.config.config import check
from fedblend.config.theory_rates import rates
from fedblend.errors import ConfigError
from fedblend.simulation.simulate import set_up
from fedblend.theory import bounds, mixture
from fedblend.theory.constants import stack_models
from fedblend.trees import precision
from fedblend_reproductions.flix import theory as paper
from planned import CLIENTS, DIM, FLIX, ByHand, K, changed

TOP = f"{{name='top_k', k={K}}}"
WAYS = {
    "accelerated": ("algorithm.server={name='nesterov'}",),
    "ef21": ("compress.how=ef21", f"compress.compressor={TOP}"),
    "perm_k": ("compress.how=perm_k",),
    "downlink": (f"compress.down={TOP}",),
}
ROUNDS, ALPHA, SEEDS = 30, 0.5, 8


@pytest.fixture(scope="module")
def by_hand() -> ByHand:
    return ByHand()


QUICK = ("accelerated", "downlink")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in WAYS],
)
def test_every_round_keeps_its_bound(name, by_hand):
    config = check(changed(FLIX, *WAYS[name]), "here")
    random = name == "perm_k"
    seeds = range(SEEDS if random else 1)
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    with precision("float64"):
        built = build(config)
        assert built.smoothness is not None
        found = rates(config, built.smoothness, DIM)
        run = set_up(
            dataclasses.replace(
                built.spec, key=keys, measure={}, rounds=ROUNDS, every=1
            )
        )
        iterates = dict((run.round, stack_models(run.shared)) for _ in run)
    known = mixture(ALPHA, built.smoothness, by_hand.x)
    if name != "downlink":
        np.testing.assert_allclose(iterates[0][0], known.average, atol=1e-7)
    assert (found.momentum > 0.5) == (name == "accelerated")
    least = by_hand.least(ALPHA)
    bound = {
        "accelerated": bounds.accelerated,
        "ef21": lambda known: bounds.ef21(known, K / DIM),
        "perm_k": paper.perm_k,
        "downlink": lambda known: paper.downlink(known, K / DIM),
    }[name]
    promise = bound(known).value(np.arange(ROUNDS + 1))
    gaps = [
        np.mean([by_hand.value(ALPHA, x) for x in iterates[k]]) - least
        for k in range(ROUNDS + 1)
    ]
    assert (np.array(gaps) <= promise + 1e-9).all()
    assert gaps[-1] < 0.9 * gaps[1]


REFUSED = {
    (*WAYS["accelerated"], *WAYS["ef21"]): "no step for momentum with compression",
    (*WAYS["ef21"], *WAYS["downlink"]): "no step for compression both ways",
    ("algorithm.server={name='nesterov', rate=0.5}",): "algorithm.server: is given",
    ("algorithm.server={name='nesterov', momentum=0.5}",): "algorithm.server: is given",
    ("algorithm.server={name='nesterov'}", "model.l2=0.0"): "mu_alpha is 0; model.l2",
    ("algorithm.server={name='nesterov'}", "algorithm.rate=0.1"): (
        'algorithm.server.momentum: "theory" goes with server and rate = "theory"'
    ),
}


@pytest.mark.parametrize("settings", REFUSED, ids=" ".join)
def test_what_theory_has_no_step_for_is_one_line(settings):
    with pytest.raises(ConfigError) as raised, precision("float64"):
        config = check(changed(FLIX, *settings), "here")
        build(config)
    assert REFUSED[settings] in str(raised.value)
    assert "\n" not in str(raised.value)


def test_momentum_of_theory_is_for_the_server_only():
    local = "algorithm.optimizer={name='nesterov'}"
    content = changed(FLIX, local)
    del content["algorithm"]["rate"]
    with pytest.raises(ConfigError, match=r"optimizer\.momentum: \"theory\" goes with"):
        check(content, "here")
    content = changed(content, "algorithm.optimizer={name='nesterov', momentum=0.5}")
    assert check(content, "here").algorithm.work()


def test_flat_problems_take_the_shorter_steps():
    flat = changed(FLIX, "model.l2=0.0", "compress.how=perm_k")
    with precision("float64"):
        built = build(check(flat, "here"))
    assert built.smoothness is not None
    together, _, _ = rates(check(flat, "here"), built.smoothness, DIM)
    parts = ALPHA**2 * built.smoothness.smooth
    assert together == pytest.approx(1 / (4 * parts.max()))
    assert len(parts) == CLIENTS


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "diana"])
def test_one_mask_is_one_client_that_compresses_the_mean(how, by_hand):
    """Its step by theory reaches the optimum: the error vanishes with the mean."""
    settings = (
        f"compress.how={how}",
        f"compress.compressor={{name='rand_k', k={K}}}",
        "compress.masks=one",
        "run.rounds=1500",
        "run.every=1500",
    )
    config = check(changed(FLIX, *settings), "here")
    with precision("float64"):
        built = build(config)
        assert built.smoothness is not None
        found = rates(config, built.smoothness, DIM).together
        run = set_up(dataclasses.replace(built.spec, measure={})).complete()
    top, omega = ALPHA**2 * built.smoothness.smooth.mean(), DIM / K - 1
    if how == "plain":
        assert found == pytest.approx(1 / (top * (1 + 2 * omega)))
    else:
        assert 1 / (top * (1 + 5 * omega)) <= found <= 1 / (top * (1 + omega))
    (x,) = stack_models(jax.tree.map(lambda leaf: leaf[None], run.shared))
    gap = by_hand.value(ALPHA, x) - by_hand.least(ALPHA)
    print(how, gap)
    assert gap < 1e-8
