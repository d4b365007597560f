# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Methods with equal budgets of tuning, compared: every one gets as many values.

A method is a function of a value, such as its rate, to an algorithm. Each is run with
each of its values, with the same seeds, clients and rounds; the mean over clients and
seeds of the personal models on validation rows chooses. The run with that value is the
one that is compared on test rows, which choose nothing. Training alone is tuned as
well, and for each of its values trains for as long as is best, see ``train_alone``.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.checks import COUNT
from fedblend.core import Algorithm, Key, PyTree
from fedblend.data.federated import FederatedData
from fedblend.errors import RunError, UserError
from fedblend.metrics import Measure, Metric, main_first, make_metrics
from fedblend.runs.compare import compare
from fedblend.runs.comparison import Comparison, Rows, write_rows
from fedblend.runs.paired import ALONE
from fedblend.simulation.run import Run
from fedblend.simulation.simulate import simulate
from fedblend.simulation.train_alone import train_alone

Builder = Callable[[Any], Algorithm]
"""From a value to an algorithm."""


class TunedComparison(NamedTuple):
    """Methods that were tuned alike, and their comparison."""

    comparison: Comparison
    runs: Mapping[str, Run]
    """The run of each method with its best value."""
    chosen: Mapping[str, Any]
    """The best value of each method on validation rows."""
    scores: Rows
    """Every method, value, and what it scores on validation rows; ``tuned.csv``."""
    at_edge: Sequence[str]
    """The methods whose best value is the first or last: a wider grid may do better."""


def tune_alike(
    methods: Mapping[str, Builder],
    grid: Sequence[Any],
    params: PyTree | Callable[[Key], PyTree],
    federated_data: FederatedData,
    *,
    rounds: int,
    measure: Mapping[str, Metric | Measure],
    seeds: int = 5,
    local: Builder | None = None,
    metrics: Sequence[str] | None = None,
    out: str | Path = "runs/tuned",
    **settings: Any,
) -> TunedComparison:
    """Tune methods with equal budgets on validation rows, and compare them.

    Args:
        methods: by name, a function of a value of the grid to the algorithm.
        grid: the values, in order; several settings of a method are one value, such as
            ``{"rate": 0.1, "lam": 1.0}``.
        params: as in ``simulate``.
        federated_data: likewise, with validation rows.
        rounds: likewise.
        measure: likewise; the main metric chooses.
        seeds: how many: the keys of 0, 1, ...
        local: a function of a value to ``local_only``, tuned too.
        metrics: what to test differences of; the main metric if None.
        out: the folder of the comparison, see ``compare``.
        **settings: further ones of ``simulate``, the same for all methods.

    Raises:
        InputError: one line: there are no validation rows, or no value works.
    """
    if not isinstance(federated_data, FederatedData) or not federated_data.validates:
        allowed = "data with validation rows, such as of federate(..., validation=0.2)"
        raise UserError("federated_data", federated_data, allowed, "this")
    builders = {**methods} if local is None else {ALONE: local, **methods}
    known, scores, runs = make_metrics(measure), list[dict[str, Any]](), {}
    metric = main_first(known)[0]
    sign = 1 if known[metric].higher_is_better else -1
    key = jax.vmap(jax.random.key)(jnp.arange(COUNT("seeds", seeds)))
    given = (params, federated_data, key)
    shared: dict[str, Any] = {"rounds": rounds, "measure": known, **settings}
    chosen: dict[str, Any] = {}
    for name, build in builders.items():
        best = (0.0, 0.0)
        for value in grid:
            if build is local:
                run = train_alone(build(value), *given, metric=metric, **shared)
            else:
                run = simulate(build(value), *given, **shared, local=runs.get(ALONE))
            run.warns = False  # some values of a grid may diverge
            ends = run.complete().results
            found = [one["validation"]["personal"][metric] for one in ends]
            score = float(np.mean([spread.mean for spread in found]))
            scores.append({"run": name, "value": value, metric: score})
            # A mean leaves out clients without a number: none may be lost by a value.
            this = float(sum(spread.clients for spread in found)), sign * score
            if np.isfinite(score) and (name not in runs or this > best):
                best, runs[name], chosen[name] = this, run, value
        if name not in runs:
            raise RunError(f"{name}: {metric} is finite for no value of the grid")
    made = compare({name: runs[name] for name in methods}, out, metrics=metrics)
    at_edge = [name for name, of in chosen.items() if of in (grid[0], grid[-1])]
    write_rows(Path(out) / "tuned.csv", scores)
    return TunedComparison(made, runs, chosen, scores, at_edge)
