# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How much memory is free, on the device and on the host."""

import os
from pathlib import Path

import jax
import numpy as np

from fedblend.core import PyTree

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
