# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What tests of the doctor do to a federation, and to what it says of it."""

from pathlib import Path

from fedblend_federation.ops import credentials, provision
from fedblend_federation.ops.doctor import examine


def edit(path: Path, old: str, new: str) -> Path:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


def told(findings) -> list[str]:
    return [f"{finding.what}: {finding.value}" for finding in findings]


def only(path: Path):
    (finding,) = [one for one in examine(path) if "rows.csv" not in one.where]
    assert finding.advice
    return finding


def at_port(own: Path, port: int) -> Path:
    edit(own / "nodes/bob/node.toml", "127.0.0.1:8443", f"127.0.0.1:{port}")
    return edit(own / "server/server.toml", "127.0.0.1:8443", f"127.0.0.1:{port}")


def certify(own: Path, host: str = "127.0.0.1", days: int = 365) -> None:
    signer = credentials.Pair(*((own / "ca" / name).read_bytes() for name in (
        "ca.key", "ca.crt")))  # fmt: skip
    provision._certify(own / "server", signer, host, days)
