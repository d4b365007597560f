# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Work beside the device: jobs that begin in order, and rows copied by threads."""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

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
