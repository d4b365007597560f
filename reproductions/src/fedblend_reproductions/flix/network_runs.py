# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""F9's runs: FLIX on networks beside FedAvg, training alone, and fine-tuning.

All tasks are run alike. Settings and seeds are replicas of one simulation, a limited
number at a time; each such part is cached in a folder, and models that later parts need
are saved beside it. Seeds differ in cohorts and batches.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend.core import Loss
from fedblend_reproductions.cache import Cache
from fedblend_reproductions.flix.network_task import (
    BLOCKS,
    FEW,
    MANY,
    Score,
    Setting,
    Task,
    TunedWork,
    scores_of,
    simulated,
    start,
)

LOCAL, ONE = SOLVERS = ("local steps", "one gradient")
FEDAVG = "FedAvg"
Scores = dict[tuple[Setting, int], Score]


def own_models(task: Task, folder: Path) -> tuple[dict[float, list[Score]], Callable]:
    """Training alone: the scores of each rate by snapshot, and a function that loads
    x_i by the kind of their training. They are the same for all seeds.
    """
    plan, paths = task.plan, {kind: folder / f"x_{kind}.npz" for kind in (FEW, MANY)}
    rates = plan.own.rates

    def train() -> list[list[Score]]:
        starts = [start(task)] * len(rates)
        run = _alone(task, plan.own, rates, [0] * len(rates), starts)
        found: list[list[Score]] = [[] for _ in rates]
        best, many = -1.0, None
        for number, _ in enumerate(run):
            if number == 0:  # the start of all of them
                continue
            for replica, score in enumerate(scores_of(run)):
                found[replica].append(score)
                if score.validation > best:
                    best, many = score.validation, _personal(run, replica)
            if number == 1:
                _save(paths[FEW], _personal(run, 0))
        _save(paths[MANY], many)
        return found

    cache = Cache(folder, task.settings())
    answer = cache("alone", train)
    known: dict[str, Any] = {}

    def models(kind: str) -> Any:
        if not paths[kind].exists():
            train()
        if kind not in known:
            known[kind] = _load(paths[kind], start(task))
        return known[kind]

    return dict(zip(rates, map(_scores, answer), strict=True)), models


def together(
    task: Task,
    settings: Sequence[Setting],
    rounds: int,
    folder: Path,
    models: Callable[[str], Any],
) -> Scores:
    """Settings that have x_i, all seeds, in parts; ``models`` has the x_i by kind."""

    def build(replica):
        alpha, rate, own = replica
        return fb.flix(
            task.loss,
            lambda loss: methods[solver](loss, rate),
            alpha=alpha,
            local=fb.solvers.given(own),
        )

    def some(replicas: Sequence[tuple[Setting, int]]) -> list[Score]:
        # An argument of the compiled program, since a constant of this size stalls it.
        own = [models(setting.own) for setting, _ in replicas]
        copies = jax.tree.map(lambda *leaves: jnp.stack(leaves), *own)
        alphas = jnp.asarray([setting.alpha for setting, _ in replicas], jnp.float32)
        run = _run(task, build, replicas, rounds, (alphas, _rates(replicas), copies))
        return scores_of(run)

    methods = {LOCAL: _local_steps(task), ONE: _one_gradient(task)}
    (solver,) = {setting.solver for setting in settings}
    return _in_parts(task, settings, rounds, folder, solver, some)


def fedavg(
    task: Task, settings: Sequence[Setting], rounds: int, folder: Path
) -> Scores:
    """FedAvg from the initial parameters; saves its last models for ``finetuned``."""
    method = _local_steps(task)

    def some(replicas: Sequence[tuple[Setting, int]]) -> list[Score]:
        run = _run(
            task,
            lambda rate: method(task.loss, rate),
            replicas,
            rounds,
            _rates(replicas),
        )
        if rounds == task.plan.rounds:
            for place, (setting, seed) in enumerate(replicas):
                end = fb.trees.take(run.shared, place)
                _save(_end(folder, setting.rate, seed), end)
        return scores_of(run)

    return _in_parts(task, settings, rounds, folder, FEDAVG, some)


def finetuned(
    task: Task, setting: Setting, folder: Path
) -> dict[float, list[list[Score]]]:
    """Local steps from where FedAvg ended: by rate and snapshot, a score a seed."""
    work, seeds = task.plan.tune, range(task.plan.seeds)
    rates = [rate for rate in work.rates for _ in seeds]

    def train() -> list[list[Score]]:
        ends = [_load(_end(folder, setting.rate, seed), start(task)) for seed in seeds]
        run = _alone(
            task, work, rates, [*seeds] * len(work.rates), ends * len(work.rates)
        )
        return [scores_of(run) for number, _ in enumerate(run) if number]

    known = {"setting": setting, "seeds": len(seeds), "rounds": task.plan.rounds}
    cache = Cache(folder, {**task.settings(), **known})
    found = [_scores(those) for those in cache("tuned", train)]
    places = {
        rate: range(number * len(seeds), (number + 1) * len(seeds))
        for number, rate in enumerate(work.rates)
    }
    return {
        rate: [[scores[place] for place in those] for scores in found]
        for rate, those in places.items()
    }


def _in_parts(task, settings, rounds, folder, name, some) -> Scores:
    """The scores of all settings with all seeds, seed by seed."""
    replicas = [(one, seed) for seed in range(task.plan.seeds) for one in settings]
    found, most = [], task.plan.replicas
    for first in range(0, len(replicas), most):
        group = replicas[first : first + most]
        known = {**task.settings(), "rounds": rounds, "replicas": group}
        cache = Cache(folder, known)
        part = f"{name} {rounds} rounds part {first // most}"
        found += _scores(cache(part, lambda group=group: some(group)))
    return dict(zip(replicas, found, strict=True))


def _run(task: Task, build, replicas, rounds: int, over) -> fb.Run:
    """A completed run; a trial is measured at its end alone."""
    blocks = BLOCKS if rounds == task.plan.rounds else 1
    keys = _keys([seed for _, seed in replicas])
    every = max(-(-rounds // blocks), 1)
    return simulated(task, build, rounds, over=over, key=keys, every=every).complete()


def _alone(task: Task, work: TunedWork, rates, seeds, starts: Sequence[Any]) -> fb.Run:
    """Training alone from a model for each replica; a round is a snapshot."""

    def build(replica):
        rate, first = replica
        inner = fb.local_only(
            task.loss, fb.Work(rate, steps=work.steps, batch_size=work.batch_size)
        )

        def enroll(params, shard, key):
            del params
            return inner.enroll(first, shard, key)

        return inner._replace(enroll=enroll)

    firsts = jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts)
    return simulated(
        task,
        build,
        task.plan.snapshots,
        over=(jnp.asarray(rates, jnp.float32), firsts),
        key=_keys(seeds),
        every=1,
        chunk=min(task.plan.clients, task.federated_data.clients),
    )


def _one_gradient(task: Task) -> Callable[[Loss, Any], fb.Algorithm]:
    """The paper's solver: a minibatch gradient each, an optimizer at the server."""
    work = task.plan.one

    def method(loss, rate):
        assert work is not None
        server = task.server(rate)
        return fb.algorithms.fedopt(
            loss, fb.Work(1.0, steps=1, batch_size=work.batch_size), server
        )

    return method


def _local_steps(task: Task) -> Callable[[Loss, Any], fb.Algorithm]:
    """FedAvg, which is also a solver of FLIX."""
    work = task.plan.local

    def method(loss, rate):
        return fb.fedavg(
            loss, fb.Work(rate, steps=work.steps, batch_size=work.batch_size)
        )

    return method


def _rates(replicas: Sequence[tuple[Setting, int]]) -> jax.Array:
    return jnp.asarray([setting.rate for setting, _ in replicas], jnp.float32)


def _keys(seeds: Sequence[int]) -> jax.Array:
    return jax.vmap(jax.random.key)(jnp.asarray(list(seeds)))


def _scores(answer: Sequence[Any]) -> list[Score]:
    """Scores from plain values; null is what was not finite."""
    return [
        Score(
            np.array(rounds),
            np.array(test, np.float64),
            float("nan") if validation is None else validation,
            np.array(clients, np.float64),
        )
        for rounds, test, validation, clients in answer
    ]


def _personal(run: fb.Run, replica: int) -> Any:
    states = run.client_states()
    return jax.tree.map(lambda leaf: leaf[:, replica], states.personal)


def _end(folder: Path, rate: float, seed: int) -> Path:
    return folder / f"fedavg_{rate:g}_seed_{seed}.npz"


def _save(path: Path, tree: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, *map(np.asarray, jax.tree.leaves(tree)))


def _load(path: Path, like: Any) -> Any:
    """A saved tree with the structure of ``like``."""
    with np.load(path, allow_pickle=False) as saved:
        leaves = [jnp.asarray(saved[name]) for name in saved.files]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
