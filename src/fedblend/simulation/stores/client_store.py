# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Where client states live between rounds: on the device, in memory, or on disk.

All stores hand a block of rounds a stacked tree of states and the slot of every client
in it. The device store hands out everything and its slots are the ids; the others hand
out a buffer of the clients lately used, so that neither the price of a round nor the
device's memory grows with the number of clients.

The free memory of the device and the host says which. Where the device computes in the
host's memory, states are there or on disk.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from fedblend.checks import words
from fedblend.core import PyTree
from fedblend.data.federated import Shards
from fedblend.simulation import devices
from fedblend.simulation.stores.device_store import ONE_DEVICE, DeviceStore, Slots
from fedblend.simulation.stores.disk_store import DiskStore
from fedblend.simulation.stores.host_store import CACHE_SHARE, HostStore
from fedblend.simulation.stores.row_store import DeviceRows, HostRows, open_rows

DEVICE_SHARE = 0.5
"""Of the device's free memory, for states: a block and measuring need the rest."""
HOST_SHARE = 0.8
"""Of the host's free memory, for states."""


@dataclasses.dataclass(frozen=True)
class Storage:
    """Where what belongs to clients is kept, in place of a word for ``store``.

    states: "auto" (the free memory says), "device", "host" or "disk".
    rows: "auto", "device", or "host", which brings those of a block's clients.
    folder: where states on disk have their files; a temporary folder if None.
    """

    states: str = "auto"
    rows: str = "auto"
    folder: Path | None = None

    def open_rows(self, splits: Mapping[str, Shards]) -> DeviceRows | HostRows:
        """The rows of these splits, where they are to be."""
        return open_rows(self.rows, splits)


def make_storage(given: str | Storage) -> Storage:
    """What ``simulate`` is given for ``store``, as a ``Storage``."""
    return given if isinstance(given, Storage) else Storage(given)


def choose(
    template: PyTree, clients: int, free_device: int | None, free_host: int
) -> str:
    """The kind of store for this many states like ``template``.

    Args:
        template: the state of a client.
        clients: how many there are.
        free_device: bytes free on the device; None where it has the host's memory.
        free_host: bytes free in memory.
    """
    size = clients * devices.bytes_of(template)
    here = free_host if free_device is None else free_device
    if size <= DEVICE_SHARE * here:
        return "device"
    if free_device is None:
        return "disk"
    # A state in the buffer of a device needs no place in memory.
    outside = size - CACHE_SHARE * free_device
    return "host" if outside <= HOST_SHARE * free_host else "disk"


def choose_kind(kind: str, template: PyTree, clients: int) -> str:
    """The kind of store that is asked for; the free memory says what "auto" is."""
    words("auto", "device", "host", "disk")("store", kind)
    if kind != "auto":
        return kind
    return choose(template, clients, devices.free_device(), devices.free_host())


def open_store(
    kind: str,
    template: PyTree,
    clients: int,
    room: int,
    folder: Path | None = None,
    slots: Slots = ONE_DEVICE,
) -> DeviceStore | HostStore:
    """A store for the states of all clients, each like ``template``.

    Leaves of the template have the replicas of a sweep, if any, in front; a block needs
    at most ``room`` clients at once; ``slots`` say how buffers lie on devices.
    """
    if kind == "device":
        return DeviceStore(template, clients, slots)
    if kind == "host":
        return HostStore(template, clients, room, slots)
    return DiskStore(template, clients, room, folder, slots)
