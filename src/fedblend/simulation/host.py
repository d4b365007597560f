# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The host beside its device: threads, free memory, and a warning if nothing moves."""

import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedblend.core import PyTree
from fedblend.simulation import devices

LARGE = 2**16
"""Bytes of a row that is worth a copy of its own."""
COPIERS = 8
"""Threads that copy rows; a few saturate the memory of a machine."""


class Worker:
    """Threads that do what they are given in order, while the device computes."""

    def __init__(self, threads: int = 1):
        self._threads = ThreadPoolExecutor(threads, "fedblend-worker")
        self._open: deque[Future] = deque()

    def submit(self, job: Callable[..., Any], *arguments: Any) -> Future:
        """Do this; one thread does it after all that was submitted before."""
        while self._open and self._open[0].done():
            self._open.popleft().result()
        self._open.append(self._threads.submit(job, *arguments))
        return self._open[-1]

    def wait(self) -> None:
        """Until all is done; raises what a job raised."""
        while self._open:
            self._open.popleft().result()


def read_rows(into: np.ndarray, rows: np.ndarray, places: np.ndarray) -> None:
    """Copy the rows of these places to the first ones of ``into``."""
    if rows[:1].nbytes < LARGE:
        into[: len(places)] = rows[places]
        return
    _copy([(into[to], rows[at]) for to, at in enumerate(places)])


def write_rows(into: np.ndarray, rows: np.ndarray, places: np.ndarray) -> None:
    """Copy the first rows to these places of ``into``."""
    if into[:1].nbytes < LARGE:
        into[places] = rows[: len(places)]
        return
    _copy([(into[to], rows[at]) for at, to in enumerate(places)])


def _copy(pairs: list[tuple[np.ndarray, np.ndarray]]) -> None:
    # NumPy lets go of the interpreter while it copies.
    for _ in _copiers().map(lambda pair: np.copyto(*pair), pairs):
        pass


@cache
def _copiers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(COPIERS, os.cpu_count() or 1), "fedblend-copier")


CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
"""Limit and use of the memory of a container, in the two versions of cgroups."""


def bytes_of(shapes: PyTree) -> int:
    """Bytes that arrays of these shapes and dtypes take on the device.

    >>> bytes_of(np.zeros((3, 2), np.float32))
    24
    """
    return sum(
        int(np.prod(leaf.shape)) * jax.dtypes.canonicalize_dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(shapes)
    )


def free_device() -> int | None:
    """Bytes that a device may still take; None where it computes in host memory."""
    about = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in about:
        return None
    return max(about["bytes_limit"] - about.get("bytes_in_use", 0), 0)


def free_host() -> int:
    """Bytes of memory that this process may still take, by the system and cgroups."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for limit, used in CGROUPS:
        most, now = _text(limit).strip(), _text(used).strip()
        if most.isdecimal() and now.isdecimal():
            free = min(free, int(most) - int(now))
    return max(free, 0)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


SECONDS = 60.0
"""Time without progress after which a run warns."""
LOOKS = 5
"""Looks at the process in that time; a process that was stopped misses one of them."""
IDLE = 0.01
"""CPU seconds per second below which a process computes nothing."""


class Watch:
    """Warns once if the process computes nothing while it waits for a CPU.

    A program that is slow uses CPU time, and gets no warning. A host that waits for a
    GPU, or for another process, uses none: they are not watched.

    ``after`` has the round after which the program waits: a new list for each block,
    an empty one between blocks.
    """

    def __init__(self, algorithm: str):
        self.after: list[int] = []
        self._algorithm, self._ended = algorithm, threading.Event()

    def __enter__(self) -> "Watch":
        if not devices.beside_host() and jax.process_count() == 1:
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
