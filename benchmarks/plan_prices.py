# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Does ``fedblend plan`` name the cheapest solver? 4 datasets, 5 prices up to down.

    python benchmarks/plan_prices.py [--sets a6a ijcnn1] [--rows 1000] [--out FILE]

For each dataset all candidates of the planner are run to a certificate of EPS, once
with the seed of the plan and once with another seed, which is what is compared with. A
run is given up when it costs LOST times the best one at every price. The planner itself
tries the candidates of its short list only. A plan is right if
its solver is the cheapest one of the second seed; otherwise the ratio of the costs
tells what following it loses. ``certified`` chooses by theory alone, without trials.
"""

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from fedblend.config.config import check
from fedblend.experiments.plan.candidates import Candidate, config_of
from fedblend.experiments.plan.offers import offers, shortlist
from fedblend.experiments.plan.prices import Prices
from fedblend.experiments.plan.problem import Problem, problem
from fedblend.experiments.plan.trial import Trial, trial

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
LOST, MOST = 1.2, 20_000


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


def run_all(
    found: Problem, order: list[Candidate], seed: int
) -> dict[str, dict[str, Any]]:
    """Every candidate to its certificate: rounds and bits, by name."""
    best = dict.fromkeys(PRICES, math.inf)
    done: dict[str, dict[str, Any]] = {}

    def too_much(up: int, down: int) -> bool:
        return all(
            price.cost(up, down, CLIENTS) > LOST * best[name]
            for name, price in PRICES.items()
        )

    key = jax.random.key(seed)
    seeded = found._replace(built=found.built._replace(key=key))
    for candidate in order:
        config = config_of(found, candidate, f"algorithm.alpha={ALPHA}")
        begun = time.perf_counter()
        run: Trial = trial(seeded, config, EPS, MOST, too_much)
        seconds = time.perf_counter() - begun
        row = {**run._asdict(), "solver": candidate.solver, "seconds": seconds}
        row["costs"] = {
            name: price.cost(run.up, run.down, CLIENTS) if run.arrived else math.inf
            for name, price in PRICES.items()
        }
        done[candidate.name] = row
        best = {name: min(best[name], row["costs"][name]) for name in PRICES}
        print(f"  seed {seed} {candidate.name}: {row['rounds']} rounds, ", end="")
        print(
            f"{'arrived' if run.arrived else 'given up'}, {seconds:.1f} s", flush=True
        )
    return done


def cheapest(rows: dict[str, dict[str, Any]], price: str) -> str:
    """The name with the smallest cost."""
    return min(rows, key=lambda name: rows[name]["costs"][price])


def compare(name: str, rows: int) -> dict[str, Any]:
    """The planner's choices on a dataset, and what is really cheapest."""
    found = problem(check(configuration(name, rows), name))
    known = found.known
    print(f"{name}: {found.personal.shape[1]} parameters, ", end="")
    print(f"L/mu = {known.L_alpha / known.mu_alpha:.0f}", flush=True)
    asked: Any = {"alpha": ALPHA, "trials": False}
    plans = {
        price: offers(found, EPS, prices=of, **asked) for price, of in PRICES.items()
    }
    lists = {
        price: {one.candidate.name for one in shortlist(made)}
        for price, made in plans.items()
    }
    order = [one.candidate for one in offers(found, EPS, **asked)]
    planned, truth = (run_all(found, order, seed) for seed in (0, 1))
    return {
        "planned": planned,
        "truth": truth,
        "pairs": {
            price: pair(
                truth,
                cheapest({name: planned[name] for name in lists[price]}, price),
                plans[price][0].candidate.name,
                price,
            )
            for price in PRICES
        },
    }


def pair(
    truth: dict[str, dict[str, Any]], typical: str, certified: str, price: str
) -> dict[str, Any]:
    """What is cheapest, and what both ways to choose lose against it."""
    best = cheapest(truth, price)
    least = truth[best]["costs"][price]
    return {
        "best": best,
        **{
            way: {
                "choice": choice,
                "right": truth[choice]["solver"] == truth[best]["solver"],
                "same_options": choice == best,
                "ratio": truth[choice]["costs"][price] / least,
            }
            for way, choice in (("typical", typical), ("certified", certified))
        },
    }


def main() -> None:
    """Compare on the datasets asked for, and print the count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    compiled = tempfile.mkdtemp()  # both seeds run the same programs
    jax.config.update("jax_compilation_cache_dir", compiled)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    results = {name: compare(name, arguments.rows) for name in arguments.sets}
    pairs = [
        (name, price, pair)
        for name, found in results.items()
        for price, pair in found["pairs"].items()
    ]
    for name, price, found in pairs:
        lines = [
            f"{way} {found[way]['choice']} ({found[way]['ratio']:.2f} x)"
            for way in ("typical", "certified")
        ]
        print(f"{name} {price}: cheapest {found['best']}; {'; '.join(lines)}")
    for way in ("typical", "certified"):
        right = sum(found[way]["right"] for *_, found in pairs)
        worst = max(found[way]["ratio"] for *_, found in pairs)
        print(f"{way}: {right} of {len(pairs)} right, at most {worst:.2f} x the cost")
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
