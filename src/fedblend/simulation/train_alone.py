# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Training alone, as long as it helps: what every client could do without the others.

The number of rounds is one for all clients, the best for their mean on validation rows
or, where there are none, on a fifth of every client's training rows, which are then
trained on too. On a few rows of a single client the best round is mostly chance;
docs/measures.md has the measurement.

Held-out rows are evaluated after 1, 2, 3, ... rounds, in the end after every fifth more
than before. Training continues for ``least`` rounds, and until twice as many rounds as
before improve neither the metric by 0.2 percent of its improvement so far, or of the
value itself, nor the loss by a percent of its improvement so far. An accuracy alone may
stay flat for long while the loss falls, with a rare class or a small rate. ``MOST``
bounds the time; a trial that ends there was still improving. Then the best round
counts, by the metric.

With a small rate the bound comes first. ``tune_rate`` tries further rates beforehand:
the rate that is best in a few rounds is one with which most rounds are good.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedblend.core import Algorithm, Key, PyTree
from fedblend.data.federated import FederatedData
from fedblend.metrics import Measure, Metric, make_metrics
from fedblend.simulation.result import LocalBudget
from fedblend.simulation.run import Run
from fedblend.simulation.sampling import choose_measured
from fedblend.simulation.simulate import RunSpec, make_key, set_up

ROWS = {True: "validation rows", False: "a held-out fifth of the training rows"}
"""Which rows choose, by whether there are validation rows."""
HELD_OUT = 0.2
"""Part of every client's training rows that decides where it has no validation rows."""
LEAST = 20
"""Rounds that are tried at least, however short the run that is compared with."""
MOST = 20
"""How many times the least are tried at most."""
LITTLE = 0.002
"""Improvements of the metric by a smaller part end the trial."""
LITTLE_LOSS = 0.01
"""Likewise, of the loss."""
FACTORS = (1 / 3, 1.0, 3.0, 10.0)
"""What the rate is multiplied by, to tune it."""
TRIES = 4
"""How often these are tried, while the smallest or the largest is the best."""
SHORT = 5
"""They are tried for this part of the rounds, and the least number."""
CLIENTS = 50
"""By about so many clients at most."""
NEAR = 0.01
"""Scores that differ by a smaller part are decided by the loss."""
BLOCKS = 4
"""And looked at so often."""


class Look(NamedTuple):
    """Scores on held-out rows after some rounds, of which more is better."""

    round: int
    score: float
    second: float = 0.0
    """Of the loss: also tells whether training goes on, and decides between equal
    scores."""


def train_alone(
    algorithm: Algorithm | Callable[[Any], Algorithm],
    params: PyTree | Callable[[Key], PyTree],
    federated_data: FederatedData | Sequence[FederatedData],
    key: Key | int,
    *,
    rounds: int,
    measure: Mapping[str, Metric | Measure],
    metric: str | None = None,
    **settings: Any,
) -> Run:
    """A run of ``local_only`` to its own best round, for ``simulate(local=...)``.

    Args:
        algorithm: ``local_only``, or with ``over`` a function to it. A function without
            ``over`` is one of a factor of the rate, such as ``lambda factor:
            local_only(loss, Work(factor * 0.1, ...))``: then the rate is tuned, too.
        params: as in ``simulate``.
        federated_data: likewise.
        key: likewise; several keys get one number of rounds together.
        rounds: those of the run that is compared with. As many are tried at least, and
            20 at least.
        measure: as in ``simulate``.
        metric: which of them decides; the first besides the loss if None.
        **settings: further ones of ``simulate``, the same as of that run.

    Returns:
        A run of as many rounds as turned out best; ``run.budget`` has the number, and
        how it was chosen.
    """
    metric = metric or next((name for name in measure if name != "loss"), "loss")
    metrics = make_metrics(measure)
    asked = RunSpec(
        algorithm,
        params,
        federated_data,
        make_key(key),
        rounds,
        measure=metrics,
        **settings,
    )
    own, rate, seconds = spec_alone(asked), 1.0, 0.0
    if callable(algorithm) and asked.over is None:
        rate, seconds = tune_rate(own, algorithm, metric)
        own = dataclasses.replace(own, algorithm=algorithm(rate))
    trial = trial_run(own, metric)
    for _ in prolong(trial, metric, rounds):
        pass
    run = set_up(own)
    run.budget, run.earlier_seconds = LocalBudget(rounds, rate=rate), seconds
    return set_best_length(run, trial, metric, rounds)


def spec_alone(spec: RunSpec) -> RunSpec:
    """The same run with all measured clients in every round, each for itself."""
    clients = spec.federations[0].clients
    ids = choose_measured(spec.measure_on, clients, spec.key)
    return dataclasses.replace(
        spec,
        cohort=None if len(ids) == clients else ids,
        reduction="mean",
        weights=None,
        central=None,
    )


def trial_run(spec: RunSpec, metric: str) -> Run:
    """A run to ``prolong``, that measures only what decides."""
    data = spec.federations
    if not all(one.validates for one in data):
        data = [one.holding_out(HELD_OUT) for one in data]
    names = [name for name in dict.fromkeys((metric, "loss")) if name in spec.measure]
    own = dataclasses.replace(
        spec,
        federated_data=data,
        measure={name: spec.measure[name] for name in names},
        splits=["validation"],
        rounds=least_rounds(spec.rounds),
    )
    return set_up(own)


def tune_rate(
    spec: RunSpec, build: Callable[[Any], Algorithm], metric: str
) -> tuple[float, float]:
    """The factor of the rate with the best score in a short trial, and its seconds.

    All ``FACTORS`` train side by side. While the smallest or the largest is the best,
    further ones around it are tried.

    Args:
        spec: of ``spec_alone``.
        build: from a factor to training alone.
        metric: decides; a loss may rise from the first round on where the rows of
            clients are few.
    """
    best, seconds, keys = 1.0, 0.0, max(spec.key.size, 1)
    data = spec.federations
    ids = choose_measured(spec.measure_on, data[0].clients, spec.key)
    ids = ids[:: -(-len(ids) // CLIENTS)]
    rounds = least_rounds(spec.rounds // SHORT)
    spec = dataclasses.replace(
        spec, cohort=ids, measure_on=ids, rounds=rounds, every=rounds // BLOCKS
    )
    for _ in range(TRIES):
        factors = best * np.array(FACTORS)
        several = {"over": factors}
        if spec.key.ndim:
            several = {
                "key": jnp.tile(spec.key, len(factors)),
                "over": np.repeat(factors, keys),
                "federated_data": data * (len(factors) if len(data) > 1 else 1),
            }
        run = trial_run(dataclasses.replace(spec, algorithm=build, **several), metric)
        run.complete()
        seconds += _seconds(run)
        places = np.arange(len(factors) * keys).reshape(-1, keys).tolist()
        tried = [best_of(_scores(run, metric, of)) for of in places]
        top = best_of(tried).score
        near = [look for look in tried if look.score >= top - NEAR * abs(top)]
        lowest = max(near, key=lambda look: look.second)
        best = float(factors[tried.index(lowest)])
        if factors[0] < best < factors[-1]:
            break
    return best, seconds


def prolong(run: Run, metric: str, rounds: int) -> Iterator[Any]:
    """Take a run to where more rounds improve nothing; a record after each block.

    A store on disk goes with a checkpoint of the last block, and of no earlier one.
    """
    least = least_rounds(rounds)
    for at in looks():
        if at < run.round:
            continue
        run.rounds = at
        yield from run
        if has_ended(_looks(run, metric), least):
            return


def set_best_length(run: Run, trial: Run, metric: str, rounds: int) -> Run:
    """The run, to be as long as was best in the trial."""
    least, seen = least_rounds(rounds), _looks(trial, metric)
    rows = ROWS[trial.federated_data is run.federated_data]
    rate = 1.0 if run.budget is None else run.budget.rate
    run.budget = best_budget(seen, least, rows, metric)._replace(rate=rate)
    run.rounds = run.budget.rounds or 0
    run.earlier_seconds += _seconds(trial)
    return run


def _seconds(run: Run) -> float:
    """What its rounds took."""
    return sum(record.seconds for record in run.history())


def _looks(run: Run, metric: str) -> list[Look]:
    """The scores of a run after the rounds that count."""
    wanted = {0, *takewhile(lambda at: at <= run.round, looks())}
    return [look for look in _scores(run, metric) if look.round in wanted]


def _scores(run: Run, metric: str, replicas: Iterable[int] | None = None) -> list[Look]:
    """The scores of a run, from its records; the mean over clients and seeds.

    Args:
        run: the run.
        metric: which metric.
        replicas: of which seeds; all of them if None.
    """
    metrics, found = run.evidence.metrics, []
    names = (metric, "loss" if "loss" in metrics else metric)
    for block in zip(
        *map(run.history, replicas or range(run.replicas or 1)), strict=True
    ):
        seen = [record.measures["validation"]["personal"] for record in block]
        means = [float(np.mean([of[name].mean for of in seen])) for name in names]
        scores = map(score, (metrics[name] for name in names), means)
        found.append(Look(block[0].round, *scores))
    return found


def looks() -> Iterator[int]:
    """The rounds after which held-out rows are evaluated.

    >>> from itertools import islice
    >>> list(islice(looks(), 12))
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14]
    """
    at = 0
    while True:
        at += max(1, at // 5)
        yield at


def least_rounds(rounds: int) -> int:
    """How many rounds are tried at least, beside a run of so many."""
    return max(rounds, LEAST)


def score(metric: Metric, value: float) -> float:
    """A value of a metric as a score, of which more is better; NaN is the worst."""
    sign = 1 if metric.higher_is_better else -1
    return -math.inf if math.isnan(value) else sign * value


def has_settled(seen: Sequence[Look], least: int) -> bool:
    """Whether more rounds improve nothing: neither the metric nor the loss."""
    if seen[-1].round < least:
        return False
    gained, improvement, before = _progress({look.round: look.score for look in seen})
    # A loss may halve forever where all rows are right: its value is no measure.
    falls, fall, _ = _progress({look.round: look.second for look in seen})
    little = LITTLE * min(improvement, abs(before))
    return gained <= little and falls <= LITTLE_LOSS * fall


def _progress(scores: Mapping[int, float]) -> tuple[float, float, float]:
    """What the second half of the rounds improved, what all did, the best before."""
    best = max(scores.values())
    before = max(score for at, score in scores.items() if at <= max(scores) / 2)
    if best == before:
        return 0.0, 0.0, before
    first = next(score for score in scores.values() if math.isfinite(score))
    return best - before, best - first if math.isfinite(before) else 0.0, before


def has_ended(seen: Sequence[Look], least: int) -> bool:
    """Whether training ends here: more rounds improve nothing, or may not be tried."""
    return has_settled(seen, least) or seen[-1].round >= MOST * least


def best_of(seen: Sequence[Look]) -> Look:
    """The best look, the first of equal ones."""
    return max(seen, key=lambda look: (look.score, look.second))


def best_budget(
    seen: Sequence[Look], least: int, rows: str, metric: str
) -> LocalBudget:
    """The best number of rounds; the least where no score is finite."""
    best = best_of(seen)
    if not math.isfinite(best.score):
        return LocalBudget(least)
    improving = not has_settled(seen, least)
    return LocalBudget(best.round, rows, metric, seen[-1].round, improving)
