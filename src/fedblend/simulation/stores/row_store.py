# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Where the clients' rows live: on the device, or in memory or files of the host.

Rows that fit the device are there, and a client is a start in them. Of others the
windows of those clients that are about to compute are packed one after another into a
buffer of a fixed size, which is then on the device; starts are those in the buffer. A
client reads nothing but its own window, so both give the same numbers.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedblend.checks import words
from fedblend.core import PyTree
from fedblend.data.federated import Shards
from fedblend.simulation import devices

DEVICE_SHARE = 0.5
"""Of the device's free memory, for rows."""
MOST_ROWS = 2**31 - 1
"""Rows of an array on the device, whose places are 32-bit integers."""

Packed = tuple[PyTree, np.ndarray]
"""Rows on the device, and where in them each window starts."""


def open_rows(kind: str, splits: Mapping[str, Shards]) -> "DeviceRows | HostRows":
    """The rows of these splits; ``kind`` is "auto", "device" or "host"."""
    words("auto", "device", "host")("rows", kind)
    if kind == "auto":
        free = devices.free_device()
        kind = choose_rows(splits, devices.free_host() if free is None else free)
    return DeviceRows(splits) if kind == "device" else HostRows(splits)


def choose_rows(splits: Mapping[str, Shards], free: int) -> str:
    """Where rows live, given the bytes that are free where a device computes."""
    different = {id(split.examples): split.examples for split in splits.values()}
    every = list(different.values())
    most = max(leaf.shape[0] for leaf in jax.tree.leaves(every))
    fits = devices.bytes_of(every) <= DEVICE_SHARE * free and most <= MOST_ROWS
    return "device" if fits else "host"


def _dtype(leaf: Any) -> np.dtype:
    return np.dtype(jax.dtypes.canonicalize_dtype(leaf.dtype))


class DeviceRows:
    """All rows on the device; arrays that splits share are there once."""

    kind = "device"

    def __init__(self, splits: Mapping[str, Shards]):
        different = {id(split.examples): split.examples for split in splits.values()}
        there = {key: jax.tree.map(_put_on_device, of) for key, of in different.items()}
        self.examples = {
            name: there[id(split.examples)] for name, split in splits.items()
        }

    def load(
        self, name: str, starts: np.ndarray, counts: np.ndarray, clients: int
    ) -> Packed:
        """The rows that hold these windows, and where they start."""
        del counts, clients
        return self.examples[name], starts


def _put_on_device(leaf: Any) -> jax.Array:
    if isinstance(leaf, jax.Array):
        return leaf
    # Converted here: ``jnp.asarray`` compiles a program for every shape.
    return jax.device_put(np.asarray(leaf, _dtype(leaf)))


class HostRows:
    """Rows where they are: arrays, memory-mapped files, or what slices like an array.

    ``examples`` are shapes, for what is traced and not computed.
    """

    kind = "host"

    def __init__(self, splits: Mapping[str, Shards]):
        self._splits = splits
        self._most = {
            name: np.cumsum(np.sort(split.counts)[::-1])
            for name, split in splits.items()
        }
        """The most rows that 1, 2, .. clients have, by split."""
        self.examples = {
            name: jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, _dtype(leaf)),
                split.examples,
            )
            for name, split in splits.items()
        }

    def load(
        self, name: str, starts: np.ndarray, counts: np.ndarray, clients: int
    ) -> Packed:
        """The rows of these windows in a buffer on the device, and where they start.

        Args:
            name: of the split.
            starts: where in it windows start.
            counts: their rows, of a shape that fits ``starts``.
            clients: that have a window, at most.
        """
        split = self._splits[name]
        datasets = 1 if split.starts.ndim == 1 else len(split.starts)
        room = max(int(self._most[name][clients - 1]) * datasets, 1)
        counts = np.broadcast_to(counts, starts.shape)
        at, window = np.unique(starts, return_inverse=True)
        window = window.reshape(starts.shape)
        lengths = np.zeros(len(at), np.int64)
        np.maximum.at(lengths, window, counts)
        begins = np.cumsum(lengths) - lengths

        def some(leaf: Any) -> np.ndarray:
            rows = np.zeros((room, *leaf.shape[1:]), _dtype(leaf))
            for begin, start, length in zip(
                begins.tolist(), at.tolist(), lengths.tolist(), strict=True
            ):
                rows[begin : begin + length] = leaf[start : start + length]
            return rows

        examples = jax.device_put(jax.tree.map(some, split.examples))
        return examples, begins[window]
