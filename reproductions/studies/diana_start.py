# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""DIANA's start and step: numbers sent until f~ - f~* <= 1e-8, against descent.

    python diana_start.py [a6a mushrooms ...] [--seeds 5] [--k 1 2]

50 contiguous clients, alpha 1, lambda 0.1, no intercept, from x_avg, rand-k, float64.
For h_i = 0 and for h_i = the first gradient (its dense message counted), the rounds
until a seed is there, and what it has sent, both means over seeds. The steps are that
of the paper's Theorem 5, fedblend's (see ``theory.lyapunov``) and that with memories
half as fast. ``up`` is what gradient descent sends over what DIANA sends, ``both``
counts the dense model that every round sends down as well.
"""

import argparse

import fedblend as fb
from fedblend import theory
from fedblend.compress import rand_k
from fedblend.config.tables.compress import first_memories
from fedblend_reproductions.flix import logistic
from fedblend_reproductions.flix.bounds_and_plans import descent_rounds
from fedblend_reproductions.flix.solver import gaps, solve

TARGET, CLIENTS = 1e-8, 50


def rounds_and_floats(of, step, wrap, rounds, seeds, every):
    """Until the target, means over seeds; None unless all of them are there."""
    trace = solve(
        of, [1.0], [step], rounds=rounds, every=every, seeds=seeds, wrap=wrap,
        until=TARGET / seeds, seed=1,
    )  # fmt: skip
    there = gaps(of, [1.0], trace.points)[0] <= TARGET
    if not there.any(axis=1).all():
        return None
    at = there.argmax(axis=1)
    return float(trace.rounds[at].mean()), float(trace.floats[at].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", default=["a6a", "mushrooms"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", nargs="+", default=["paper", "best", "half b"])
    chosen = parser.parse_args()
    print("data       k  step      start  rounds   up    both   chosen", flush=True)
    for name in chosen.names:
        of = logistic.problem(name, CLIENTS, intercept=False)
        most = descent_rounds(of)
        step = theory.steps.dgd(1.0, of.smoothness)
        plain = rounds_and_floats(of, step, lambda made: made, most, 1, 1)
        assert plain is not None
        rounds, sent = plain
        print(f"{name:10} {of.dim:>3} DGD              {rounds:6.0f}", flush=True)
        for k in chosen.k:
            omega = of.dim / k - 1
            fastest = 1 / (omega + 1)
            ways = {
                "paper": (4 * theory.steps.diana_convex(1.0, of.smoothness, omega), 1),
                "best": (theory.steps.diana(1.0, of.smoothness, omega), 1),
                "half b": (
                    theory.steps.diana(1.0, of.smoothness, omega, fastest / 2),
                    2,
                ),
            }
            for way, (own, slower) in ways.items():
                if way not in chosen.steps:
                    continue
                for start in ("zero", "first"):

                    def wrap(made, k=k, b=fastest / slower, start=start):
                        return fb.transforms.diana(made, rand_k(k), rate=b, start=start)

                    limit = round(2 * sent / k)
                    found = rounds_and_floats(
                        of, own, wrap, limit, chosen.seeds, max(limit // 1000, 1)
                    )
                    if found is None:
                        print(f"{name:10} {k:>3} {way:9} {start:6} not within {limit}")
                        continue
                    up = sent / found[1]
                    both = (sent + rounds * of.dim) / (found[1] + found[0] * of.dim)
                    rule = first_memories(omega, found[0])
                    print(
                        f"{name:10} {k:>3} {way:9} {start:6} {found[0]:6.0f} {up:5.2f} "
                        f"{both:6.3f}   {rule}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
