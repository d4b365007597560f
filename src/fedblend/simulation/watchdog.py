# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A watchdog that names a run on a CPU that makes no progress."""

import threading
import time
import warnings
from typing import Any

from fedblend.simulation.devices import has_accelerator

SECONDS = 60.0
"""Time without progress after which a run warns."""
LOOKS = 5
"""Looks at the process in that time; a process that was stopped misses one of them."""
IDLE = 0.01
"""CPU seconds per second below which a process computes nothing."""


class Watch:
    """Warns once if the process computes nothing while it waits for a CPU.

    A program that is slow uses CPU time, and gets no warning. A host that waits for a
    GPU uses none: it is not watched.

    ``after`` has the round after which the program waits: a new list for each block,
    an empty one between blocks.
    """

    def __init__(self, algorithm: str):
        self.after: list[int] = []
        self._algorithm, self._ended = algorithm, threading.Event()

    def __enter__(self) -> "Watch":
        if not has_accelerator():
            threading.Thread(target=self._look, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()

    def _look(self) -> None:
        idle, used, pause = 0, 0.0, SECONDS / LOOKS
        after: list[int] = []
        while idle < LOOKS:
            if self._ended.wait(pause):
                return
            before, since = after, used
            after, used = self.after, time.process_time()
            waits = after and after is before
            idle = idle + 1 if waits and used - since < IDLE * pause else 0
        (number,) = after
        warnings.warn(
            f"{self._algorithm}: no progress for {SECONDS:g} s after round {number}, "
            "and no CPU time used: threads of XLA may wait for each other; stop the "
            "run, and try devices=1 or the environment variable PJRT_NPROC=16",
            stacklevel=1,
        )
