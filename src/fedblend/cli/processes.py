# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend run --processes``: one run in several processes.

All of them compute the same run, each on its own devices. The first one writes the
folder and prints; the others write to a folder that is thrown away.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer

from fedblend import cpu_devices
from fedblend.cli import screen

COORDINATOR, NUMBER, COUNT = (
    f"FEDBLEND_{word}" for word in ("COORDINATOR", "PROCESS", "PROCESSES")
)
THREADS = "NPROC"
"""How many threads XLA has for its operations; by default the cores of the machine, in
every process."""
PATIENCE = 10.0
"""Seconds in which the first process says what another one failed of, too."""


def launch(count: int, arguments: Sequence[str]) -> int:
    """Run ``fedblend`` with these arguments in so many processes of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    each = str(max(cpu_devices.count_devices() // count, 1))
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "fedblend", *arguments],
            env={
                **os.environ,
                cpu_devices.VARIABLE: os.environ.get(cpu_devices.VARIABLE, each),
                THREADS: os.environ.get(THREADS, each),
                COORDINATOR: address,
                NUMBER: str(number),
                COUNT: str(count),
            },
        )
        for number in range(count)
    ]
    try:
        return _wait(running)
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait()


def _wait(running: Sequence[subprocess.Popen]) -> int:
    """0 after all have ended well, or the code of the first one that failed."""
    codes: list[int | None] = [None]
    while None in codes:
        time.sleep(0.05)
        codes = [process.poll() for process in running]
        for number, code in enumerate(codes):
            if code and code > 0 and number:  # not killed: the first one fails alike
                with contextlib.suppress(subprocess.TimeoutExpired):
                    codes[0] = running[0].wait(PATIENCE)
            if codes[0]:  # it has spoken for itself
                return abs(codes[0])
            if code:
                screen.warn(
                    f"process {number} ended with code {code}, and with it the run; "
                    "the same command with --resume continues, with any --processes"
                )
                return abs(code)
    return 0


def parse_count(text: str) -> int | None:
    """The number of ``--processes``, or None for "auto"."""
    if text == "auto":
        return None
    if not text.isdecimal() or not int(text):
        raise typer.BadParameter(f'--processes: {text!r} is not a number or "auto"')
    return int(text)


@contextlib.contextmanager
def join(out: Path, found: bool) -> Iterator[Path]:
    """Join the processes of a run; the folder that this one writes.

    Args:
        out: the folder of the run.
        found: join those that srun, mpirun or Kubernetes started, where ``launch``
            started none.
    """
    if COORDINATOR not in os.environ and not found:
        yield out
        return
    import jax

    scratch = Path(tempfile.mkdtemp(prefix="fedblend-process-"))
    try:
        if out.exists():  # before the first process, which waits for all, goes on
            shutil.copytree(out, scratch / out.name)
        if COORDINATOR in os.environ:
            jax.distributed.initialize(
                os.environ[COORDINATOR], int(os.environ[COUNT]), int(os.environ[NUMBER])
            )
        else:
            jax.distributed.initialize()
        if jax.process_index() == 0:
            yield out
            return
        try:
            yield scratch / out.name
        except Exception:  # the first process fails alike, and says so
            raise typer.Exit(1) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
