# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What the number of clients trained side by side costs, by hand and in fedblend.

All choices are compiled first and then take turns, so that a busy machine slows all of
them alike. The smallest time says what the work costs, the median what was seen.
"""

import argparse
import statistics
import time
from functools import partial

import engine
import handwritten
import work

CHUNKS = (1, 2, 4, 5, 10, 20, 50, 100)


def choices() -> dict:
    """Every way to compute a round that is compared here."""
    by_hand = {
        f"handwritten, unroll {unroll}": partial(handwritten.prepare, unroll=unroll)
        for unroll in (1, 2)
    }
    return by_hand | {"fedblend": engine.prepare}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=list(work.LAYERS))
    parser.add_argument("--chunks", nargs="+", type=int, default=CHUNKS)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    print("| model | way | chunk | smallest s | median s |\n|---|---|---|---|---|")
    for model in options.models:
        ready = {
            (way, chunk): prepare(model, 1, chunk=chunk)
            for way, prepare in choices().items()
            for chunk in options.chunks
        }
        for advance in ready.values():
            advance()
        seconds = {name: [] for name in ready}
        for _ in range(options.repeats):
            for name, advance in ready.items():
                start = time.perf_counter()
                advance()
                seconds[name].append(time.perf_counter() - start)
        for (way, chunk), times in seconds.items():
            least, middle = min(times), statistics.median(times)
            print(f"| {model} | {way} | {chunk} | {least:.4f} | {middle:.4f} |")


if __name__ == "__main__":
    main()
