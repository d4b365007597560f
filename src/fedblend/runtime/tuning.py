# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Choosing alpha, the weight of the shared model, on every client's validation rows.

All alphas of a grid are lanes of one simulation: in lane a every client mixes with
alpha = a, on the same cohorts and batches. At the end every client takes the lane that
is best on its own validation rows. Test rows are measured and not looked at.

The models of different lanes go with different shared models. A client that deploys
the model of its lane needs that lane's shared model; a federation that is to have one
trains again with ``alpha=tuned.chosen``. For APFL with fixed alpha the shared model is
the same in all lanes, and training again leads to the same models.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.checks import Number
from fedblend.core import Algorithm, Key, PyTree
from fedblend.data.federation import Federation
from fedblend.metrics import HIGHER_IS_BETTER
from fedblend.runtime.run import Run
from fedblend.runtime.simulate import simulate

ALPHAS = Number(least=0, most=1, clients=True, each="several of them")
GRID = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The alphas that are tried if nobody says which."""


class Tuned(NamedTuple):
    """What every client chose.

    ``alphas`` is the grid, from small to large. ``validation`` and ``test`` hold the
    metric of every client's deployed model, [alphas, clients], NaN where a client has
    no value; ``test`` is None where nothing was held out for it. ``chosen`` is the
    alpha of each client, ``common`` the best one for all. ``unsure`` marks the clients
    without a value on validation rows, whose alpha is ``common``.
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
    def lanes(self) -> np.ndarray:
        """The place in ``alphas`` of every client's choice."""
        return np.searchsorted(self.alphas, self.chosen)

    def personal(self, client: int) -> PyTree:
        """The model that a client deploys: that of the lane of its alpha."""
        return trees.take(self.run.personal(client), int(self.lanes[client]))


def tune(
    build: Callable[[Any], Algorithm],
    params: PyTree | Callable[[Key], PyTree],
    federation: Federation,
    key: Key,
    *,
    rounds: int,
    measure: Mapping[str, Callable],
    alphas: Sequence[float] | np.ndarray = GRID,
    by: str | None = None,
    every: int | None = None,
    **options: Any,
) -> Tuned:
    """Try a grid of alphas side by side, and let every client choose.

    Ties go to the largest alpha, the most shared one. A client without a value on
    validation rows takes ``common``, the alpha whose mean over the others is best. A
    model that diverged is worse than all others.

    Args:
        build: from alpha, a traced number, to an algorithm.
        params: the initial parameters, or a function of a key that draws them.
        federation: the clients' data, with validation rows.
        key: one seed, ``jax.random.key(0)``.
        rounds: communication rounds, of every alpha.
        measure: measures by name, see ``metrics``.
        alphas: the grid, numbers in [0, 1].
        by: the measure that decides; the first if None.
        every: rounds of a block; all of them if None.
        options: what else ``simulate`` takes; ``measure_on``, ``splits`` and ``over``
            are set here.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, fedblend as fb
        >>> rng = np.random.default_rng(0)
        >>> rows = rng.normal(size=(60, 2)), rng.normal(size=60)
        >>> federation = fb.federate(rows, np.split(np.arange(60), 3), validation=0.3)
        >>> loss = fb.objectives.squared_error(lambda params, inputs: inputs @ params)
        >>> tuned = fb.tune(
        ...     lambda alpha: fb.apfl(loss, 0.1, steps=5, batch_size=None, alpha=alpha,
        ...                           learn="fixed"),
        ...     jnp.zeros(2), federation, jax.random.key(0), rounds=5,
        ...     measure={"loss": fb.metrics.mean_loss(loss)})
        >>> tuned.validation.shape, tuned.personal(2).shape
        ((5, 3), (2,))
    """
    grid = np.unique(np.asarray(ALPHAS("alphas", alphas), np.float64))
    if key.ndim:
        raise ValueError(f"key: {len(key)} keys; a choice is made for one seed")
    if federation.validation is None or not federation.validation.total:
        raise ValueError(
            "federation: has no validation rows to choose on; "
            "federate(..., validation=0.2) holds some out"
        )
    by = next(iter(measure), "") if by is None else by
    if by not in measure:
        raise ValueError(f"by: {by!r} is not measured; it is one of {list(measure)}")
    splits = [name for name in ("validation", "test") if name in federation.splits]
    run = simulate(
        *(build, params, federation, key),
        rounds=rounds,
        every=max(rounds, 1) if every is None else every,
        over=jnp.asarray(grid, float),
        measure=measure,
        measure_on=range(federation.clients),
        splits=splits,
        **options,
    ).complete()
    values = {
        split: np.stack([np.asarray(m[split]["personal"][by]) for m in run.measured])
        for split in splits
    }
    validation = values["validation"]
    if np.isnan(validation).all():
        raise ValueError(f"by: {by!r} has no value on any client's validation rows")
    lanes, common = choose(validation, HIGHER_IS_BETTER[by.partition("@")[0]])
    return Tuned(
        alphas=grid,
        validation=validation,
        test=values.get("test"),
        chosen=grid[lanes],
        common=float(grid[common]),
        unsure=np.asarray(np.isnan(validation).all(axis=0)),
        metric=by,
        run=run,
    )


def choose(values: np.ndarray, higher_is_better: bool) -> tuple[np.ndarray, int]:
    """The best row of every column, and the row of the best mean; ties go to the last.

    Columns without any value are in no mean and take the row of the best one.

    >>> values = np.array([[3.0, 1.0, np.nan], [2.0, 1.0, np.nan]])
    >>> lanes, common = choose(values, higher_is_better=True)
    >>> lanes.tolist(), common
    ([0, 1, 0], 0)
    """
    scores = values if higher_is_better else -values
    unknown = np.isnan(values).all(axis=0)
    # In float64: a mean of many float32 values would make and break ties by itself.
    scores = np.where(np.isnan(values), -np.inf, scores).astype(np.float64)
    common = _last_best(scores[:, ~unknown].mean(axis=1))
    return np.where(unknown, common, _last_best(scores)), int(common)


def _last_best(scores: np.ndarray) -> Any:
    return len(scores) - 1 - scores[::-1].argmax(axis=0)
