# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Byzantine clients, against NumPy; nobody attacks where nobody is an attacker."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend import compress
from fedblend.trees import precision
from fedblend_reproductions.byzantine import FACTORS, byzantine

CLIENTS = len(problems.COUNTS)
NOBODY = np.zeros(CLIENTS, bool)
TWO = np.isin(np.arange(CLIENTS), (1, 4))
RATE, ROUNDS = 0.2, 6
full: dict[str, Any] = {"steps": 1, "batch_size": None}


def descent(problem):
    return fb.fedavg(problem.loss, fb.Work(RATE, **full))


def run(problem, algorithm, **settings):
    return fb.simulate(
        algorithm,
        problem.params,
        problem.federated_data,
        jax.random.key(0),
        **{"rounds": ROUNDS, "chunk": 3, "every": ROUNDS, **settings},
    ).complete()


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(
    ("attack", "reduction"),
    [
        ("noise", "mean"),
        ("inner_product", "median"),
        *(pytest.param(name, "mean", marks=pytest.mark.slow) for name in FACTORS),
    ],
)
def test_without_attackers_it_is_the_same_run_to_the_bit(attack, reduction):
    on = problems.classes()
    plain = fb.apfl(on.loss, fb.Work(RATE, steps=2, batch_size=2), alpha=0.5)
    settings: dict[str, Any] = {"reduction": reduction, "cohort": 5}
    honest = run(on, plain, **settings)
    wrapped = run(on, byzantine(plain, attack, attackers=NOBODY), **settings)
    same(wrapped.shared, honest.shared)
    for client in range(CLIENTS):
        same(wrapped.personal(client), honest.personal(client))
    assert wrapped.message_bits == honest.message_bits


def by_hand(problem, attack, factor, reduce):
    """Rounds of gradient descent with two attackers, in float64."""
    matrices, vectors = problems.client_matrices(problem)
    x = last = np.linspace(0, 0.5, 3)
    for _ in range(ROUNDS):
        steps = -RATE * (matrices @ x - vectors)
        steps[TWO] = {
            "negate": -factor * steps[TWO],
            "scale": factor * steps[TWO],
            "inner_product": -factor * np.stack([x - last] * 2),
        }[attack]
        x, last = x + reduce(steps), x
    return x


REDUCE = {
    "mean": lambda steps: steps.mean(axis=0),
    "median": lambda steps: np.median(steps, axis=0),
    "trimmed_mean": lambda steps: np.sort(steps, axis=0)[1:-1].mean(axis=0),
}


@pytest.mark.parametrize(
    ("attack", "factor", "reduction"),
    [
        ("negate", 1.5, "mean"),
        ("scale", 3.0, "median"),
        pytest.param("inner_product", 0.7, "mean", marks=pytest.mark.slow),
        ("inner_product", 0.7, "trimmed_mean"),
    ],
)
def test_attacks_are_numpys(attack, factor, reduction):
    with precision("float64"):
        on = problems.quadratics()
        attacked = byzantine(descent(on), attack, attackers=TWO, factor=factor)
        middle = fb.trimmed_mean(0.2) if reduction == "trimmed_mean" else reduction
        done = run(on, attacked, weights="uniform", reduction=middle)
        expected = by_hand(on, attack, factor, REDUCE[reduction])
        # Six float64 steps on numbers of size 1; another formula is off by 1e-2.
        np.testing.assert_allclose(done.shared, expected, rtol=1e-10, atol=0)


@pytest.mark.slow
def test_noise_has_the_length_of_the_update_and_is_new_for_everybody():
    on = problems.means(dim=400)
    attacked = byzantine(descent(on), "noise", attackers=TWO, factor=3.0)
    down, _ = attacked.start(on.params, fb.Aggregate((), 1.0, 7), None, KEY)  # pyright: ignore

    def sent(algorithm, client, key):
        shard = on.federated_data.train.shard(client)
        step = jax.jit(lambda key: algorithm.client(down, (), shard, key)[0].delta)
        return step(jax.random.key(key))

    draws = [(client, key) for client in (1, 4) for key in (0, 1)]
    vectors = [np.asarray(sent(attacked, *draw)) for draw in draws]
    for (client, key), vector in zip(draws, vectors, strict=True):
        honest = sent(descent(on), client, key)
        # 400 squared Gaussians: a standard deviation of 7 %, of norms half of it.
        ratio = np.linalg.norm(vector) / np.linalg.norm(honest)
        assert ratio == pytest.approx(3.0, rel=0.15)
        assert abs(np.corrcoef(vector, honest)[0, 1]) < 0.2  # four of 1/sqrt(400)
    # Directions of different keys are as good as orthogonal.
    assert abs(np.corrcoef(vectors[0], vectors[1])[0, 1]) < 0.2
    same(sent(attacked, 0, 0), sent(descent(on), 0, 0))


KEY = jax.random.key(0)


def test_all_that_travels_is_changed_and_no_state():
    """SCAFFOLD's change of a control variate, FLIX's local model at enrollment."""
    on = problems.quadratics()
    plain = fb.scaffold(on.loss, fb.Work(RATE, **full))
    attacked = byzantine(plain, "negate", attackers=TWO, factor=2.0)
    one, other = (run(on, of, rounds=1) for of in (plain, attacked))
    same(one.client(1), other.client(1))
    both = [plain.start(on.params, fb.Aggregate((), 1.0, 7), None, KEY)[0]] * 2  # pyright: ignore
    shard = on.federated_data.train.shard(1)
    state = plain.enroll(on.params, shard, KEY)[1]
    honest, lie = (
        of.client(down, state, shard, KEY)[0]
        for of, down in zip((plain, attacked), both, strict=True)
    )
    same(jax.tree.map(lambda leaf: -2 * leaf, honest.extra), lie.extra)
    assert jax.tree.leaves(lie.extra)
    local = fb.solvers.gradient_descent(on.loss, 5.0, most=3)
    flix = fb.flix(on.loss, lambda loss: descent(on), alpha=0.5, local=local)
    attacked = byzantine(flix, "scale", attackers=TWO)
    ((_, (sent, weight)), _) = flix.enroll(on.params, shard, KEY)
    ((_, (more, heavier)), _) = attacked.enroll(on.params, shard, KEY)
    same(10 * sent, more)
    same(10 * weight, heavier)


def test_a_server_that_clips_bounds_attackers_and_one_that_trusts_does_not():
    on = problems.quadratics()
    bounded, trusting = (
        fb.transforms.clip(
            byzantine(descent(on), "scale", attackers=TWO, factor=1e6),
            0.1,
        ),
        byzantine(
            fb.transforms.clip(descent(on), 0.1), "scale", attackers=TWO, factor=1e6
        ),
    )
    moved = [
        float(jnp.linalg.norm(run(on, of, rounds=1).shared - on.params))
        for of in (bounded, trusting)
    ]
    assert moved[0] <= 0.1001 and moved[1] > 1000


def test_attackers_and_factors_of_a_sweep_are_one_program():
    on = problems.quadratics()
    over = {"attackers": np.stack([NOBODY, TWO, TWO]), "factor": np.array([1.0, 1, 5])}

    def build(each):
        return byzantine(descent(on), "negate", **each)

    swept = run(on, build, over=over)
    for replica, (attackers, factor) in enumerate([(NOBODY, 1), (TWO, 1), (TWO, 5)]):
        lone = byzantine(
            descent(on), "negate", attackers=attackers, factor=float(factor)
        )
        # Mapped programs may round otherwise: float32, on numbers of size 1.
        np.testing.assert_allclose(
            swept.shared[replica], run(on, lone).shared, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("attack", ["scale", "inner_product"])
@pytest.mark.parametrize(
    "encoder",
    [
        fb.transforms.compressed,
        pytest.param(fb.transforms.diana, marks=pytest.mark.slow),
    ],
)
def test_encoders_go_around(encoder, attack):
    on = problems.quadratics()
    attacked = byzantine(descent(on), attack, attackers=TWO)
    encoded = encoder(attacked, compress.natural())
    usual = (encoded, on.params, on.federated_data, KEY)
    assert fb.simulate(*usual, rounds=1).message_bits.up == 8 * 4


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"attack": "flip"}, "^byzantine: attack: 'flip' is not 'negate', 'scale'"),
        (
            {"attackers": [1, 4]},
            r"^byzantine: attackers: \[1, 4\] is not an array over",
        ),
        ({"attackers": True}, "^byzantine: attackers: True is not an array over"),
        ({"factor": np.nan}, "^byzantine: factor: nan is not a finite number"),
        ({"attackers": [True]}, "^byzantine: attackers: an array of 1 is not"),
    ],
)
def test_what_is_no_attack_is_refused_in_one_line(given, line):
    on = problems.quadratics()
    good = {"attack": "negate", "attackers": TWO}
    with pytest.raises(ValueError, match=line):
        run(on, byzantine(descent(on), **{**good, **given}))


def test_what_cannot_be_attacked_is_refused():
    on = problems.quadratics()
    with pytest.raises(ValueError, match=r"^byzantine: .* are encoded already"):
        sparse = fb.transforms.compressed(descent(on), compress.rand_k(1))
        run(on, byzantine(sparse, "negate", attackers=TWO))
    alone = fb.local_only(on.loss, fb.Work(RATE, **full))
    for attack in ("negate", "inner_product"):
        with pytest.raises(ValueError, match=r"^byzantine: .* send no update"):
            run(on, byzantine(alone, attack, attackers=TWO))
