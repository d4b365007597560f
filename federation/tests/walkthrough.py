# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A new user: follows docs/federation.md on this machine, a folder for each machine."""

import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "docs" / "federation.md").read_text()
HOME = "/var/lib/fedblend"
ROUNDS = 3
MACHINES = {"server": "fl.example.org"}
"""Where a script goes; the machine of a node is NAME.example.org."""


def commands() -> list[str]:
    """The commands from nothing to a first result."""
    section = TEXT.partition("## Three machines")[2].partition("\n## ")[0]
    block = re.findall(r"^```\n(.*?)^```", section, re.M | re.S)[0]
    return [line for line in block.splitlines() if not line.startswith("#")]


class NewUser:
    """Runs these commands; ``folder`` has a folder for each machine."""

    def __init__(self, folder: Path, port: int):
        self.folder, self.port, self.here = folder, port, folder / "here"
        self.here.mkdir()

    def run(self, command: str) -> subprocess.CompletedProcess | None:
        """Run a command where it belongs; None if there is nothing to run here."""
        words = shlex.split(command)
        match words[0]:
            case "pipx":
                return None  # fedblend is here
            case "scp":
                name = Path(words[1]).stem
                host = MACHINES.get(name, f"{name}.example.org")
                assert words[2] == f"root@{host}:"
                self.machine(name).mkdir()
                shutil.copy(self.here / words[1], self.machine(name))
                return None
            case "sh":
                return self._install(Path(words[1]).stem, words[1:])
            case "nano":
                return self._edit(words[1])
            case "runuser":
                assert words[:4] == ["runuser", "-u", "fedblend", "--"]
                return self.fedblend(self.folder, *words[5:])
        assert words[0] == "fedblend"
        ports = ("--port", str(self.port), "--link-port", str(self.port))
        words = [word.replace("fl.example.org", "127.0.0.1") for word in words]
        return self.fedblend(self.here, *words[1:], *ports)

    def machine(self, name: str) -> Path:
        """The folder that stands for the root of a machine's disk."""
        return self.folder / name

    def home(self, name: str) -> Path:
        """The folder of fedblend on a machine."""
        kind = "server" if name == "server" else "node"
        return self.machine(name) / HOME[1:] / kind

    def fedblend(self, cwd: Path, *words: str) -> subprocess.CompletedProcess:
        """Run a command of fedblend; paths of the server are below its folder."""
        root = str(self.machine("server"))
        words = tuple(re.sub(f"^{HOME}", root + HOME, word) for word in words)
        program = [sys.executable, "-m", "fedblend"]
        return self._run([*program, *words], cwd, dict(os.environ))

    def _install(self, name: str, words: list[str]) -> subprocess.CompletedProcess:
        machine = self.machine(name)
        draw, lines = random.Random(name), ["age,dose,ill"]
        for _ in range(120):
            age, dose = draw.randint(20, 80), round(draw.random(), 3)
            ill = age / 80 + dose + draw.gauss(0, 0.2) > 1.1
            lines.append(f"{age},{dose},{'yes' if ill else 'no'}")
        (machine / "patients.csv").write_text("\n".join(lines) + "\n")
        variables = {"ROOT": str(machine), "ENVIRONMENT": sys.prefix}
        return self._run(["sh", *words], machine, {**os.environ, **variables})

    def _edit(self, path: str) -> None:
        """The columns and labels fit already; three rounds are enough here."""
        file = Path(str(self.machine("server")) + path)
        text = file.read_text()
        assert 'labels = ["no", "yes"]' in text and 'columns = ["age", "dose"]' in text
        for old, new in (("rounds = 50", f"rounds = {ROUNDS}"), ("every = 10", "")):
            assert old in text
            text = text.replace(old, new)
        file.write_text(text)

    def _run(
        self, words: list[str], cwd: Path, variables: dict[str, str]
    ) -> subprocess.CompletedProcess:
        return subprocess.run(
            words, cwd=cwd, env=variables, capture_output=True, text=True, timeout=420
        )
