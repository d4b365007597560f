# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Count the files of the package that a run, or one federated round, touches.

A file is touched when one of its functions executes; importing a module does not count.

python tools/files_touched.py run CONFIG    `fedblend run CONFIG`, results thrown away
python tools/files_touched.py round         a federated round of APFL on three nodes

The federated round is the second one of the loopback federation of the tests: nodes are
enrolled, and the functions of a round compiled. It goes from the server's draw of
the cohort to its checkpoint. ``--first`` takes the first round, which compiles.
"""

import argparse
import inspect
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "fedblend"


@contextmanager
def touched() -> Iterator[Counter[str]]:
    """Calls by file of the package, relative to it, made inside the block."""
    calls: Counter[str] = Counter()
    inside = f"{PACKAGE}/"

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        del argument
        code = frame.f_code
        # Bodies of modules and classes are not optimized code: they are imports.
        runs = event == "call" and code.co_flags & inspect.CO_OPTIMIZED
        if runs and code.co_filename.startswith(inside):
            calls[code.co_filename.removeprefix(inside)] += 1

    threading.setprofile(on_event)
    sys.setprofile(on_event)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def of_run(config: Path) -> Counter[str]:
    """The files that ``fedblend run`` touches."""
    from typer.testing import CliRunner

    from fedblend.cli import app

    with tempfile.TemporaryDirectory() as folder, touched() as calls:
        arguments = ["run", str(config), "--out", f"{folder}/out"]
        outcome = CliRunner().invoke(app, arguments)
    if outcome.exit_code:
        sys.exit(f"fedblend run: exit code {outcome.exit_code}\n{outcome.output}")
    return calls


def of_round(first: bool = False) -> Counter[str]:
    """The files that one round of a federation touches, over a transport of lists."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "federation" / "tests")]
    from configured import experiment, federated, method, nodes, write_rows

    from fedblend_federation.server.run import run_server
    from loopback import LoopbackTransport

    wanted = 0 if first else 1
    calls: Counter[str] = Counter()
    hook: Any = None

    def on_step(round: int, rounds: int) -> None:
        nonlocal hook
        del rounds
        if hook is not None:
            hook.__exit__(None, None, None)
            hook = None
        elif round == wanted:
            hook = touched()
            nonlocal calls
            calls = hook.__enter__()

    with tempfile.TemporaryDirectory() as folder:
        place = write_rows(Path(folder))
        settings = method("apfl", place, rounds=3) + "[measure]\nlocal = false\n"
        run = experiment(place / "run", federated(settings, deadline=60.0))
        transport = LoopbackTransport(nodes(place, place))
        run_server(run, transport, poll=0.0, on_step=on_step)
    return calls


def main() -> None:
    """Print the files, and how many they are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run").add_argument("config", type=Path)
    commands.add_parser("round").add_argument("--first", action="store_true")
    options = parser.parse_args()
    calls = (
        of_run(options.config) if options.command == "run" else of_round(options.first)
    )
    for name, count in calls.most_common():
        print(f"{count:8d} {name}")
    print(f"{len(calls)} files of {PACKAGE.name}")


if __name__ == "__main__":
    main()
