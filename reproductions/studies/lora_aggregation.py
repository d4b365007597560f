# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Mean of products against product of means: the figures of docs/adapters.md.

A network is trained on digits, and adapters of rank 4 of it on digits that are turned
by a quarter, with 10 clients that all take part in every round. Three tables:

- gap: what a server that averages the factors of LoRA misses of the clients' mean
  change, by clients, local steps and rounds; and what that costs in loss.
- methods: the loss after as many rounds and steps, of FedAvg on both factors, the same
  with an exact mean (the missed part is added to the base: as many bits as the model),
  FFA-LoRA and RoLoRA.
- noise: how much of the change of a round is noise of differential privacy.

python lora_aggregation.py            about three minutes on two cores
python lora_aggregation.py --small    a few seconds, other figures
"""

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedblend as fb
from fedblend import trees

KEY = jax.random.key(0)
CLIENTS, RANK, BATCH = 10, 4, 32
RATE, RATES = 0.1, (0.03, 0.1, 0.3)
"""Of FedAvg where gaps are measured, and those that each method is tried with."""
PATHS = ("hidden/0/weight", "hidden/1/weight")
MODEL = fb.models.mlp(64, 10, hidden=(64, 64))
PLAIN = fb.losses.cross_entropy(MODEL.apply)
SPREADS = {"alike (iid)": None, "Dirichlet 1": 1.0, "Dirichlet 0.1": 0.1}
SEEDS = (0, 1, 2)


class Task(NamedTuple):
    """A base, the rows of all clients, and which of them are whose."""

    base: Any
    rows: tuple[jax.Array, jax.Array]
    starts: jax.Array
    counts: jax.Array


def task(spread: float | None, seed: int) -> Task:
    """The base is trained on half of the digits, the clients have the other half."""
    inputs, labels = (np.asarray(one) for one in fb.datasets.load("digits").rows)
    order = np.random.default_rng(seed).permutation(len(labels))
    first, second = np.array_split(order, 2)
    images = (inputs / inputs.max()).astype(np.float32).reshape(-1, 8, 8)
    base = trained_base(images[first].reshape(-1, 64), labels[first])
    rows = np.rot90(images[second], axes=(1, 2)).reshape(-1, 64), labels[second]
    if spread is None:
        parts = fb.partition.iid(len(second), CLIENTS, seed=seed)
    else:
        chosen = {"concentration": spread, "minimum": BATCH, "seed": seed}
        parts = fb.partition.dirichlet(rows[1], CLIENTS, **chosen)
    train = fb.federate(rows, parts).train
    examples = jax.tree.map(jnp.asarray, train.examples)
    numbers = (jnp.asarray(one, jnp.int32) for one in (train.starts, train.counts))
    return Task(base, examples, *numbers)


@partial(jax.jit, static_argnames="steps")
def trained_base(inputs, labels, steps: int = 60):
    rule, params = optax.adamw(3e-3, weight_decay=0.1), MODEL.init(jax.random.key(0))

    def step(carry, _):
        params, state = carry
        slope = jax.grad(lambda here: PLAIN(here, (inputs, labels)).mean())(params)
        updates, state = rule.update(slope, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, rule.init(params)), length=steps)[0][0]


def loss_of(base):
    """The loss of adapters, and of a part of the change that has no low rank."""

    def loss(params, rows):
        def own(path, leaf):
            if path not in PATHS:
                return leaf
            adapter, rest = params["adapter"][path], params["rest"][path]
            return leaf + jax.lax.stop_gradient(rest) + adapter["b"] @ adapter["a"]

        return PLAIN(trees.map_with_path(own, base), rows)

    return loss


def start(base, seed: int):
    """The adapters of ``fb.adapt.adapt``, and nothing besides."""
    rows = jax.ShapeDtypeStruct((2, 64), jnp.float32)
    model = fb.adapt.adapt(
        MODEL, base, how=fb.adapt.lora(RANK), inputs=rows, where=list(PATHS)
    )
    shapes = {path: (one["b"], one["a"]) for path, one in model.init(KEY).items()}
    rest = {path: jnp.zeros((len(b), a.shape[1])) for path, (b, a) in shapes.items()}
    return {"adapter": model.init(jax.random.key(seed)), "rest": rest}


def product(params) -> jax.Array:
    """The change of all weights as one vector."""
    own = params["adapter"]
    parts = [own[path]["b"] @ own[path]["a"] + params["rest"][path] for path in PATHS]
    return jnp.concatenate([one.ravel() for one in parts])


def mean_of(stacked):
    """The mean over clients."""
    return jax.tree.map(lambda leaf: leaf.mean(axis=0), stacked)


class Round(NamedTuple):
    """Parameters before a round, all clients' after it [clients, ...], and the mean."""

    before: Any
    reached: Any
    after: Any


@partial(jax.jit, static_argnames=("name", "steps"))
def a_round(name: str, steps: int, on: Task, params, number, seed, rate, clip, noise):
    """One round of a method, in which everybody takes part."""
    work = fb.Work(rate, steps=steps, batch_size=BATCH)
    build = getattr(fb.algorithms, "fedavg" if name == "exact" else name)
    algorithm = build(loss_of(on.base), work)
    key = jax.random.fold_in(jax.random.key(seed), number)

    def of_client(client, start, count):
        shard = fb.Shard(on.rows, start, count, client, capacity=len(on.rows[1]))
        own = jax.random.fold_in(key, client)
        _, state = algorithm.enroll(params, shard, own)
        down = algorithm.wire.tell(fb.Down(params, number), ())
        delta = algorithm.client(down, state, shard, own)[0].delta
        delta = trees.add_where_given(trees.zeros_like(params), delta)
        short = jnp.minimum(1, clip / jnp.maximum(trees.norm(delta), 1e-12))
        return trees.add(params, trees.scale(short, delta))

    reached = jax.vmap(of_client)(jnp.arange(CLIENTS), on.starts, on.counts)
    after = mean_of(reached)
    if name == "exact":
        after = with_rest(after, reached)
    return Round(params, reached, noisy(after, reached, params, noise * clip, key))


def noisy(mean, reached, before, deviation, key):
    """Noise on what was sent: a factor that no client moved gets none."""
    leaves, structure = jax.tree.flatten(mean)
    keys = jax.random.split(jax.random.fold_in(key, CLIENTS), len(leaves))
    moved = jax.tree.map(lambda new, old: (new != old).any(), reached, before)
    drawn = [
        leaf + sent * deviation / CLIENTS * jax.random.normal(one, leaf.shape)
        for leaf, one, sent in zip(leaves, keys, jax.tree.leaves(moved), strict=True)
    ]
    return jax.tree.unflatten(structure, drawn)


def with_rest(mean, reached):
    """The mean of factors, and what it misses of the mean of products."""
    rest = {}
    for path in PATHS:
        pairs, own = reached["adapter"][path], mean["adapter"][path]
        wanted = jnp.einsum("cor,cri->oi", pairs["b"], pairs["a"]) / CLIENTS
        rest[path] = mean["rest"][path] + wanted - own["b"] @ own["a"]
    return {**mean, "rest": rest}


def rounds_of(
    on: Task,
    name: str,
    steps: int,
    seed: int,
    rate: float = RATE,
    noise: float = 0.0,
    clip: float = 1e9,
) -> Iterator[Round]:
    """Rounds of a method; "exact" is FedAvg whose mean of products is exact."""
    params = start(on.base, seed)
    for number in count():
        chosen = rate, clip, noise
        one = a_round(name, steps, on, params, jnp.int32(number), seed, *chosen)
        yield one
        params = one.after


def take(rounds: Iterator[Round], number: int) -> Round:
    """The round of this number, counted from 1."""
    return next(islice(rounds, number - 1, None))


@jax.jit
def whole_loss(on: Task, params):
    """The mean over all clients' rows."""
    return loss_of(on.base)(params, on.rows).mean()


@jax.jit
def gap(on: Task, one: Round):
    """What the product of means misses: of the mean change, of this round's, in loss.

    The loss is that of all rows, at the product of means less that at the mean of
    products, over what the round gains by the latter.
    """
    wanted = jax.vmap(product)(one.reached).mean(axis=0)
    missed = jnp.linalg.norm(wanted - product(one.after))
    of_round = jnp.linalg.norm(wanted - product(one.before))
    exact = whole_loss(on, with_rest(one.after, one.reached))
    gained = whole_loss(on, one.before) - exact
    cost = (whole_loss(on, one.after) - exact) / jnp.abs(gained)
    return missed / jnp.linalg.norm(wanted), missed / of_round, cost


def of_seeds(figures: list[float], form: str) -> str:
    middle = np.median(figures)
    return f"{middle:{form}} ({min(figures):{form}} to {max(figures):{form}})"


def gaps(steps: list[int], numbers: list[int], seeds: tuple[int, ...]) -> None:
    print(
        "| clients | local steps | round | of the change | of this round's | in loss |"
    )
    print("|---|---|---|---|---|---|")
    for words, spread in SPREADS.items():
        tasks = [task(spread, seed) for seed in seeds]
        for local in steps:
            found: dict[int, list[tuple[float, float, float]]] = {}
            for seed, on in zip(seeds, tasks, strict=True):
                rounds = enumerate(rounds_of(on, "fedavg", local, seed), 1)
                for number, one in rounds:
                    if number in numbers:
                        found.setdefault(number, []).append(gap(on, one))
                    if number == max(numbers):
                        break
            for number, figures in found.items():
                cells = [of_seeds([*one], ".1%") for one in zip(*figures, strict=True)]
                print(f"| {words} | {local} | {number} | {' | '.join(cells)} |")


def best_rate(name: str, steps: int, rounds: int, noise: float = 0.0) -> float:
    """The rate with the least loss in the end, on clients of a further seed."""
    on = task(1.0, len(SEEDS))
    found = {}
    for rate in RATES:
        clip = clip_of(on, name, steps, len(SEEDS), rate) if noise else 1e9
        given = (on, name, steps, len(SEEDS), rate, noise, clip)
        found[rate] = float(whole_loss(on, take(rounds_of(*given), rounds).after))
    return min(found, key=lambda rate: np.nan_to_num(found[rate], nan=np.inf))


def clip_of(on: Task, name: str, steps: int, seed: int, rate: float) -> float:
    """The median length of the first answers."""
    first = take(rounds_of(on, name, steps, seed, rate), 1)
    changes = jax.tree.map(lambda new, old: new - old, first.reached, first.before)
    return float(jnp.median(jax.vmap(trees.norm)(changes)))


def methods(steps: int, rounds: int, seeds: tuple[int, ...]) -> None:
    names = ("fedavg", "exact", "rolora", "ffa_lora")
    rates = {name: best_rate(name, steps, rounds) for name in names}
    print(f"rates: {rates}")
    print("| clients | base alone | FedAvg | exact mean | RoLoRA | FFA-LoRA |")
    print("|---|---|---|---|---|---|")
    for words, spread in SPREADS.items():
        losses: dict[str, list[float]] = {name: [] for name in ("base", *names)}
        for seed in seeds:
            on = task(spread, seed)
            losses["base"].append(float(whole_loss(on, start(on.base, seed))))
            for name in names:
                last = take(rounds_of(on, name, steps, seed, rates[name]), rounds)
                losses[name].append(float(whole_loss(on, last.after)))
        cells = [of_seeds(found, ".3f") for found in losses.values()]
        print(f"| {words} | {' | '.join(cells)} |")


def private(steps: int, rounds: int, seeds: tuple[int, ...]) -> None:
    """Each method is clipped at the median length of its own first answers."""
    print("| noise | method | rate | noise over the change of a round | loss |")
    print("|---|---|---|---|---|")
    for noise in (0.0, 0.3, 1.0):
        for name in ("fedavg", "rolora", "ffa_lora"):
            shares, losses = [], []
            rate = best_rate(name, steps, rounds, noise)
            for seed in seeds:
                on = task(1.0, seed)
                clip = clip_of(on, name, steps, seed, rate)
                given = (on, name, steps, seed, rate, noise, clip)
                last = take(rounds_of(*given), rounds)
                quiet = product(mean_of(last.reached))
                signal = jnp.linalg.norm(quiet - product(last.before))
                error = jnp.linalg.norm(product(last.after) - quiet)
                shares.append(float(error / signal))
                losses.append(float(whole_loss(on, last.after)))
            cells = of_seeds(shares, ".2f"), of_seeds(losses, ".3f")
            print(f"| {noise:g} | {name} | {rate} | {cells[0]} | {cells[1]} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a few seconds")
    small = parser.parse_args().small
    if small:
        SPREADS.pop("Dirichlet 1")
        gaps([5], [1, 2], SEEDS[:1])
        methods(5, 2, SEEDS[:1])
        private(5, 2, SEEDS[:1])
        return
    gaps([1, 10, 50], [1, 10, 50], SEEDS)
    methods(10, 50, SEEDS)
    private(10, 50, SEEDS)


if __name__ == "__main__":
    main()
