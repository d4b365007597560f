# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What devices of a CPU are worth: this commit beside another one, and by hand.

``python devices.py --base ../old`` has the engine of the checkout ``../old`` take turns
with this one on one device and on all, and with the hand-written loop on as many.
"""

import argparse
import os
from pathlib import Path

import work
from turns import PYTHON, Found, Peer, take_turns

CORES = len(os.sched_getaffinity(0))


def start(model: str, base: Path | None, block: int) -> dict[str, Peer]:
    """The peers by name."""
    common = (model, "--hold", "--block", block)
    peers = {
        "fedblend": Peer("fedblend", PYTHON, "engine.py", *common),
        "one device": Peer("", PYTHON, "engine.py", *common, "--devices", 1),
        "by hand": Peer("", PYTHON, "handwritten.py", *common, "--devices", CORES),
        "by hand, one device": Peer("", PYTHON, "handwritten.py", *common),
    }
    if base is not None:
        peers["base"] = Peer("", PYTHON, "engine.py", *common, checkout=base.resolve())
    return peers


def report(model: str, found: dict[str, Found]) -> None:
    for name, one in found.items():
        print(f"{model}, {name}: median {one.median:.4f} s, least {one.least:.4f} s")
    pairs = [("fedblend", "one device"), ("fedblend", "by hand")]
    pairs += [("one device", "by hand, one device")]
    pairs += [(name, "base") for name in ("fedblend", "one device") if "base" in found]
    for name, other in pairs:
        ratio = found[name].ratio_to(found[other])
        least = found[name].least / found[other].least
        print(f"{model}, {name} / {other}: {ratio:.2f} by turns, {least:.2f} of least")


def main(models: list[str], base: Path | None, block: int, repeats: int) -> None:
    for model in models:
        peers = start(model, base, block)
        for name, peer in list(peers.items()):
            if peer.failure is not None:
                print(f"{name} is left out: {peer.failure}")
                del peers[name]
        found = take_turns(list(peers.values()), repeats)
        report(model, dict(zip(peers, found, strict=True)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=list(work.LAYERS))
    parser.add_argument("--base", type=Path, help="a checkout of another commit")
    parser.add_argument("--block", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=7)
    main(**vars(parser.parse_args()))
