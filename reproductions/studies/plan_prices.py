# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Does ``fedblend plan`` name the cheapest solver and 1/p? 4 datasets, 5 prices.

    python plan_prices.py [--sets a6a ijcnn1] [--rows 1000] [--out FILE]
        [--solvers locodl] [--prices 1:0 1:1]

A dense search runs every solver, with more k of rand-k and more copies than a plan
tries and with every 1/p of a fine grid, to a certificate of EPS, with seeds that no
plan has. A run is given up when it costs LOST times the best one at every price. For
each price the planner chooses by its own trials. Its solver is right if it is that of
the cheapest run; the ratio of the costs, on the seeds of the search, tells what
following the plan loses. ``certified`` is the choice without trials. Search and plan
may be restricted to some solvers, which tells whether their options are right. Datasets
that FILE already has are not run again.
"""

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import jax

from fedblend.config.config import check
from fedblend.runs.plan.candidates import (
    NAMES,
    Prices,
    SolverOptions,
    Ways,
    candidates,
    config_of,
    ways,
)
from fedblend.runs.plan.offers import SEEDS, Trial, offers, trial
from fedblend.runs.plan.problem import Problem, problem

SETS = {"a6a": 11220, "mushrooms": 8124, "w6a": 17188, "ijcnn1": 49990}
"""With their numbers of rows."""
PRICES = {
    "1:0": Prices(1, 0),
    "1:0.1": Prices(1, 0.1),
    "1:1": Prices(1, 1),
    "0.1:1": Prices(0.1, 1),
    "10:1": Prices(10, 1),
}
CLIENTS, L2, ALPHA, EPS = 20, 0.01, 0.5, 1e-6
GRID = [[2 ** (1 + way * number / 4) for number in range(13)] for way in (1, -1)]
"""1/p in units of the candidate's, up and down from twice that."""
PARTS, COPIES = (64, 32, 16, 8, 4, 2, 1), (4, 3, 2, 1)
"""k of rand-k as the dimension, and copies as the clients, divided by these."""
LOST, MOST = 1.5, 20_000


def configuration(name: str, rows: int) -> dict[str, Any]:
    """FLIX on about so many rows."""
    test = max(1 - rows / SETS[name], 0.0)
    return {
        "version": 1,
        "name": name,
        "data": {
            "source": name,
            "partition": "contiguous",
            "clients": CLIENTS,
            "test": test,
        },
        "model": {"name": "logistic", "l2": L2},
        "algorithm": {
            "name": "flix",
            "alpha": ALPHA,
            "rate": "theory",
            "steps": 1,
            "batch_size": "all",
            "personal": {"solver": "newton", "tolerance": 1e-9},
        },
        "run": {"rounds": 1, "precision": "float64"},
        "measure": {"local": False},
    }


class Search:
    """Mean costs of candidates, on seeds that no plan has."""

    def __init__(
        self, found: Problem, prices: dict[str, Prices], alpha: float, eps: float
    ):
        self.found, self.prices, self.alpha, self.eps = found, prices, alpha, eps
        self.best = dict.fromkeys(prices, math.inf)
        self.costs: dict[str, dict[str, float]] = {}
        self.solvers: dict[str, str] = {}
        self.trials: dict[str, tuple[Trial, Ways]] = {}

    def run(self, one: SolverOptions) -> dict[str, float]:
        """The mean cost at each price, infinite where that is given up."""
        if one.name in self.costs:
            return self.costs[one.name]
        family = f"{one.solver} {one.label}"
        if family not in self.trials:
            config = config_of(self.found, one, f"algorithm.alpha={self.alpha}")
            self.trials[family] = (
                trial(self.found, config, self.eps),
                ways(self.found, config),
            )
        run, cost = self.trials[family]

        def costs(rounds: float) -> dict[str, float]:
            return {
                name: cost._replace(prices=of).price(rounds).cost
                for name, of in self.prices.items()
            }

        few, more = costs(2), costs(3)
        most = max(
            2 + (LOST * self.best[name] - few[name]) / (more[name] - few[name])
            for name in self.prices
        )
        number = (2, SEEDS) if one.random else (1, 1)  # as in a plan: it compiles once
        begun = time.perf_counter()
        rounds = fmean(
            run(seeds, one.steps, min(most, MOST)).mean()
            for seeds in jax.random.split(jax.random.key(12345), number)
        )
        given_up = math.isinf(rounds)
        made = dict.fromkeys(self.prices, math.inf) if given_up else costs(rounds)
        self.costs[one.name], self.solvers[one.name] = made, one.solver
        self.best = {name: min(self.best[name], made[name]) for name in made}
        seconds = time.perf_counter() - begun
        print(f"  {one.name}: {rounds:.1f} rounds, {seconds:.1f} s", flush=True)
        return made

    def all(self, tried: list[SolverOptions]) -> None:
        """Every candidate, with longer and with shorter 1/p until that is given up."""
        for one in sorted(tried, key=lambda one: one.solver != "scafflix"):
            if one.steps is None:
                self.run(one)
                continue
            for grid in GRID:
                for factor in grid:
                    steps = max(round(one.steps * factor), 1)
                    made = self.run(one._replace(steps=steps))
                    if math.isinf(min(made.values())):
                        break


def compare(
    content: dict[str, Any],
    prices: dict[str, Prices],
    solvers: list[str],
    alpha: float,
    eps: float,
):
    """The planner's choices on a dataset, and what is really cheapest."""
    found = problem(check(content, content["name"]))
    known = found.constants(1.0)
    print(f"{content['name']}: {found.personal.shape[1]} parameters, ", end="")
    print(f"L/mu = {known.L_alpha / known.mu_alpha:.0f}", flush=True)
    search = Search(found, prices, alpha, eps)
    dense, among = (
        [one for one in some if one.solver in solvers]
        for some in (candidates(found, PARTS, COPIES), candidates(found))
    )
    search.all(dense)
    pairs = {}
    for name, of in prices.items():
        pairs[name] = pair = {}
        for way, trials in (("typical", True), ("certified", False)):
            begun = time.perf_counter()
            options: Any = {"prices": of, "trials": trials, "among": among}
            chosen = offers(found, eps, alpha=alpha, **options)[0]
            seconds = time.perf_counter() - begun
            cost = search.run(chosen.candidate)[name]
            pair[way] = {
                "choice": chosen.candidate.name,
                "seconds": seconds,
                "cost": cost,
            }
        best = min(search.costs, key=lambda one: search.costs[one][name])
        pair["best"] = best
        for way in ("typical", "certified"):
            choice = pair[way]["choice"]
            pair[way]["right"] = search.solvers[choice] == search.solvers[best]
            pair[way]["ratio"] = pair[way]["cost"] / search.costs[best][name]
        lines = [
            f"{way} {of['choice']} ({of['ratio']:.2f} x, {of['seconds']:.0f} s)"
            for way, of in pair.items()
            if way != "best"
        ]
        print(
            f"{content['name']} {name}: cheapest {best}; {'; '.join(lines)}", flush=True
        )
    return {"costs": search.costs, "pairs": pairs}


def main() -> None:
    """Compare on the datasets asked for, and print the count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument(
        "--prices", nargs="+", default=list(PRICES), choices=list(PRICES)
    )
    parser.add_argument(
        "--solvers", nargs="+", default=list(NAMES), choices=list(NAMES)
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    compiled = tempfile.mkdtemp()  # plans of all prices run the same programs
    jax.config.update("jax_compilation_cache_dir", compiled)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    prices = {name: PRICES[name] for name in arguments.prices}
    out: Path | None = arguments.out
    results = json.loads(out.read_text()) if out and out.exists() else {}
    for name in arguments.sets:
        if name not in results:
            content = configuration(name, arguments.rows)
            found = compare(content, prices, arguments.solvers, ALPHA, EPS)
            results[name] = found
            if out:
                out.write_text(json.dumps(results, indent=1))
    pairs = [pair for found in results.values() for pair in found["pairs"].values()]
    for way in ("typical", "certified"):
        right = sum(pair[way]["right"] for pair in pairs)
        close = sum(pair[way]["ratio"] <= 1.05 for pair in pairs)
        worst = max(pair[way]["ratio"] for pair in pairs)
        print(
            f"{way}: solver right in {right} of {len(pairs)}, within 1.05 x of the ",
            end="",
        )
        print(f"cheapest in {close}, at most {worst:.2f} x")


if __name__ == "__main__":
    main()
