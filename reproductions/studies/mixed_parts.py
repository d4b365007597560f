# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of Mixed FL's long claims, for several processes side by side on one GPU.

    python mixed_parts.py OUT M4 oracle "clients alone"
    python mixed_parts.py OUT M4-paper-sized parallel
    python mixed_parts.py OUT M6 text movies
    python mixed_parts.py OUT M8 faces                  all algorithms
    python mixed_parts.py OUT M8 text one_way two_way
    python mixed_parts.py OUT M9 "character model" parallel
    python mixed_parts.py OUT M12 one_way

Each caches what it measures where ``fedblend reproduce mixed --out OUT`` looks for
it, which then has the rest to do, if any, and writes the pages.
"""

import sys
import time
from pathlib import Path
from typing import Any

from fedblend_reproductions.mixed import (
    characters,
    clipping_runs,
    disagreement,
    divergence_runs,
    steps_and_rates,
    text,
)
from fedblend_reproductions.mixed.task import ALGORITHMS


def part(out: Path, claim: str, names: list[Any]) -> None:
    """Measure these methods, tasks or algorithms of a claim."""
    paper_sized = claim == "M4-paper-sized"
    page = "mixed_paper_sized" if paper_sized else "mixed"
    folder = out / page / "cached" / claim.partition("-")[0]
    if claim.startswith("M4"):
        size = characters.PAPER if paper_sized else characters.FULL
        characters.found(folder, text.task(size), size, names or characters.NEEDED)
    if claim == "M6":
        disagreement.found(folder, False, names or list(disagreement.PAPER))
    if claim == "M8":
        task, *algorithms = names
        setting = steps_and_rates.SETTINGS[task]
        here = steps_and_rates.task(task, False)
        steps_and_rates.found(folder, task, here, setting, algorithms or ALGORITHMS)
    if claim == "M9":
        model, *variants = names
        size = divergence_runs.SIZES[model]
        these = variants or list(divergence_runs.VARIANTS)
        divergence_runs.found(folder, model, text.task(size), size, these)
    if claim == "M12":
        size = clipping_runs.FULL
        task = text.task(size.round)
        clipping_runs.found(folder, task, size, names or ALGORITHMS)


if __name__ == "__main__":
    begun = time.perf_counter()
    part(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    print(f"{' '.join(sys.argv[2:])}: {time.perf_counter() - begun:.0f} s", flush=True)
