# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Choosing alpha, or a method, for every client, so that nobody is harmed.

A client should not deploy a model that is worse than training alone or the shared one.
Validation rows held out for good cost more than they tell, so that every client
cross-validates its own training rows: K folds of all arms are replicas of one
simulation, and models that are deployed are trained on all rows. What K folds tell of
single clients is little; ``arm_costs`` combines it with what they tell of the
federation. A client deploys the average of all arms' models, by the probability of each
to be best (``arms``). Test rows are measured and not looked at.

Arms are the alphas of a grid or several methods, and training alone, for a number of
rounds of its own (``train_alone``) that all folds choose together.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedblend import trees
from fedblend.checks import Number
from fedblend.core import Algorithm, Key, PyTree, Up, start_with_params
from fedblend.data.federated import FEDERATED_DATA, FederatedData
from fedblend.data.variants import SEVERAL
from fedblend.data.variants import folds as split_folds
from fedblend.errors import ConfigError, UserError
from fedblend.metrics import Measure, Metric, make_metrics
from fedblend.mixing import Blend, outputs
from fedblend.selection import arm_costs
from fedblend.selection.arm_costs import ClientCosts, CostMoments, Decision
from fedblend.selection.arms import (
    ALPHAS,
    Arm,
    Costs,
    alone_arm,
    alpha_arms,
    average_costs,
    can_average,
    cost_sign,
    mean_model,
    method_arms,
    mix_costs,
    models_of,
    row_metrics,
)
from fedblend.simulation.run import Run
from fedblend.simulation.sampling import make_cohort, plan_cohorts
from fedblend.simulation.simulate import RunSpec, make_key, set_up

GRID = (0.0, 0.25, 0.5, 0.65, 0.75, 0.85, 0.9, 1.0)
"""The alphas that are tried by default."""
FOLDS = 5
GUARD = 0.5
"""What one point of expected harm counts, in points of the expected metric, for the
single arm of a client."""
RANGE = 0.2, 3.0
"""Times the expected harm: between them lay the real one of four of five generated
federations. Few clients have most of it, and which ones they are is chance."""
WEIGHT = Number(least=0)
REASONS = {
    "own rows": "better on its own rows than what is best for clients of its size",
    "others": "the best for clients of its size",
    "guard": "another arm has the better mean, and more risk of harm",
    "no rows": "too few rows to cross-validate, so the best for clients of its size",
}
"""Why an arm is the single one of a client."""


class Choice(NamedTuple):
    """What every client deploys, and why.

    ``weights``, [clients, arms], are those of the average that a client deploys.
    ``chosen`` are places in ``arms``, over clients: the single best arm, with all the
    weight where models cannot be averaged. ``decisions`` have every client's
    beliefs: expected costs of all arms, expected harm, the chance of each to be best.
    ``harm`` is the expected harm of what every client deploys; in each fold it is that
    of what the rows of other folds chose.
    ``reasons`` are keys of ``REASONS``. ``common`` is the arm of the best mean over
    clients. ``references`` are the arms against which harm counts. ``federation`` is
    what the server learned, from means over clients.
    """

    arms: tuple[Arm, ...]
    weights: np.ndarray
    harm: np.ndarray
    chosen: np.ndarray
    common: int
    decisions: tuple[Decision, ...]
    reasons: tuple[str, ...]
    references: tuple[int, ...]
    metric: str
    sign: int
    """Times a cost is the metric."""
    federation: CostMoments
    federated_data: FederatedData

    @property
    def names(self) -> tuple[str, ...]:
        """What the arms are called: "alone", an alpha, or a method."""
        return tuple(arm.name for arm in self.arms)

    @property
    def cross_validation(self) -> np.ndarray:
        """The metric on rows that a fold held out, [arms, clients]; NaN without."""
        return np.array(
            [
                [self.sign * rows.mean() if rows.size else np.nan for rows in arm.costs]
                for arm in self.arms
            ]
        )

    @property
    def test(self) -> np.ndarray | None:
        """The metric on test rows, [arms, clients]; None where there are none."""
        if self.federated_data.test is None:
            return None
        return np.stack([arm.test(self.metric) for arm in self.arms])

    @property
    def deployed_test(self) -> np.ndarray | None:
        """The metric of what clients deploy, on test rows; None without."""
        data = self.federated_data
        if data.test is None:
            return None
        metric = self.arms[0].run.evidence.metrics[self.metric]
        rows = row_metrics(map(self.personal, range(data.clients)), data.test, metric)
        return np.array([own.mean() if own.size else np.nan for own in rows])

    def personal(self, client: int) -> PyTree:
        """The model that a client deploys, an average of models of all its rows."""
        return mean_model(models_of(self.arms, client), self.weights[client])


def choose(
    build: Callable[[Any], Algorithm] | Mapping[str, Algorithm],
    params: PyTree | Callable[[Key], PyTree],
    federated_data: FederatedData,
    key: Key | int,
    *,
    rounds: int,
    measure: Mapping[str, Metric | Measure],
    alone: Algorithm | None = None,
    alphas: Sequence[float] | np.ndarray = GRID,
    references: Sequence[str] | None = None,
    by: str | None = None,
    folds: int = FOLDS,
    guard: float = GUARD,
    **options: Any,
) -> Choice:
    """Cross-validate all arms side by side, and let every client choose.

    Args:
        build: from alpha, a traced number, to an algorithm; or algorithms by name.
        params: the initial parameters, or a function of a key that draws them.
        federated_data: the clients' data; validation rows are not used.
        key: one seed, ``jax.random.key(0)``.
        rounds: communication rounds, of every arm but training alone.
        measure: metrics by name, see ``metrics``.
        alone: ``local_only`` with the same work, which becomes the arm "alone".
        alphas: the grid, numbers in [0, 1], unless ``build`` has algorithms by name.
        references: names of the arms that a client must not do worse than; by default
            the first, which is training alone where it is an arm, and the largest
            alpha. Of algorithms by name give both, such as ["alone", "fedavg"].
        by: the measure that decides, a mean over rows; the first if None.
        folds: number of folds.
        guard: what expected harm counts beside the expected metric, for the single arm;
            0 for nothing.
        options: what else ``simulate`` takes, such as ``cohort``.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, fedblend as fb
        >>> rng = np.random.default_rng(0)
        >>> rows = rng.normal(size=(60, 2)), rng.normal(size=60)
        >>> federation = fb.federate(rows, np.split(np.arange(60), 3))
        >>> loss = fb.losses.squared_error(lambda params, inputs: inputs @ params)
        >>> work = fb.Work(0.1, steps=2, batch_size=None)
        >>> choice = fb.choose(
        ...     lambda alpha: fb.apfl(loss, work, alpha=alpha, learn="fixed"),
        ...     jnp.zeros(2),
        ...     federation,
        ...     jax.random.key(0),
        ...     rounds=5,
        ...     measure={"loss": fb.metrics.mean_loss(loss)},
        ...     alphas=[0, 0.5, 1],
        ... )
        >>> choice.names, choice.personal(2).shape
        (('0', '0.5', '1'), (2,))
    """
    spec = RunSpec(
        build,  # type: ignore[arg-type]
        params,
        federated_data,
        make_key(key),
        rounds,
        measure=make_metrics(measure),
        **options,
    )
    grid = None if isinstance(build, Mapping) else ALPHAS("alphas", alphas)
    return choose_arms(spec, alone, grid, references, by, folds, guard)


def choose_arms(
    spec: RunSpec,
    alone: Algorithm | None,
    alphas: Sequence[float] | np.ndarray | None,
    references: Sequence[str] | None = None,
    by: str | None = None,
    folds: int = FOLDS,
    guard: float = GUARD,
) -> Choice:
    """``choose``, of what it hands to ``simulate`` as one value."""
    data = FEDERATED_DATA("federated_data", spec.federated_data)
    WEIGHT("guard", guard)
    if spec.key.ndim:
        raise ValueError(
            f"key: {len(spec.key)} keys, but a choice is made for one seed; pass "
            f"one key"
        )
    plan_cohorts(make_cohort(spec.cohort), data.clients)  # before any client trains
    if isinstance(references, str):
        raise UserError("references", references, "a list of names")
    metric = _deciding(spec.measure, by)
    measure = spec.measure[metric]
    parts = split_folds(data, SEVERAL("folds", folds))
    if not parts[0].validates:
        raise ValueError(
            f"folds: no client has {folds} training rows or more; give fewer folds"
        )
    spec = dataclasses.replace(
        spec, every=max(spec.rounds, 1), measure_on=range(data.clients), splits=None
    )
    found = [] if alone is None else [alone_arm(spec, alone, parts, metric)]
    if alphas is None and not spec.algorithm:
        raise UserError("build", spec.algorithm, "a mapping with an algorithm or more")
    if alphas is None:
        found += method_arms(spec, parts, metric)
    else:
        found += alpha_arms(spec, parts, metric, alphas)
    named = _references([arm.name for arm in found], alphas is not None, references)
    usable = finite_arms(found, named)
    clients = _scores(usable, data, folds, measure)
    found = _single_arms(usable, named, clients, data, guard, metric, measure)
    places = found.references
    others = decisions_without_folds(clients, places, guard, folds)
    best, *of_folds = (
        np.array([one.best for one in of]) for of in (found.decisions, *others)
    )
    costs = average_costs(usable, np.stack(of_folds), parts, measure)
    if costs is None:
        single = [[one.arm for one in of] for of in others]
        costs = mix_costs(usable, np.eye(len(usable))[single])
    else:
        found = found._replace(weights=best)
    # In each fold the others' rows chose: rows that chose a model flatter it.
    rivals = [usable[place] for place in places]
    both = [*rivals, usable[0]._replace(name="deployed", costs=costs)]
    believed = _beliefs(_scores(both, data, folds, measure), range(len(rivals)), guard)[
        1
    ]
    return found._replace(harm=np.array([one.harm[-1] for one in believed]))


def _scores(
    arms: Sequence[Arm], data: FederatedData, folds: int, measure: Metric
) -> list[ClientCosts]:
    """What clients know of arms, counted from the least cost of a row."""
    least = least_cost(measure, [arm.costs for arm in arms])
    return [
        ClientCosts(
            np.stack([arm.costs[client] for arm in arms], axis=1) - least,
            trained=int(count - count // folds),
            deployed=int(count),
        )
        for client, count in enumerate(data.train.counts)
    ]


def decisions_without_folds(
    clients: Sequence[ClientCosts], references: Sequence[int], guard: float, folds: int
) -> list[tuple[Decision, ...]]:
    """What clients decide without the rows of each fold."""

    def leave_out(client: ClientCosts, fold: int) -> ClientCosts:
        parts = np.split(client.costs, folds)
        return client._replace(costs=np.concatenate(parts[:fold] + parts[fold + 1 :]))

    return [
        _beliefs([leave_out(one, fold) for one in clients], references, guard)[1]
        for fold in range(folds)
    ]


def _beliefs(
    clients: Sequence[ClientCosts], references: Sequence[int], guard: float
) -> tuple[CostMoments, tuple[Decision, ...]]:
    """What the server learns, and what clients decide."""
    federation = arm_costs.learn(clients)
    beliefs = (arm_costs.posterior(one, federation) for one in clients)
    return federation, tuple(
        arm_costs.decide(one, references, guard) for one in beliefs
    )


def _single_arms(
    arms: Sequence[Arm],
    references: Sequence[str],
    clients: Sequence[ClientCosts],
    data: FederatedData,
    guard: float,
    metric: str,
    measure: Metric,
) -> Choice:
    """The decision of every client for one arm, from the costs of all."""
    least = least_cost(measure, [arm.costs for arm in arms])
    names = [arm.name for arm in arms]
    places = tuple(names.index(name) for name in references)
    federation, found = _beliefs(clients, places, guard)
    decisions = tuple(one._replace(expected=one.expected + least) for one in found)
    unseen = (client._replace(costs=client.costs[:0]) for client in clients)
    priors = (arm_costs.posterior(one, federation) for one in unseen)
    by_size = [arm_costs.decide(one, places, guard).unguarded for one in priors]
    means = np.mean([decision.expected for decision in decisions], axis=0)
    chosen = np.array([decision.arm for decision in decisions])
    return Choice(
        arms=tuple(arms),
        weights=np.eye(len(arms))[chosen],
        harm=np.array([decision.harm[decision.arm] for decision in decisions]),
        chosen=chosen,
        common=int(means.argmin()),
        decisions=decisions,
        reasons=tuple(map(_reason, clients, decisions, by_size)),
        references=places,
        metric=metric,
        sign=cost_sign(measure),
        federation=federation,
        federated_data=data,
    )


def least_cost(metric: Metric, costs: Sequence[Costs]) -> float:
    """What a row costs at least, from which costs are counted.

    An error costs 0 at least, an accuracy -1. A metric without a bound, such as the
    logarithm of a density, counts from the least cost of any row.
    """
    bound = -1.0 if metric.higher_is_better else 0.0
    return min(bound, *(rows.min() for arm in costs for rows in arm if rows.size))


def _reason(client: ClientCosts, decision: Decision, by_size: int) -> str:
    if not len(client.costs):
        return "no rows"
    if decision.arm != decision.unguarded:
        return "guard"
    return "others" if decision.arm == by_size else "own rows"


def finite_arms(arms: Sequence[Arm], references: Sequence[str]) -> list[Arm]:
    """The arms whose models did not diverge on any client's rows."""
    usable = [np.isfinite(np.concatenate(arm.costs)).all() for arm in arms]
    lost = [arm.name for arm, fine in zip(arms, usable, strict=True) if not fine]
    if set(lost) & set(references):
        raise ValueError(
            f"choose: {', '.join(lost)} has costs that are not finite, in a model or "
            "in the rows, and clients are compared with it"
        )
    if lost:
        warnings.warn(
            f"choose: {', '.join(lost)} diverged, and cannot be chosen", stacklevel=4
        )
    return [arm for arm, fine in zip(arms, usable, strict=True) if fine]


def _references(
    names: Sequence[str], alphas: bool, asked: Sequence[str] | None
) -> list[str]:
    """The arms that clients are compared with."""
    if asked is None:
        own = names[:1]
        return [*own, names[-1]] if alphas else list(own)
    for name in asked:
        if name not in names:
            raise UserError("references", name, f"one of {', '.join(names)}")
    if not asked:
        raise UserError("references", asked, f"some of {', '.join(names)}")
    return list(dict.fromkeys(asked))


def _deciding(measure: Mapping[str, Metric], by: str | None) -> str:
    by = next(iter(measure), "") if by is None else by
    if by not in measure:
        raise ValueError(f"by: {by!r} is not measured; it is one of {list(measure)}")
    if measure[by].with_rows is None or not measure[by].mean_of_rows:
        raise ValueError(
            f"by: {by!r} is not a mean over rows, which cross-validation needs; use "
            "accuracy or a loss"
        )
    return by


def deploy(found: Choice, spec: RunSpec) -> Run:
    """The models that clients deploy as a completed run, measured on test rows.

    Its rounds are those of an arm, its bits those of all arms and folds. The first arm
    is training alone, the last the shared model.

    Args:
        found: the choice.
        spec: of the runs of its arms.
    """
    shared, alone = found.arms[-1], found.arms[0].run
    models = map(found.personal, range(found.federated_data.clients))
    stacked = trees.stack(_alike(list(models)))
    tested = [] if found.test is None else ["test"]
    own = dataclasses.replace(
        spec,
        algorithm=_hold_models(stacked),
        params=trees.take(shared.run.shared, shared.replica),
        federated_data=found.federated_data,
        rounds=0,
        every=1,
        splits=tested,
        measure=spec.measure if tested else {},
        measure_on=range(found.federated_data.clients),
        local=alone if tested else None,
    )
    run = set_up(own).complete()
    runs = {id(of): of for arm in found.arms for of in (arm.run, arm.crossed) if of}
    sent = [of.bits(at) for of in runs.values() for at in range(of.replicas or 1)]
    snapshot = run.snapshot()
    (log,) = snapshot["communication"]
    log |= {way: sum(getattr(bits, way) for bits in sent) for way in ("up", "down")}
    up, down = (int(log[way].sum()) for way in ("up", "down"))
    last = dataclasses.replace(
        run.records[-1], round=shared.run.round, bits_up=up, bits_down=down
    )
    run.restore(snapshot, shared.run.round, [last])
    return run


def _alike(models: list[PyTree]) -> list[PyTree]:
    """Models as trees of one kind: where some mix outputs, all do."""
    if any(isinstance(one, Blend) for one in models):
        models = [
            one if isinstance(one, Blend) else outputs(0.0, one, one) for one in models
        ]
    if not can_average(models):
        raise ConfigError(
            "algorithm.mix: gives clients models of different shapes, which one folder "
            'cannot hold; algorithm.mix="parameters" gives all the same'
        )
    return models


def _hold_models(models: PyTree) -> Algorithm:
    """Clients that deploy these models, leaves [clients, ...], and never train."""
    return Algorithm(
        enroll=lambda params, shard, key: ((), trees.take(models, shard.id)),
        start=start_with_params,
        client=lambda down, client, shard, key: (Up(delta=None), client),
        server=lambda aggregate, down, server, central, key: (down, server),
        personal=lambda down, client, shard, key: client,
    )
