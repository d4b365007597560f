# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Files of a machine, from templates, that nobody else can read.

The files of ``templates`` are nginx, systemd and TOML as those programs read them, with
``@name@`` where a value goes.
"""

import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

HOME = Path("/var/lib/fedblend")
"""Where the units and the proxy expect the files of a machine."""
PROGRAM = Path("/opt/fedblend/bin/fedblend")
"""Where fedblend is installed."""
USER, FLOWER_USER = "fedblend", "fedblend-flower"
"""Who owns rows and states, and who runs the SuperNode of a node."""


def template(name: str) -> str:
    """The text of a template."""
    return (resources.files("fedblend_federation.ops") / "templates" / name).read_text(
        "utf-8"
    )


def render(name: str, /, **values: object) -> bytes:
    """A template with its values."""
    known = {
        "home": HOME,
        "program": PROGRAM,
        "user": USER,
        "flower_user": FLOWER_USER,
        **values,
    }
    return re.sub(r"@(\w+)@", lambda at: str(known[at[1]]), template(name)).encode()


def write_private(folder: Path, files: Mapping[str, bytes]) -> None:
    """Files that nobody else can read; a key is never readable, not even at first."""
    for name, data in files.items():
        beside = folder / f"{name}.new"
        beside.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(beside, flags, 0o600), "wb") as file:
            file.write(data)
        os.replace(beside, folder / name)
