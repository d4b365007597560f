# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Run all tests marked slow, one group per test folder, and continue where it stopped.

python tools/slow_tests.py                 groups that have not passed on this commit
python tools/slow_tests.py tests/cli ...   these groups only

``slow_tests.json`` has for every group the commit, the numbers of tests and the names
of those that failed. A group that passed on the same commit is not run again, unless
the checkout has changes that are not committed.
"""

import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "slow_tests.json"
SUITES = (
    *("tests", "adapters/tests", "federation/tests"),
    *("interop/tests", "reproductions/tests"),
)
NO_TESTS = 5
"""Exit code of pytest where no test is selected."""


def git(*words: str) -> str:
    """What git prints."""
    command = ["git", *words]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit() -> str:
    """The commit that is checked out; "+changes" after it if files differ from it."""
    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD") + ("+changes" if changed else "")


def groups() -> dict[str, list[str]]:
    """Paths of every group: the folders of each suite, and the files beside them."""
    found = {}
    for suite in SUITES:
        for path in sorted((ROOT / suite).iterdir()):
            inside = path.relative_to(ROOT).as_posix()
            if path.is_dir() and any(path.rglob("test_*.py")):
                found[inside] = [inside]
            elif path.match("test_*.py"):
                found.setdefault(f"{suite}/*.py", []).append(inside)
    return found


def run(paths: list[str]) -> dict[str, Any]:
    """Run the slow tests of some paths; their numbers, and the names of failed ones."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tests.xml"
        words = ["-m", "slow", "-n", "2", "--dist", "worksteal", f"--junitxml={file}"]
        command = [sys.executable, "-m", "pytest", *words, *paths]
        code = subprocess.run(command, cwd=ROOT).returncode
        cases = list(ElementTree.parse(file).iter("testcase")) if file.exists() else []
    bad = [
        c for c in cases if c.find("failure") is not None or c.find("error") is not None
    ]
    return {
        "passed": code in (0, NO_TESTS),
        "tests": len(cases),
        "skipped": sum(case.find("skipped") is not None for case in cases),
        "failed": [f"{case.get('classname')}::{case.get('name')}" for case in bad],
        "seconds": round(time.monotonic() - begin),
    }


def main(names: list[str]) -> int:
    """Run the groups, and write the report after each of them."""
    known = groups()
    if unknown := [name for name in names if name not in known]:
        print(f"error: no group {', '.join(unknown)}; groups: {', '.join(known)}")
        return 2
    report = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    report = {name: row for name, row in report.items() if name in known}
    for name in names or known:
        now, row = commit(), report.get(name, {})
        if row.get("passed") and row["commit"] == now and "+" not in now:
            print(f"{name}: passed on this commit", flush=True)
            continue
        print(f"{name}:", flush=True)
        report[name] = {"commit": now, **run(known[name])}
        REPORT.write_text(json.dumps(report, indent=1) + "\n")
    for name in names or known:
        row = report[name]
        result = "passed" if row["passed"] else "FAILED"
        print(f"{result}  {row['tests']:5} tests {row['seconds']:6} s  {name}")
    return int(not all(report[name]["passed"] for name in names or known))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
