# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: a network namespace each, joined by a bridge.

The server's host has the bridge, the link on its loopback and nginx before it, with the
configuration that ``init`` writes. No host has a way to anything else. Needs root.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fedblend_federation.flower import processes
from fedblend_federation.ops.credentials import HOME
from fedblend_federation.ops.local_cluster import Rows, processes_of, write_rows
from fedblend_federation.ops.provision import provision

SERVER, NETWORK, PORT, LINK_PORT = "server", "10.77.0", 8443, 8000
ROUTE = "$remote_addr $uri $request_length $bytes_sent"
"""What the proxy writes down of every call."""
WITHIN = 300.0
"""Seconds within which everything must be up, also on a busy machine."""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def possible() -> bool:
    """Whether this machine lets us make hosts, and has an nginx."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nginx"):
        return False
    trial = f"fb{os.getpid()}-trial"
    try:
        _ip("netns", "add", trial)
        _ip("-n", trial, "link", "add", "name", "bridge", "type", "bridge")
        _ip("-n", trial, "link", "add", "name", "cable", "type", "veth")
    except subprocess.CalledProcessError:
        return False
    finally:
        subprocess.run(["ip", "netns", "del", trial], capture_output=True)
    return True


class Hosts:
    """The hosts of a federation, and the folders that lie on them."""

    def __init__(self, folder: Path, names: Sequence[str]):
        self.folder, self.names = folder, list(names)
        self.services: list[subprocess.Popen] = []

    def inside(self, host: str, command: Sequence[object]) -> list[str]:
        """A command on one of the hosts."""
        return ["ip", "netns", "exec", self._space(host), *map(str, command)]

    def fedblend(self, host: str, *words: object) -> list[str]:
        """``fedblend federation ...`` on one of the hosts."""
        program = [sys.executable, "-m", "fedblend", "federation"]
        return self.inside(host, [*program, *words])

    def cut_off(self, name: str, is_cut: bool = True) -> None:
        """Pull a node's cable, or plug it in again."""
        state = "down" if is_cut else "up"
        _ip("-n", self._space(SERVER), "link", "set", self._cable(name), state)

    def traffic(self, name: str) -> tuple[int, int]:
        """Bytes that went to a node, and that came from it, with all headers."""
        place = f"/sys/class/net/{self._cable(name)}/statistics"
        files = [f"{place}/{way}_bytes" for way in ("tx", "rx")]
        read = subprocess.run(
            self.inside(SERVER, ["cat", *files]), capture_output=True, check=True
        )
        to, come = read.stdout.split()
        return int(to), int(come)

    def calls(self) -> list[tuple[str, str, int, int]]:
        """What nodes asked of the proxy: who, what, bytes of request and answer."""
        lines = (self.folder / "proxy" / "calls").read_text().splitlines()
        found = (line.split() for line in lines)
        return [(who, what, int(up), int(down)) for who, what, up, down in found]

    def address(self, name: str) -> str:
        """Of a node, as the proxy sees it."""
        return f"{NETWORK}.{2 + self.names.index(name)}"

    def home(self, name: str) -> Path:
        """The folder that is on the machine of a node."""
        return self.folder / "nodes" / name

    def start(self, rows: Mapping[str, Rows], policy: str | None = None) -> None:
        """Provision the federation, and bring up all of its services."""
        provision(
            self.folder,
            host=f"{NETWORK}.1",
            nodes=self.names,
            port=PORT,
            link_port=LINK_PORT,
            with_keys=True,
        )
        for name, own in rows.items():
            write_rows(self.home(name), own, policy)
        settings = self.folder / "server" / "server.toml"
        out = self._serve(SERVER, self.fedblend(SERVER, "server", settings))
        processes.wait_until(
            lambda: "may connect" in out.read_text(), WITHIN, "the link", every=1.0
        )
        self._serve("proxy", self.inside(SERVER, self._nginx()))
        for name in self.names:
            path = self.home(name) / "node.toml"
            self._serve(name, self.fedblend(name, "node", path))
        processes.wait_until(self._complete, WITHIN, "the nodes", every=2.0)

    def _complete(self) -> bool:
        settings = self.folder / "server" / "server.toml"
        said = subprocess.run(
            self.fedblend(SERVER, "status", "--server", settings),
            capture_output=True,
            text=True,
        )
        return said.stdout.count("online") == len(self.names)

    def _serve(self, name: str, command: Sequence[str]) -> Path:
        out = self.folder / f"{name}.out"
        with out.open("ab") as words:
            self.services.append(
                subprocess.Popen(
                    command,
                    stdout=words,
                    stderr=words,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONUNBUFFERED": "1"},
                )
            )
        return out

    def _nginx(self) -> list[object]:
        """The shipped configuration, with the folders that it has here."""
        place = self.folder / "proxy"
        place.mkdir()
        text = (self.folder / "server" / "nginx.conf").read_text()
        own = str(self.folder / "server")
        (place / "site.conf").write_text(text.replace(str(HOME / "server"), own))
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temporary = "".join(f"{kind}_temp_path {place}/{kind};\n" for kind in kinds)
        (place / "nginx.conf").write_text(
            f"user root;\ndaemon off;\npid {place}/pid;\nevents {{ }}\nhttp {{\n"
            f"log_format calls '{ROUTE}';\naccess_log {place}/calls calls;\n"
            f"{temporary}include {place}/site.conf;\n}}\n"
        )
        return ["nginx", "-p", place, "-c", place / "nginx.conf", "-e", place / "bad"]

    def stop(self) -> None:
        """End everything, and remove the hosts."""
        for service in self.services:
            service.terminate()
        for service in self.services:
            with contextlib.suppress(subprocess.TimeoutExpired):
                service.wait(40)
            service.kill()
        for number in processes_of(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        for host in (SERVER, *self.names):
            subprocess.run(
                ["ip", "netns", "del", self._space(host)], capture_output=True
            )

    def lay_cables(self) -> None:
        """Make the hosts, and join them."""
        for host in (SERVER, *self.names):
            _ip("netns", "add", self._space(host))
            _ip("-n", self._space(host), "link", "set", "lo", "up")
        center = self._space(SERVER)
        _ip("-n", center, "link", "add", "name", "bridge", "type", "bridge")
        _ip("-n", center, "address", "add", f"{NETWORK}.1/24", "dev", "bridge")
        _ip("-n", center, "link", "set", "bridge", "up")
        for name in self.names:
            cable, space = self._cable(name), self._space(name)
            _ip(
                "-n",
                center,
                "link",
                "add",
                "name",
                cable,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                space,
            )
            _ip("-n", center, "link", "set", cable, "master", "bridge", "up")
            address = f"{self.address(name)}/24"
            _ip("-n", space, "address", "add", address, "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")

    def _space(self, host: str) -> str:
        return f"fb{os.getpid()}-{host}"

    def _cable(self, name: str) -> str:
        return f"cable{self.names.index(name)}"


@contextlib.contextmanager
def hosts(
    folder: Path, rows: Mapping[str, Rows], policy: str | None = None
) -> Iterator[Hosts]:
    """A federation whose server and nodes are hosts of their own."""
    made = Hosts(folder, list(rows))
    try:
        made.lay_cables()
        made.start(rows, policy)
        yield made
    finally:
        made.stop()
