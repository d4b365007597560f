# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Build all distributions, install them in a fresh environment and try them.

python tools/release.py            builds into dist/

Needs git and Python 3.11 or newer; times count on a quiet machine. It ends with 1 where
a file is missing from a wheel, a command fails, or a bar below is missed.
"""

import os
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
OTHERS = ("adapters", "federation", "interop", "reproductions")
FOLDERS = {"fedblend": ROOT, **{f"fedblend_{name}": ROOT / name for name in OTHERS}}
DATA = {
    "fedblend": ("__init__.pyi", "py.typed", "data/heart.csv"),
    "fedblend_federation": ("ops/templates/install.sh",),
    "fedblend_reproductions": ("datasets/catalog.toml",),
}
"""Files that are no Python modules, and without which the package does not work."""
INSTALL_SECONDS = 40.0
HELP_SECONDS = 0.6
COMMANDS = (
    "fedblend --version",
    "fedblend data example table.csv",
    "fedblend auto table.csv --client center --target disease",
    "fedblend demo",
    "fedblend federation --help",
    "fedblend reproduce --help",
    "fedblend data list",
)


def environment(folder: Path) -> Path:
    """A fresh virtual environment; its folder of programs."""
    venv.create(folder, with_pip=True)
    return folder / "bin"


def call(command: list[str | Path], folder: Path) -> tuple[float, float]:
    """Run a command outside the repository; the seconds and the CPU seconds it took."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    words = list(map(str, command))
    before, begin = os.times(), time.monotonic()
    done = subprocess.run(words, cwd=folder, env=clean, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(words)}\n{done.stdout}{done.stderr}")
    seconds, after = time.monotonic() - begin, os.times()
    used = after.children_user + after.children_system
    return seconds, used - before.children_user - before.children_system


def show(times: tuple[float, float], what: str) -> None:
    """Print the seconds of one step."""
    print(f"{times[0]:6.1f} s {times[1]:6.2f} CPU s  {what}", flush=True)


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
    wanted = {*tracked, *(f"{package}/{name}" for name in DATA.get(package, ()))}
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
        times = call([*pip, f"{wheels[0]}[cli]"], place)
        show(times, "install fedblend[cli]")
        if times[0] > INSTALL_SECONDS:
            failures.append(f"install: more than {INSTALL_SECONDS} s")
        show(call([*pip, *wheels[1:]], place), f"install {', '.join(OTHERS)}")
        call([bin / "python", "-m", "pip", "check"], place)
        times = min(call([bin / "fedblend", "--help"], place) for _ in range(4))
        show(times, "fedblend --help")
        if times[1] > HELP_SECONDS:
            failures.append(f"fedblend --help: more than {HELP_SECONDS} CPU seconds")
        for line in COMMANDS:
            program, *words = line.split()
            show(call([bin / program, *words], place), line)
    print(*(f"failed: {line}" for line in failures), sep="\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
