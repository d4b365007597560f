# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Methods compared at settings that were chosen alike, on rows not tested on."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedblend_reproductions.mixed.task import Curves, Method, Task, course, with_test


class Size(NamedTuple):
    """How long settings are tried and chosen ones run, with how many seeds each."""

    tries: int
    trial_rounds: int
    seeds: int
    rounds: int
    points: int


class Tuned(NamedTuple):
    """The setting, losses ``tried`` on the first half, curves on the second.

    ``edge`` is whether the setting is the first or the last of those tried.
    """

    setting: Any
    tried: np.ndarray
    edge: bool
    curves: Curves


def tuned(
    task: Task, method: Method, candidates: Mapping[str, Sequence[Any]], size: Size
) -> dict[str, Tuned]:
    """A method at the settings with the least loss, in the mean over a trial's rounds.

    Settings are chosen on one half of the held-out rows, with seeds of their own;
    curves are on the other half. A setting without others is not tried.

    Args:
        task: what is learned.
        method: built from a setting, a rate or an array of numbers.
        candidates: settings of each of several variants, all run side by side.
        size: how long, and with how many seeds.
    """
    halves = _halves(task, method)
    tried = {name: np.zeros(len(these)) for name, these in candidates.items()}
    if max(map(len, candidates.values())) > 1:
        replicas = [one for these in candidates.values() for one in these]
        trial = _course(
            task,
            halves[0],
            replicas,
            range(100, 100 + size.tries),
            size.trial_rounds,
            5,
        )
        means = np.nan_to_num(overall(trial), nan=np.inf).reshape(-1, size.tries)
        edges = np.cumsum([len(these) for these in candidates.values()])[:-1]
        losses = np.split(means.mean(axis=1), edges)
        tried = dict(zip(candidates, losses, strict=True))
    best = {name: int(losses.argmin()) for name, losses in tried.items()}
    chosen = [candidates[name][place] for name, place in best.items()]
    curves = _course(
        task, halves[1], chosen, range(size.seeds), size.rounds, size.points
    )
    return {
        name: Tuned(
            candidates[name][place],
            tried[name],
            place in (0, len(candidates[name]) - 1),
            Curves(
                curves.rounds,
                {
                    metric: values[size.seeds * number : size.seeds * (number + 1)]
                    for metric, values in curves.values.items()
                },
            ),
        )
        for number, (name, place) in enumerate(best.items())
    }


def _course(
    task: Task,
    method: Method,
    settings: Sequence[Any],
    seeds: Sequence[int],
    rounds: int,
    points: int,
) -> Curves:
    """Replicas for all seeds of the first setting, then of the second, and so on."""
    replicas: Any = np.repeat(np.array(settings), len(seeds), axis=0).tolist()
    return course(
        task,
        method,
        rates=replicas,
        seeds=list(seeds) * len(settings),
        rounds=rounds,
        every=max(rounds // points, 1),
    )


def _halves(task: Task, method: Method) -> list[Method]:
    """The method on its clients, with either half of the held-out rows."""
    test = task.federated_data.test
    assert test is not None
    return [
        method._replace(
            federated_data=with_test(
                method.federated_data,
                jax.tree.map(lambda leaf: leaf[first::2], test.examples),  # noqa: B023
            )
        )
        for first in (0, 1)
    ]


def overall(curves: Curves) -> np.ndarray:
    """The loss in the mean over rounds, by seed."""
    return curves.values["loss"][:, 1:].mean(axis=1)


def beyond(one: Curves, other: Curves) -> tuple[float, float]:
    """Loss of one beyond the other's in the mean over rounds, and its error."""
    gaps = overall(one) - overall(other)
    return float(gaps.mean()), float(gaps.std(ddof=1) / np.sqrt(len(gaps)))
