# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""fedblend and the hand-written loop in one process, by turns, at equal chunks.

What is left between them is the engine: ``python side_by_side.py mlp --chunks 2 5``.
On a GPU ``--chunks 100 --block 20 --blocks 5``: a turn of several blocks, in which the
engine looks at one while the device computes the next, as in a run that nobody stops.
"""

import argparse
import statistics
import time

import engine
import handwritten
import work


def several(blocks, advance):
    """So many blocks, one after another."""

    def all_of_them():
        for _ in range(blocks):
            advance()

    return all_of_them


def main(model: str, chunks: list[int], block: int, blocks: int, repeats: int) -> None:
    peers = {}
    for chunk in chunks:
        for unroll in (1, 2):
            name = f"by hand, chunk {chunk}, unroll {unroll}"
            peers[name] = several(
                blocks, handwritten.prepare(model, block, chunk=chunk, unroll=unroll)
            )
        peers[f"fedblend, chunk {chunk}"] = engine.prepare(
            model, block, blocks=blocks, chunk=chunk
        )
    for advance in peers.values():
        advance()
    seconds = {name: [] for name in peers}
    for _ in range(repeats):
        for name, advance in peers.items():
            begun = time.perf_counter()
            advance()
            taken = (time.perf_counter() - begun) / (block * blocks)
            seconds[name].append(taken)
    for name, taken in seconds.items():
        print(f"{name}: least {min(taken):.6f}, median {statistics.median(taken):.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=work.LAYERS)
    parser.add_argument("--chunks", type=int, nargs="+", default=[5, 20])
    parser.add_argument("--block", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=1, help="blocks of a turn")
    parser.add_argument("--repeats", type=int, default=7)
    main(**vars(parser.parse_args()))
