# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Choosing alpha, the weight of the shared model, on every client's validation rows.

All alphas of a grid are replicas of one simulation: in replica a every client mixes
with alpha = a, on the same cohorts and batches. At the end every client takes the
replica that is best on its own validation rows. Test rows are measured and not looked
at.

The models of different replicas go with different shared models. A client that deploys
the model of its replica needs that replica's shared model; a federation that is to have
one trains again with ``alpha=tuned.chosen``. For APFL with fixed alpha the shared model
is the same in all replicas, and training again leads to the same models.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.core import Algorithm, Key, PyTree
from fedblend.data.federated import FEDERATED_DATA, FederatedData, Shards
from fedblend.metrics import Measure, Metric, make_metrics
from fedblend.selection.arms import ALPHAS
from fedblend.simulation.run import Run
from fedblend.simulation.simulate import RunSpec, set_up

GRID = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The alphas that are tried by default."""
MOST_NAMED = 5
"""Clients whose names a warning holds."""


class Tuned(NamedTuple):
    """What every client chose.

    ``alphas`` is the grid, from small to large. ``validation`` and ``test`` hold the
    metric of every client's deployed model, [alphas, clients], NaN where a client has
    no value; ``test`` is None where nothing was held out for it. ``chosen`` is the
    alpha of each client, ``common`` the best one for all. ``unsure`` marks the clients
    without a finite value on validation rows, whose alpha is ``common``. ``warnings``
    names them, and those whose models diverged for some alphas.
    """

    alphas: np.ndarray
    validation: np.ndarray
    test: np.ndarray | None
    chosen: np.ndarray
    common: float
    unsure: np.ndarray
    metric: str
    run: Run

    @property
    def warnings(self) -> tuple[str, ...]:
        """Whose choice is not, or not wholly, their own."""
        finite = np.isfinite(self.validation)
        some = ~finite.all(axis=0) & ~self.unsure
        metric, lost = self.metric, self.alphas[~finite[:, some].all(axis=1)]
        reasons = {
            f"have no finite {metric} on validation rows; they take alpha = "
            f"{self.common:g}, the best for the others": self.unsure,
            f"have no finite {metric} at alpha = {', '.join(f'{a:g}' for a in lost)}, "
            "which they cannot choose": some,
        }
        return tuple(
            f"tune: {_named(self.run.federated_data, which)} {what}"
            for what, which in reasons.items()
            if which.any()
        )

    @property
    def replicas(self) -> np.ndarray:
        """The place in ``alphas`` of every client's choice."""
        return np.searchsorted(self.alphas, self.chosen)

    def personal(self, client: int) -> PyTree:
        """The model that a client deploys: that of the replica of its alpha."""
        return trees.take(self.run.personal(client), int(self.replicas[client]))


def tune(
    build: Callable[[Any], Algorithm],
    params: PyTree | Callable[[Key], PyTree],
    federated_data: FederatedData,
    key: Key,
    *,
    rounds: int,
    measure: Mapping[str, Metric | Measure],
    alphas: Sequence[float] | np.ndarray = GRID,
    by: str | None = None,
    every: int | None = None,
    **options: Any,
) -> Tuned:
    """Try a grid of alphas side by side, and let every client choose.

    Ties go to the largest alpha, the most shared one. A client without validation rows,
    or with some that are not finite, has no value: it takes ``common``, the alpha whose
    mean over the others is best, and is named in a warning. A model that diverged is
    worse than all others.

    Args:
        build: from alpha, a traced number, to an algorithm.
        params: the initial parameters, or a function of a key that draws them.
        federated_data: the clients' data, with validation rows.
        key: one seed, ``jax.random.key(0)``.
        rounds: communication rounds, of every alpha.
        measure: metrics by name, see ``metrics``.
        alphas: the grid, numbers in [0, 1].
        by: the measure that decides; the first if None.
        every: rounds of a block; all of them if None.
        options: what else ``simulate`` takes; ``measure_on``, ``splits`` and ``over``
            are set here.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, fedblend as fb
        >>> from fedblend_reproductions.apfl.tune_alpha import tune
        >>> rng = np.random.default_rng(0)
        >>> rows = rng.normal(size=(60, 2)), rng.normal(size=60)
        >>> federation = fb.federate(rows, np.split(np.arange(60), 3), validation=0.3)
        >>> loss = fb.losses.squared_error(lambda params, inputs: inputs @ params)
        >>> tuned = tune(
        ...     lambda alpha: fb.apfl(
        ...         loss,
        ...         fb.Work(0.1, steps=5, batch_size=None),
        ...         alpha=alpha,
        ...         learn="fixed",
        ...     ),
        ...     jnp.zeros(2),
        ...     federation,
        ...     jax.random.key(0),
        ...     rounds=5,
        ...     measure={"loss": fb.metrics.mean_loss(loss)},
        ... )
        >>> tuned.validation.shape, tuned.personal(2).shape
        ((5, 3), (2,))
    """
    spec = RunSpec(
        build,
        params,
        federated_data,
        key,
        rounds,
        every=every,
        measure=make_metrics(measure),
        **options,
    )
    return choose_alpha(spec, alphas, by)


def choose_alpha(
    spec: RunSpec, alphas: Sequence[float] | np.ndarray = GRID, by: str | None = None
) -> Tuned:
    """``tune``, of what it hands to ``simulate`` as one value."""
    grid = np.unique(np.asarray(ALPHAS("alphas", alphas), np.float64))
    federated_data = FEDERATED_DATA("federated_data", spec.federated_data)
    if spec.key.ndim:
        raise ValueError(f"key: {len(spec.key)} keys; a choice is made for one seed")
    if federated_data.validation is None or not federated_data.validation.total:
        raise ValueError(
            "federated_data: has no validation rows to choose on; "
            "federate(..., validation=0.2) holds some out"
        )
    by = next(iter(spec.measure), "") if by is None else by
    if by not in spec.measure:
        known = list(spec.measure)
        raise ValueError(f"by: {by!r} is not measured; it is one of {known}")
    splits = [name for name in ("validation", "test") if name in federated_data.splits]
    swept = dataclasses.replace(
        spec,
        every=max(spec.rounds, 1) if spec.every is None else spec.every,
        over=jnp.asarray(grid, float),
        measure_on=range(federated_data.clients),
        splits=splits,
    )
    run = set_up(swept).complete()
    values = {
        split: np.stack([np.asarray(m[split]["personal"][by]) for m in run.measured])
        for split in splits
    }
    usable = _finite_rows(federated_data.validation)
    validation = np.where(usable, values["validation"], np.nan)
    if not np.isfinite(validation).any():
        raise ValueError(f"by: {by!r} has no value on any client's validation rows")
    replicas, common = choose(validation, spec.measure[by].higher_is_better)
    found = Tuned(
        alphas=grid,
        validation=validation,
        test=values.get("test"),
        chosen=grid[replicas],
        common=float(grid[common]),
        unsure=np.asarray(~np.isfinite(validation).any(axis=0)),
        metric=by,
        run=run,
    )
    for warning in found.warnings:
        warnings.warn(warning, stacklevel=3)
    return found


def choose(values: np.ndarray, higher_is_better: bool) -> tuple[np.ndarray, int]:
    """The best row of every column, and the row of the best mean; ties go to the last.

    What is not finite is worse than anything else, in a mean too: the fewer such values
    a row has, the better. Columns of nothing else are in no mean and take its row.

    >>> values = np.array([[3.0, 1.0, np.nan], [2.0, 1.0, np.nan]])
    >>> replicas, common = choose(values, higher_is_better=True)
    >>> replicas.tolist(), common
    ([0, 1, 0], 0)
    """
    finite = np.isfinite(values)
    unknown = ~finite.any(axis=0)
    # In float64: a mean of many float32 values would make and break ties by itself.
    scores = np.where(finite, values if higher_is_better else -values, 0.0)
    scores = scores.astype(np.float64)
    counts = finite.sum(axis=1)
    means = scores.sum(axis=1) / np.maximum(counts, 1)
    common = _last_best(np.where(counts == counts.max(), means, -np.inf))
    own = _last_best(np.where(finite, scores, -np.inf))
    return np.where(unknown, common, own), int(common)


def _last_best(scores: np.ndarray) -> Any:
    return len(scores) - 1 - scores[::-1].argmax(axis=0)


def _finite_rows(split: Shards) -> np.ndarray:
    """Which clients have rows without anything that is not finite."""
    usable = np.ones(len(split.counts), bool)
    for leaf in map(np.asarray, jax.tree.leaves(split.examples)):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        spoiled = ~np.isfinite(leaf).reshape(len(leaf), -1).all(axis=1)
        before = np.concatenate([[0], np.cumsum(spoiled)])
        usable &= before[split.starts + split.counts] == before[split.starts]
    return usable


def _named(federated_data: FederatedData, which: np.ndarray) -> str:
    clients = np.flatnonzero(which)
    names = [federated_data.name(int(client)) for client in clients[:MOST_NAMED]]
    more = ", ..." if len(clients) > MOST_NAMED else ""
    return f"{len(clients)} of {len(which)} clients ({', '.join(names)}{more})"
