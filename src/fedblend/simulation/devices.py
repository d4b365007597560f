# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The devices of a simulation, and the host beside them.

A sweep spreads its replicas first; the devices that are left share each cohort. A
cohort is cut into chunks of clients, and groups of consecutive chunks (``Cut``): the
clients of a chunk are trained side by side, the chunks of a group are summed one after
another, and the sums of groups are added by a binary tree. A device of the axis of
clients owns consecutive groups, and as many consecutive slots of the states.
Everything that crosses the mesh is moved and never summed in an order of the mesh:
results are the same bits on any number of devices along this axis.

Functions with a ``width`` run on one of so many devices along the axis of clients.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedblend import cpu_devices
from fedblend.core import PyTree
from fedblend.errors import InputError
from fedblend.simulation.aggregators import GROUPS, group_edges, tree_sum

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


def copy_rows(into: np.ndarray, to: Any, rows: np.ndarray, at: Any) -> None:
    """Copy the rows at some places to some places of ``into``."""
    if rows[:1].nbytes < LARGE:
        into[to] = rows[at]
        return
    pairs = [(into[there], rows[here]) for there, here in zip(to, at, strict=True)]
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


REPLICAS, CLIENTS = "replicas", "clients"
TUNED_ROUNDS = 5000
"""Rounds from which on a run on a GPU has XLA time kernels while it compiles."""


def has_accelerator() -> bool:
    """Whether devices compute while the host does something else, as GPUs do."""
    return jax.default_backend() != "cpu"


def usable_devices(most: int | None) -> Sequence[Any]:
    """The devices a run may use, at most so many."""
    if jax.default_backend() == "cpu":
        cpu_devices.count_devices()
        cpu_devices.warn_once()
    if jax.process_count() > 1:
        raise InputError(
            f"simulate: runs in one process, and JAX has {jax.process_count()} "
            "(jax.distributed.initialize); start every run in a process of its own"
        )
    return jax.devices()[:most]


def mesh_shape(devices: int, replicas: int | None, groups: int) -> tuple[int, int]:
    """How so many devices are shared by replicas, and by the groups of each."""
    rows = math.gcd(devices, replicas or 1)
    return rows, min(groups, 1 << (devices // rows).bit_length() - 1)


def mesh_of(
    devices: Sequence[Any], replicas: int | None = None, groups: int = 1
) -> Mesh:
    """A mesh for this many replicas, each with so many groups (a power of two)."""
    shape = mesh_shape(len(devices), replicas, groups)
    chosen = np.array(devices[: math.prod(shape)]).reshape(shape)
    return Mesh(chosen, (REPLICAS, CLIENTS))


def share_devices(
    most: int | None,
    replicas: int | None,
    chunk: int | None,
    cohort: int,
    entries: int,
) -> tuple[int, Mesh]:
    """The size of chunks, and the devices that share them.

    Args:
        most: devices at most; all there are if None.
        replicas: of a sweep.
        chunk: clients of a chunk at most, if the user says so.
        cohort: clients of a round.
        entries: of one client's parameters, in all replicas.
    """
    chosen = usable_devices(most)
    _, each = mesh_shape(len(chosen), replicas, GROUPS)
    cut = Cut(cohort, chunk_size(chunk, cohort, entries, each))
    return cut.chunk, mesh_of(chosen, replicas, cut.groups)


def sharding(mesh: Mesh, replicas: int | None, clients: int | None) -> NamedSharding:
    """How an array lies on the mesh, given its axis of replicas.

    ``clients`` is the axis of clients in an array of one replica.
    """
    names = [] if clients is None else [None] * clients + [CLIENTS]
    if replicas is not None:
        names += [None] * (replicas - len(names))
        names.insert(replicas, REPLICAS)
    return NamedSharding(mesh, P(*names))


def compiler_options(spread: bool, rounds: int) -> dict[str, Any]:
    """Options of XLA for a program of a run of so many rounds.

    XLA merges equal expressions before it simplifies others only where a program has
    several partitions, and rounds otherwise where it has one. Without that pass both
    are simplified alike on a CPU; a program that is not ``spread`` needs none of it.

    For a GPU XLA compiles and times many kernels for each product. Short runs do
    without: what that gains is less than the seconds it takes.
    """
    if jax.default_backend() == "cpu":
        return {"xla_disable_hlo_passes": "cse"} if spread else {}
    chosen = "xla_gpu_autotune_level" in os.environ.get("XLA_FLAGS", "")
    if chosen or rounds >= TUNED_ROUNDS:
        return {}
    return {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def first_copy(tree: PyTree) -> PyTree:
    """Arrays that all devices have, as they lie on the first one."""
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)


def total(width: int, sums: PyTree) -> PyTree:
    """The sum of all devices' groups, each device's stacked in their order."""
    sums = tree_sum(sums)
    if width > 1:
        sums = tree_sum(jax.lax.all_gather(sums, CLIENTS))
    # What follows is compiled alike, wherever the sums come from.
    return jax.lax.optimization_barrier(sums)


def gather(width: int, tree: PyTree) -> PyTree:
    """All devices' rows, one device's after another's."""
    if width == 1:
        return tree
    return jax.lax.all_gather(tree, CLIENTS, tiled=True)


def run_once(width: int, function: Callable[..., PyTree], *arguments: Any) -> PyTree:
    """What a function of the same arguments on all devices returns, on all of them.

    One with effects, such as noise from the operating system, is called on the first
    device alone: others would draw another noise for the same sum.
    """
    if width == 1 or not jax.make_jaxpr(function)(*arguments).effects:
        return function(*arguments)
    shapes = jax.eval_shape(function, *arguments)

    def nothing(*arguments):
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    first = jax.lax.axis_index(CLIENTS) == 0
    found = jax.lax.cond(first, function, nothing, *arguments)
    return jax.tree.map(
        lambda leaf: decode_bits(jax.lax.psum(encode_bits(leaf), CLIENTS), leaf.dtype),
        found,
    )


def read(width: int, states: PyTree, slots: jax.Array) -> PyTree:
    """The states in these slots, which any device may own.

    Every device puts in what it owns of all devices' requests, and zeros elsewhere.
    The sums are of the bits as whole numbers, and so exact.
    """
    if width == 1:
        return jax.tree.map(lambda leaf: leaf[slots], states)
    asked = jax.lax.all_gather(slots, CLIENTS, tiled=True)

    def fetch(leaf):
        place, own = _own(asked, len(leaf))
        rows = encode_bits(leaf[jnp.where(own, place, 0)])
        rows = jnp.where(own.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)
        rows = jax.lax.psum_scatter(rows, CLIENTS, tiled=True)
        return decode_bits(rows, leaf.dtype)

    return jax.tree.map(fetch, states)


def write(width: int, states: PyTree, slots: jax.Array, rows: PyTree) -> PyTree:
    """The states with these rows in these slots; no device has those of padding."""
    if width == 1:
        return jax.tree.map(
            lambda leaf, new: leaf.at[slots].set(new, mode="drop"), states, rows
        )
    asked, rows = jax.lax.all_gather((slots, rows), CLIENTS, tiled=True)

    def put(leaf, new):
        place, own = _own(asked, len(leaf))
        return leaf.at[jnp.where(own, place, len(leaf))].set(new, mode="drop")

    return jax.tree.map(put, states, rows)


def _own(slots: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """The places of slots on this device, and which of them it has."""
    place = slots - jax.lax.axis_index(CLIENTS) * rows
    return place, (place >= 0) & (place < rows)


def encode_bits(leaf: jax.Array) -> jax.Array:
    """The same bits as whole numbers."""
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf.astype(jnp.uint8) if leaf.dtype == bool else leaf
    width = jnp.finfo(leaf.dtype).bits
    return jax.lax.bitcast_convert_type(leaf, f"uint{width}").astype(
        f"uint{max(width, 32)}"  # shorter ones are not summed everywhere
    )


def decode_bits(leaf: jax.Array, dtype) -> jax.Array:
    """What ``encode_bits`` made whole numbers of."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return leaf.astype(dtype)
    whole = leaf.astype(f"uint{jnp.finfo(dtype).bits}")
    return jax.lax.bitcast_convert_type(whole, dtype)


CPU_CHUNK, CPU_ENTRIES = 8, 2**19
"""Clients trained side by side on a CPU: at most so many, while their parameters
together have no more entries than that; docs/benchmarks.md has the measurement."""
CHUNK_COST = 0.5
"""What a chunk costs besides its clients, in clients of a small model."""


class Cut(NamedTuple):
    """``clients`` in chunks of ``chunk``, the last one padded."""

    clients: int
    chunk: int

    @property
    def edges(self) -> np.ndarray:
        """The first chunk of each group, and the end of the last group."""
        return group_edges(-(-self.clients // self.chunk))

    @property
    def groups(self) -> int:
        """The number of groups, a power of two."""
        return len(self.edges) - 1

    @property
    def turns(self) -> np.ndarray:
        """The number of chunks of each group."""
        return np.diff(self.edges).astype(np.int32)

    def arrange(self, values: np.ndarray, padding) -> np.ndarray:
        """Values over clients as [..., groups, chunks of a group, chunk]."""
        number = np.arange(self.turns.max())
        real = number < self.turns[:, None]
        first = np.where(real, self.edges[:-1, None] + number, self.edges[-1])
        places = first[..., None] * self.chunk + np.arange(self.chunk)
        after = np.full((*values.shape[:-1], 1), padding, values.dtype)
        values = np.concatenate([values, after], axis=-1)
        return values[..., np.minimum(places, self.clients)]


def chunk_size(given: int | None, cohort: int, entries: int, devices: int) -> int:
    """How many clients to train side by side.

    On a CPU the number of devices does not matter, so that a run has the same bits on
    any: the size is the one that takes least of the time of one, two, four and eight
    devices together.

    Args:
        given: what the user asks for, at most.
        cohort: clients of a round.
        entries: of one client's parameters, in all replicas.
        devices: that share a cohort.
    """
    if given is None and jax.default_backend() != "cpu":
        given = -(-cohort // devices)
    if given is not None:
        pieces = -(-cohort // min(given, cohort))
        return -(-cohort // pieces)
    most = min(max(CPU_ENTRIES // max(entries, 1), 1), CPU_CHUNK)
    sizes = range(min(most, cohort), 0, -1)
    return min(sizes, key=lambda chunk: _device_time(Cut(cohort, chunk)))


def _device_time(cut: Cut) -> float:
    """The time of 1, 2, 4 and 8 devices that share a cohort, idle or not."""
    widths = 2 ** np.arange(GROUPS.bit_length())
    turns = [
        cut.turns.reshape(min(width, cut.groups), -1).sum(axis=1).max()
        for width in widths
    ]
    return (cut.chunk + CHUNK_COST) * float(widths @ turns)
