# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The engine over the hand-written loop, kept under a bound: what CI runs.

Both compute the same rounds in one process by turns, and the least times are compared:
other programs only ever add time. It ends as soon as the ratio is within the bound, and
fails if it is not after ``--seconds`` of turns.
"""

import argparse
import sys
import time

import engine
import handwritten


def least_times(block: int, most: float, seconds: float) -> dict[str, float]:
    """Seconds a round, as soon as their ratio is at most ``most``."""
    peers = {
        "fedblend": engine.prepare("softmax", block),
        "by hand": handwritten.prepare("softmax", block),
    }
    for advance in peers.values():
        advance()
    least = dict.fromkeys(peers, float("inf"))
    begun, turns = time.perf_counter(), 0
    while turns < 3 or (
        least["fedblend"] > most * least["by hand"]
        and time.perf_counter() - begun < seconds
    ):
        for name, advance in peers.items():
            start = time.perf_counter()
            advance()
            least[name] = min(least[name], (time.perf_counter() - start) / block)
        turns += 1
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=float, default=1.25, help="the bound")
    parser.add_argument("--block", type=int, default=10, help="rounds of a turn")
    parser.add_argument("--seconds", type=float, default=15)
    given = parser.parse_args()
    least = least_times(given.block, given.most, given.seconds)
    ratio = least["fedblend"] / least["by hand"]
    times = ", ".join(f"{name} {1000 * of:.2f} ms" for name, of in least.items())
    print(f"engine over hand-written loop: {ratio:.2f}, bound {given.most} ({times})")
    sys.exit(ratio > given.most)


if __name__ == "__main__":
    main()
