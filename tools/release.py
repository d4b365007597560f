# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Build the three distributions, install them in a fresh environment and try them.

python tools/release.py            builds into dist/

Needs Python 3.11 or newer and nothing else. It ends with 1 where a file is missing from
a wheel, a command fails, or a bar below is missed.
"""

import os
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
FOLDERS = {
    "fedblend": ROOT,
    "fedblend_federation": ROOT / "federation",
    "fedblend_reproductions": ROOT / "reproductions",
}
DATA = {
    "fedblend": ("__init__.pyi", "py.typed", "data/heart.csv", "data/catalog.toml"),
    "fedblend_federation": ("ops/templates/install.sh",),
    "fedblend_reproductions": (),
}
"""Files that are no Python modules, and without which the package does not work."""
INSTALL_SECONDS = 40.0
HELP_SECONDS = 0.6
COMMANDS = (
    "fedblend --version",
    "fedblend data example heart.csv",
    "fedblend auto heart.csv --client center --target disease --minutes 1 --out auto",
    "fedblend demo --out demo",
    "fedblend federation --help",
    "fedblend reproduce --help",
    "fedblend data list",
)


def environment(folder: Path) -> Path:
    """A fresh virtual environment; its folder of programs."""
    venv.create(folder, with_pip=True)
    return folder / "bin"


def call(command: list[str | Path], folder: Path) -> float:
    """Run a command outside the repository; the seconds it took."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    words = list(map(str, command))
    begin = time.monotonic()
    done = subprocess.run(words, cwd=folder, env=clean, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(words)}\n{done.stdout}{done.stderr}")
    return time.monotonic() - begin


def cpu_seconds(command: list[str | Path], folder: Path) -> float:
    """CPU time of a command, the least of three calls."""
    found = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        call(command, folder)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        )
    return min(found)


def build(bin: Path, folder: Path) -> list[Path]:
    """All wheels, each of which an sdist alone can make too."""
    call([bin / "pip", "install", "-q", "hatchling"], folder)
    shutil.rmtree(DIST, ignore_errors=True)
    wheels = []
    for package, source in FOLDERS.items():
        call([bin / "python", "-m", "hatchling", "build", "-d", DIST], source)
        (wheel,), (sdist,) = DIST.glob(f"{package}-*.whl"), DIST.glob(f"{package}-*.gz")
        again = folder / package
        with tarfile.open(sdist) as archive:
            archive.extractall(again, filter="data")
        (unpacked,) = again.iterdir()
        words = ["-m", "hatchling", "build", "-t", "wheel", "-d", again]
        call([bin / "python", *words], unpacked)
        same = names(again / wheel.name) == names(wheel)
        for file in (wheel, sdist):
            print(f"{file.stat().st_size / 1e6:6.1f} MB {file.name}", flush=True)
        if not same:
            sys.exit(f"error: {sdist.name} makes another wheel than the repository")
        wheels.append(wheel)
    return wheels


def names(wheel: Path) -> set[str]:
    """The files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def missing(wheel: Path, package: str) -> list[str]:
    """Tracked files of the package, its data and license that are not in the wheel."""
    held = names(wheel)
    source = FOLDERS[package] / "src"
    tracked = subprocess.run(
        ["git", "ls-files", package],
        cwd=source,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    wanted = {*tracked, *(f"{package}/{name}" for name in DATA[package])}
    lost = sorted(wanted - held)
    if not any("/licenses/LICENSE" in name for name in held):
        lost.append("LICENSE")
    return lost


def main() -> int:
    """Build, check, install and run; print what took how long."""
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        wheels = build(environment(place / "build"), place)
        for package, wheel in zip(FOLDERS, wheels, strict=True):
            failures += [f"{wheel.name}: no {name}" for name in missing(wheel, package)]
        bin = environment(place / "fresh")
        pip = [bin / "python", "-m", "pip", "install", "-q", "--find-links", DIST]
        seconds = call([*pip, f"{wheels[0]}[cli]"], place)
        print(f"{seconds:6.1f} s  install fedblend[cli]", flush=True)
        if seconds > INSTALL_SECONDS:
            failures.append(f"install: more than {INSTALL_SECONDS} s")
        seconds = call([*pip, *wheels[1:]], place)
        print(f"{seconds:6.1f} s  install federation and reproductions", flush=True)
        call([bin / "python", "-m", "pip", "check"], place)
        call([bin / "fedblend", "--help"], place)
        used = cpu_seconds([bin / "fedblend", "--help"], place)
        print(f"{used:6.2f} s  fedblend --help, CPU", flush=True)
        if used > HELP_SECONDS:
            failures.append(f"fedblend --help: more than {HELP_SECONDS} CPU seconds")
        for line in COMMANDS:
            program, *words = line.split()
            seconds = call([bin / program, *words], place)
            print(f"{seconds:6.1f} s  {line}", flush=True)
    print(*(f"failed: {line}" for line in failures), sep="\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
