# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A record of what the library computes and says, to see whether a change moved it.

python tools/golden.py compare [--only PREFIX]
python tools/golden.py write [--only PREFIX]

``golden.json`` has an entry for each part: texts as they are; numbers as a hash of
their bytes and, for each array or column, its norm and a sum with fixed weights. So
``compare`` tells a change of rounding from a change of behavior. A hash of rounded
numbers would not: of a hundred numbers, some are always next to a rounding boundary.

Public entry points are used wherever there are some. What has none is taken from the
modules of the tests, which change with the code: ``tests_module`` is the only place
that knows where they are. Private noise is drawn from the seed here, not by the system.
"""

import argparse
import contextlib
import difflib
import hashlib
import io
import json
import os
import re
import runpy
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

HOME = Path(__file__).resolve().parents[1]
RECORD = HOME / "tools" / "golden.json"
if __name__ == "__main__":
    # The tests' own settings: one device, and programs that compile quickly.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    runpy.run_path(str(HOME / "conftest.py"))

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402

import fedblend as fb  # noqa: E402
import fedblend_reproductions.datasets  # noqa: E402, F401 (some lines list them)
from fedblend.cli import main as fedblend_main  # noqa: E402
from fedblend.registry import ALGORITHMS, TRANSFORMS  # noqa: E402
from fedblend.runs.saved_run import load  # noqa: E402

SAME = 1e-5
"""What rounding may change, relative to the norm: float32 rounds at 6e-8, and a few
hundred roundings add up over the steps of three rounds."""
SETTINGS: dict[str, Any] = {"rounds": 3, "every": 1}
BASES = ("fedavg", "scaffold")
"""Every transform goes over an algorithm without states of clients, and one with."""
RUN = """
name = "golden"
data = { source = "digits", partition = "classes_per_client", clients = 6, classes = 2 }
model.name = "softmax"
algorithm = { rate = 0.1, steps = 2, batch_size = 4 }
run = { rounds = 4, every = 2, cohort = 3 }
measure.local = 2
"""
RUNS = {
    "fedavg": ("algorithm.name=fedavg",),
    "apfl": ("algorithm.name=apfl", "algorithm.alpha=0.5", "run.seed=[1, 2]"),
    "compressed": (
        "algorithm.name=scaffold",
        "compress.compressor={name = 'rand_k', k = 9}",
    ),
}
"""Runs of a configuration by the command line, with what they set."""
COMMANDS = (
    "frob",
    "run",
    "run nothing.toml",
    "run golden.toml --seed x",
    "run golden.toml --set x",
    "run golden.toml --set algorithm.name=frob",
    "run golden.toml --set algorithm.name=apfl --set algorithm.alpha=2",
    "run golden.toml --set algorithm.name=fedavg --set run.cohort=9",
    "run golden.toml --set algorithm.name=fedavg --set data.file=a.csv",
    "run golden.toml --set algorithm.name=fedavg --devices 0",
    "compare golden.toml",
    "compare golden.toml --seeds 0",
    "plan golden.toml --set algorithm.name=fedavg",
    "sweep golden.toml --set algorithm.name=fedavg --over frob=1,2",
    "tune golden.toml --set algorithm.name=fedavg",
    "show nothing",
    "report nothing",
    "export nothing",
    "export nothing --shared",
    "predict nothing rows.csv",
    "personalize nothing --data rows.csv",
    "track nothing --to frob",
    "audit-privacy golden.toml --set algorithm.name=fedavg",
    "auto nothing.csv --client a --target b",
    "auto golden.toml --client a --target b",
    "list frob",
    "init golden.toml",
    "data info frob",
    "data get frob",
    "federation frob",
    "federation status",
    "federation run nothing",
    "federation stop nothing",
    "federation server nothing",
    "federation node nothing",
    "federation predict nothing",
    "federation ledger nothing",
    "federation audit nothing",
    "federation doctor nothing",
)

Entry = str | dict[str, Any]
Job = Callable[[], dict[str, Entry]]


class Absent(Exception):
    """What an entry needs is not on this machine."""


@cache
def tests_module(name: str) -> ModuleType:
    """A module of the tests, wherever its file is."""
    path = next(path for path in (HOME / "tests").rglob(f"{name}.py"))
    for folder in (HOME / "tests", path.parent):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    return import_module(name)


def hashed(content: bytes) -> str:
    """As much of a hash as tells two contents apart."""
    return hashlib.sha256(content).hexdigest()[:16]


def numbers(content: bytes, *arrays: np.ndarray) -> Entry:
    """A hash of the content, and a norm and a sum for each of its arrays."""
    sketch = []
    for array in arrays:
        flat = np.nan_to_num(np.ravel(array).astype(float), nan=0, posinf=9e9)
        sums = np.linalg.norm(flat), flat @ np.cos(np.arange(flat.size))
        sketch += [float(f"{one:.9g}") for one in sums]
    return {"sha256": hashed(content), "sketch": sketch}


def tree(*several: Any) -> Entry:
    """The numbers of all leaves."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(several))]
    content = b"".join(
        f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes() for leaf in leaves
    )
    flat = [leaf.ravel().astype(float) for leaf in leaves]
    return numbers(content, np.concatenate([np.zeros(0), *flat]))


def table(frame: pd.DataFrame) -> Entry:
    """The numbers of all columns, but for those that clocks write."""
    kept = frame[[name for name in frame if "seconds" not in str(name)]]
    columns = [np.asarray(pd.to_numeric(kept[name], errors="coerce")) for name in kept]
    content = kept.to_csv(index=False, lineterminator="\n").encode()
    return numbers(content, *columns)


def refusal(call: Callable[[], Any]) -> str:
    """The line with which a call is refused, without addresses, folders and lines."""
    try:
        call()
    except ValueError as error:
        line = str(error).partition("\n---")[0]  # JAX adds lines of its own
        line = re.sub(rf"{re.escape(str(HOME))}/(\S+\.py):\d+", r"\1", line)
        return re.sub(r"0x[0-9a-f]+", "0x", line)
    return "accepted"


def command(*arguments: str) -> tuple[int, str, str]:
    """Exit code, output and complaints of a command, on a screen of fixed width."""
    out, err = io.StringIO(), io.StringIO()
    screen = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    before = dict(os.environ)
    os.environ.update(screen)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = fedblend_main(list(arguments))
    finally:
        os.environ.clear()
        os.environ.update(before)
    return code, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """An empty folder to stand in, with a configuration."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        Path(name, "golden.toml").write_text(RUN, encoding="utf-8")
        os.chdir(name)
        try:
            yield Path(name)
        finally:
            os.chdir(before)


def names() -> dict[str, Entry]:
    """The public names of the library."""
    return {"fedblend": " ".join(sorted(dir(fb)))}


def helps() -> dict[str, Entry]:
    """The help of every command: its first line and a hash."""
    found: dict[str, Entry] = {}
    for name, _ in import_module("cli_reference").commands():
        _, text, _ = command(*name.split()[1:], "--help")
        text = "\n".join(line.rstrip() for line in text.strip().splitlines())
        first = text.partition("\n")[0]
        found[name] = f"{first} (sha256 {hashed(text.encode())})"
    return found


def wrong_commands() -> dict[str, Entry]:
    """Exit codes and last lines of wrong command lines."""
    found: dict[str, Entry] = {}
    with folder() as place:
        for line in COMMANDS:
            code, _, said = command(*line.split())
            last = said.strip().splitlines()[-1:] or [""]
            found[line] = f"{code}: {last[0]}".replace(f"{place}/", "")
    return found


def wrong_configs() -> dict[str, Entry]:
    """What ``load`` says of wrong settings of a small configuration."""
    cases, tiny = tests_module("test_config"), tests_module("tiny_config").TINY
    found: dict[str, Entry] = {}
    with folder() as place:
        path = place / "tiny.toml"
        path.write_text(cases.toml.write(tiny), encoding="utf-8")
        for setting in cases.CASES:
            line = refusal(partial(cases.load, path, [setting]))
            found[setting] = line.replace(f"{path}: ", "")
    return found


def wrong_inputs() -> dict[str, Entry]:
    """What functions of the library say of inputs that do not fit each other."""
    cases = tests_module("test_wrong_inputs").WRONG
    return {case: refusal(call) for case, call in cases.items()}


def wrong_arguments() -> dict[str, Entry]:
    """What functions say of one wrong value for each argument, and of all of them."""
    cases = tests_module("test_wrong_arguments")
    found: dict[str, Entry] = {}
    for name, case in cases.CASES.items():
        lines = []
        for argument, value in cases._wrong(name):
            line = refusal(partial(case.call, **{**case.good, argument: value}))
            found.setdefault(f"{name}/{argument}", line)
            lines.append(line)
        told = hashed("\n".join(lines).encode())
        found[f"{name}/all"] = f"{len(lines)} lines (sha256 {told})"
    return found


def configured(name: str) -> dict[str, Entry]:
    """The whole configuration of an algorithm, with its defaults."""
    cases, examples = tests_module("test_config"), tests_module("example_arguments")
    tiny = tests_module("tiny_config").TINY
    options = {"name": name, **examples.options(name)}
    if name == "flix":
        options["steps"] = 1
    content = tiny | examples.tables(name) | {"algorithm": tiny["algorithm"] | options}
    everyone = {"cohort": 6} if examples.needs_everyone(name) else {}
    content |= {"run": tiny["run"] | everyone}
    return {"": cases.dump(cases.check(content, name))}


def built(name: str) -> fb.Algorithm:
    """A registered algorithm with example arguments, on minibatches."""
    pairs, examples = tests_module("pairs"), tests_module("example_arguments")
    work = fb.Work(0.1, steps=1 if name == "flix" else 2, batch_size=2)
    return examples.build(name, pairs.problem(name).loss, work, pairs.CLIENTS)


def transformed(transform: str, base: str) -> fb.Algorithm:
    """An algorithm under a transform that does something, private noise too."""
    pairs = tests_module("pairs")
    noisy = {"clip": 0.1, "noise": 1.0, "cohort": 3, "noise_from": "seed"}
    strategy = fb.theory.blt.Blt((0.75,), (0.6,))
    acting: dict[str, Callable[[fb.Algorithm], fb.Algorithm]] = {
        "clip": lambda made: fb.transforms.clip(made, 0.1),
        "dp_blt": lambda made: fb.transforms.dp_blt(made, **noisy, strategy=strategy),
        "dp_fedavg": lambda made: fb.transforms.dp_fedavg(made, **noisy),
        "local_dp": lambda made: fb.transforms.local_dp(made, 0.1),
    }
    if transform in acting:
        return acting[transform](built(base))
    return pairs.WITH[transform](built(base), pairs.problem(base))


def simulated(build: Callable[[], fb.Algorithm], base: str) -> dict[str, Entry]:
    """A small simulation: its models, its losses, and the bits of every client."""
    pairs = tests_module("pairs")
    on, runs = pairs.problem(base), []

    def run() -> None:
        made = build()
        cohort = pairs.CLIENTS if made.needs.everyone else 3
        measure = {"loss": fb.metrics.mean_loss(on.loss)}
        asked = (made, on.params, on.federated_data, jax.random.key(0))
        chosen = {"cohort": cohort, "measure": measure, **SETTINGS}
        runs.append(fb.simulate(*asked, **chosen).complete())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        line = refusal(run)
    if not runs:
        return {"refused": line}
    models = runs[0].personal_models(range(pairs.CLIENTS))
    return {
        "shared": tree(runs[0].shared),
        "personal": tree(models),
        "table": table(runs[0].frame()),
        "bits": tree(runs[0].bits()),
    }


def federated(name: str, secure: bool = False) -> dict[str, Entry]:
    """A federation in one process: its models, and the bits of every client."""
    on, loopback = tests_module("pairs").problem(name), tests_module("loopback")
    what = (built(name), on.params, on.federated_data, jax.random.key(0))
    with folder() as place:
        federation = loopback.LoopbackFederation(
            *what, place, secure={} if secure else None, cohort=4, **SETTINGS
        )
        server = federation.complete(federation.server())
        return {
            "shared": tree(server.down.shared),
            "personal": tree(federation.personal(server)),
            "bits": tree(server.ledger.up, server.ledger.down),
        }


def run_by_command(name: str) -> dict[str, Entry]:
    """A run of a configuration by the command line: its table and its settings."""
    sets = [word for setting in RUNS[name] for word in ("--set", setting)]
    with folder() as place:
        code, _, said = command("run", "golden.toml", *sets, "--out", "out")
        if code:
            raise RuntimeError(said.strip())
        rows = load("out").frame()
        settings = (place / "out" / "config.toml").read_text("utf-8")
        return {"table": table(rows), "config": settings}


def auto() -> dict[str, Entry]:
    """``fedblend auto`` on a table of four hospitals, with more time than it needs."""
    path = Path(os.environ.get("FEDBLEND_DATA", ""), "tables", "heart.csv.gz")
    if not path.is_file():
        raise Absent("FEDBLEND_DATA has no tables/heart.csv.gz")
    asked = {"client": "center", "target": "disease", "minutes": 600, "quiet": True}
    with folder() as place:
        inputs = ("age", "sex", "thalach", "exang")
        found = fb.auto(path, **asked, inputs=inputs, out=place / "out")
        return {
            "table": table(pd.DataFrame(found.table)),
            "verdict": "\n".join(found.verdict),
        }


def jobs() -> dict[str, Job]:
    """What computes entries, by the beginning of their names; cheap ones first."""
    found: dict[str, Job] = {
        "names": names,
        "help": helps,
        "refusal/command": wrong_commands,
        "refusal/config": wrong_configs,
        "refusal/inputs": wrong_inputs,
        "refusal/arguments": wrong_arguments,
    }
    found |= {f"config/{name}": partial(configured, name) for name in ALGORITHMS}
    found |= {f"federation/{name}": partial(federated, name) for name in BASES}
    found["federation/flix"] = partial(federated, "flix")
    found["federation/secure"] = partial(federated, "fedavg", secure=True)
    found |= {
        f"algorithm/{name}": partial(simulated, partial(built, name), name)
        for name in ALGORITHMS
    }
    found |= {
        f"transform/{name}({base})": partial(
            simulated, partial(transformed, name, base), base
        )
        for name in TRANSFORMS
        for base in BASES
    }
    found |= {f"run/{name}": partial(run_by_command, name) for name in RUNS}
    return found | {"auto/heart": auto}


def computed(only: str = "") -> tuple[dict[str, Entry], dict[str, str]]:
    """All entries whose names begin so, and jobs that failed, with an error line.

    The line is empty where this machine does not have what a job needs.
    """
    entries: dict[str, Entry] = {}
    failed: dict[str, str] = {}
    for name, job in jobs().items():
        if not (name.startswith(only) or only.startswith(name)):
            continue
        try:
            found = job()
        except Absent as error:
            print(f"{name}: left out, {error}")
            failed[name] = ""
        except Exception as error:
            line = (str(error).splitlines() or [""])[0]
            failed[name] = f"not computed, {type(error).__name__}: {line}"
        else:
            entries |= {f"{name}/{key}".rstrip("/"): of for key, of in found.items()}
    return {key: of for key, of in entries.items() if key.startswith(only)}, failed


def difference(old: Entry | None, new: Entry | None) -> str:
    """How an entry moved; nothing if it did not."""
    if old == new:
        return ""
    if old is None or new is None:
        return "new" if old is None else "gone"
    if isinstance(old, str) or isinstance(new, str):
        before, after = str(old).splitlines(), str(new).splitlines()
        lines = [*difflib.unified_diff(before, after, lineterm="", n=0)][3:]
        return "\n".join(["text", *(f"    {line}" for line in lines[:12])])
    before, after = np.array(old["sketch"]), np.array(new["sketch"])
    if before.shape != after.shape:
        return "values: arrays came or went"
    size = np.maximum(before[::2], after[::2]).repeat(2)
    change = np.max(np.abs(before - after) / np.maximum(size, 1e-30), initial=0)
    return f"{'exact only' if change <= SAME else 'values'}: {change:.1g} of the norm"


def compare(record: dict[str, Entry], only: str = "") -> list[str]:
    """A line for every entry that moved or could not be computed."""
    now, failed = computed(only)
    lines = [f"{name}: {why}" for name, why in failed.items() if why]
    for name in sorted(record.keys() | now.keys()):
        if name.startswith(only) and not _among(name, failed):
            moved = difference(record.get(name), now.get(name))
            lines += [f"{name}: {moved}"] if moved else []
    return lines


def write(record: dict[str, Entry], only: str = "") -> list[str]:
    """Record the entries; a line for each that could not be computed."""
    now, failed = computed(only)
    for name, of in record.items():
        if not name.startswith(only) or _among(name, failed):
            now[name] = of
    lines = [f"{json.dumps(name)}: {json.dumps(now[name])}" for name in sorted(now)]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{RECORD.name}: {len(lines)} entries")
    return [f"{name}: {why}" for name, why in failed.items() if why]


def _among(name: str, failed: dict[str, str]) -> bool:
    """Whether a job that failed computes this entry."""
    return any(f"{name}/".startswith(f"{job}/") for job in failed)


def recorded() -> dict[str, Entry]:
    """The record; empty if there is none."""
    return json.loads(RECORD.read_text("utf-8")) if RECORD.is_file() else {}


def main() -> int:
    """The command; 1 if anything moved or could not be computed."""
    parser = argparse.ArgumentParser(description="see the top of this file")
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("--only", default="", help="names of entries begin so")
    asked = parser.parse_args()
    act = {"write": write, "compare": compare}[asked.what]
    lines = act(recorded(), asked.only)
    print("\n".join([*lines, f"{len(lines)} moved or not computed"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
