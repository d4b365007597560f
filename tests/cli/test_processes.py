# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``--processes``: whose end is told, and how a run that is refused ends."""

import subprocess
import sys

import pytest

from fedblend.cli import processes


def ending(*codes: float) -> list[subprocess.Popen]:
    """Processes that sleep for the fraction of a code and end with its whole part."""
    program = (
        "import sys, time; c = float(sys.argv[1]); time.sleep(c % 1); sys.exit(int(c))"
    )
    return [
        subprocess.Popen([sys.executable, "-c", program, str(code)]) for code in codes
    ]


def test_all_end_well():
    assert processes._wait(ending(0, 0.2)) == 0


def test_the_first_process_speaks_for_an_error_that_all_have(capfd):
    assert processes._wait(ending(2.5, 1)) == 2
    assert capfd.readouterr().err == ""


def test_a_process_that_fails_alone_is_told(capfd, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.1)
    running = ending(0.9, 3)
    assert processes._wait(running) == 3
    running[0].wait()
    assert "process 1 ended with code 3" in capfd.readouterr().err


@pytest.mark.slow
def test_a_private_cohort_is_refused_in_one_line(tiny, write, tmp_path):
    tiny["privacy"] = {"clip": 1.0, "noise": 1.0, "delta": 1e-2}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "fedblend", "run", str(write(tiny))),
            *("--processes", "2", "--out", str(tmp_path / "run")),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "--resume" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
