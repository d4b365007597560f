# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark cards: whole runs with fixed settings, and peers beside them.

    python benchmarks/cards.py --only A,G --peers --out results
    python benchmarks/cards.py --gpu-plan --budget 520 --out results
    python benchmarks/cards.py --only A --rounds 20 --cache programs     compiles
    python benchmarks/cards.py --only A --rounds 20 --cache programs     does not
    python benchmarks/cards.py --compare old/cards.json new/cards.json
    python benchmarks/cards.py --page

Writes ``cards.json`` after every card, and ``cards.png`` at the end. What the cards are
stands in ``card_tasks.py``, who the peers are in ``card_peers.py``.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import card_page
import card_tasks
from peers import own_python
from turns import HERE, PYTHON, Peer, environment, take_turns

FILE = "cards.json"
SCALING = "scaling.py"


class Plan(NamedTuple):
    """A card of a plan: seconds after which it is ended, and whether with its peers."""

    name: str
    limit: float
    peers: bool = False


GPU_PLAN = (
    Plan("A", 40, peers=True),
    Plan("A-APFL", 60),
    Plan("A-APFL-20k", 45),
    Plan("A-SCAFFOLD", 35),
    Plan("G", 15, peers=True),
    Plan("D-CNN", 20),
    Plan("D-ResNet18", 50),
    Plan("E", 45),
    Plan("F", 45),
    Plan("A-DP", 35),
    Plan("I", 30),
    Plan("G-SCAFFOLD", 10),
    Plan("G-FLIX", 20),
    Plan("G-APFL", 10),
    Plan("J-GRU", 40),
    Plan("J-dual", 20),
)
"""The most important first: what does not fit into the budget is left out."""
FAST = ("fedblend", "hand", "vmap")
BLOCK = 20 if shutil.which("nvidia-smi") else 2
"""Rounds that a fast peer computes in a turn."""
STEPS = 1750
"""Local steps that other peers compute in a turn, one client's after another's."""
TURNS = 4
STARTING = 240
"""Seconds that peers may take to start; a card may take so many more than its limit."""


class Worker:
    """A process that computes cards, one after another; a dead one is replaced."""

    def __init__(self):
        self._process: subprocess.Popen[str] | None = None
        self._cards = 0

    def ask(self, task: dict[str, Any], patience: float) -> dict[str, Any]:
        """The result of a card, or its ``failure``."""
        if self._process is None:
            self._process = subprocess.Popen(
                [str(PYTHON), str(HERE / "cards.py"), "--worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment(),
            )
            self._cards = 0
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        watch = threading.Timer(patience, process.kill)
        watch.start()
        asked = time.perf_counter()
        try:
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watch.cancel()
        self._cards += 1
        if not line:
            code = process.wait()
            self._process = None
            after = time.perf_counter() - asked
            return {"failure": f"the process ended with {code} after {after:.0f} s"}
        return {**json.loads(line), "first_of_its_process": self._cards == 1}

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._process = None


def serve() -> None:
    """Compute the cards that are asked for on standard input."""
    import card_runs
    import fedblend

    for line in sys.stdin:
        asked = json.loads(line)
        if asked["cache"]:
            fedblend.compile_cache(asked["cache"])
        try:
            if asked["name"] == "I":
                found = card_runs.sweep(asked["tiny"])
            else:
                found = card_runs.timed(_card(asked), asked["limit"])
        except Exception as error:
            found = {"failure": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(found), flush=True)


def _card(asked: dict[str, Any]) -> card_tasks.Card:
    card = card_tasks.CARDS[asked["name"]]
    card = card.tiny() if asked["tiny"] else card
    if asked["rounds"]:
        fewer = min(card.rounds, asked["rounds"])
        card = dataclasses.replace(card, rounds=fewer)
    return card


def scaling(tiny: bool, limit: float) -> dict[str, Any]:
    """The table of ``scaling.py``, as it prints it."""
    command = [str(PYTHON), str(HERE / SCALING), "--repeats", "1" if tiny else "10"]
    try:
        done = subprocess.run(
            command, env=environment(), text=True, capture_output=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"not ready after {limit:.0f} s"}
    if done.returncode:
        return {"failure": (done.stderr.strip().splitlines() or ["?"])[-1]}
    return {"table": done.stdout.strip().splitlines()}


def peers_of(
    card: card_tasks.Card, tiny: bool, turns: int, patience: float
) -> dict[str, Any]:
    """The peers of a card: seconds a round by turns, each in its own process.

    Who has not started after ``patience`` seconds is left out.
    """
    torch, fedjax = own_python(".venv-torch"), own_python(".venv-fedjax")

    def start(kind: str) -> Peer:
        slow = max(STEPS // (card.cohort * card.steps), 1)
        block = 1 if tiny else BLOCK if kind in FAST else slow
        if kind == "fedjax":  # G is the work of `work.py`
            options = ("mlp", "--hold")
            return Peer(kind, fedjax, "fedjax_round.py", *options, patience=patience)
        python = PYTHON if kind in ("fedblend", "hand") else torch
        options = (kind, card.name, "--hold", "--block", block)
        small = ("--tiny",) if tiny else ()
        return Peer(kind, python, "card_peers.py", *options, *small, patience=patience)

    kinds = ("fedblend", *card.peers)
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(max(cores // 2, 1)) as pool:  # those compile side by side
        peers = list(pool.map(start, kinds))
    found: dict[str, Any] = {
        peer.name: {"failure": peer.failure} for peer in peers if peer.failure
    }
    started = [peer for peer in peers if peer.failure is None]
    results = dict(
        zip([p.name for p in started], take_turns(started, turns), strict=True)
    )
    for name, result in results.items():
        found[name] = {
            "ms_a_round": 1000 * result.median,
            "least_ms_a_round": 1000 * result.least,
            "first_seconds": result.summary["first"],
            "rounds": result.summary["rounds"],
        }
        if "fedblend" in results:
            found[name]["to_fedblend"] = result.least / results["fedblend"].least
    return found


def about() -> dict[str, Any]:
    """Versions, hardware and commit."""
    import jax

    versions = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "optax", "numpy", "torch", "pfl", "fedjax"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=HERE,
        text=True,
        capture_output=True,
    ).stdout.strip()
    device = jax.devices()[0]
    return {
        "versions": versions,
        "hardware": {
            "device": device.device_kind,
            "devices": jax.device_count(),
            "backend": jax.default_backend(),
            "cores": len(os.sched_getaffinity(0)),
        },
        "commit": os.environ.get("FEDBLEND_COMMIT") or commit or "unknown",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "data": card_tasks.DATA,
    }


def run_plan(plan: list[Plan], given: argparse.Namespace) -> dict[str, Any]:
    """All cards of a plan, as far as the budget goes; the JSON grows on the way."""
    begun = time.perf_counter()
    folder = Path(given.out)
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"compile_cache": bool(given.cache), "cards": {}}
    shared = Worker()

    def left() -> float:
        return given.budget - (time.perf_counter() - begun)

    def save() -> None:
        (folder / FILE).write_text(json.dumps(found, indent=1) + "\n")

    for name, limit, with_peers in plan:
        if left() < min(limit, 30):
            found["cards"][name] = {"failure": "left out: the budget is spent"}
            continue
        limit = min(limit, left())
        card = card_tasks.CARDS.get(name)
        task = {
            "name": name,
            "limit": limit,
            "tiny": given.tiny,
            "cache": given.cache,
            "rounds": given.rounds,
        }
        if name == "H":
            result = scaling(given.tiny, limit)
        elif card is not None and card.alone:
            own = Worker()
            result = own.ask(task, min(limit + STARTING, left() + 20))
            own.close()
        else:
            result = shared.ask(task, min(limit + STARTING, left() + 20))
        if card is not None:
            shown = card.tiny() if given.tiny else card
            result = {"title": card.title, "settings": shown.settings(), **result}
            if card.most is not None and "seconds_of_card" in result:
                result["met"] = result["seconds_of_card"] <= card.most
        else:
            result = {"title": card_tasks.SPECIAL[name], **result}
        found["cards"][name] = result
        save()
        print(f"{name}: {card_page.line(result)}", flush=True)
        if with_peers and card is not None and card.peers and left() > 60:
            result["peers"] = peers_of(
                card, given.tiny, given.turns, min(STARTING, left() / 2)
            )
            save()
            print(f"{name}, peers: {card_page.peers_line(result)}", flush=True)
    shared.close()
    found = {**about(), "seconds": time.perf_counter() - begun, **found}
    save()
    card_page.figure(found, folder / "cards.png")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*card_tasks.CARDS, *card_tasks.SPECIAL]
    parser.add_argument("--only", help=f"some of {','.join(names)}")
    parser.add_argument("--peers", action="store_true", help="peers as well")
    parser.add_argument("--gpu-plan", action="store_true", help="by importance")
    parser.add_argument("--rounds", type=int, help="at most so many of each card")
    parser.add_argument("--limit", type=float, default=600, help="seconds of a card")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds of all")
    parser.add_argument("--turns", type=int, default=TURNS, help="of peers")
    parser.add_argument("--out", default="cards", help="folder of the JSON and figure")
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    parser.add_argument("--compare", nargs=2, metavar="JSON", help="OLD NEW: ratios")
    parser.add_argument("--page", action="store_true", help="write docs/benchmarks.md")
    parser.add_argument("--cache", help="folder of compiled programs; none by default")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        serve()
    elif given.compare:
        old, new = (json.loads(Path(path).read_text()) for path in given.compare)
        print("\n".join(card_page.comparison(old, new)))
    elif given.page:
        card_page.write()
    else:
        asked = given.only.split(",") if given.only else names
        for name in asked:
            if name not in names:
                raise SystemExit(f"--only: {name!r} is not one of {', '.join(names)}")
        plan = [Plan(name, given.limit, given.peers) for name in asked]
        if given.gpu_plan:
            plan = [one for one in GPU_PLAN if not given.only or one.name in asked]
        run_plan(plan, given)


if __name__ == "__main__":
    main()
