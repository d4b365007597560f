# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The server's side of an experiment: from a folder and a post to results.

The folder is that of a run, see ``outputs``, with the server's books, its audit and the
name of the experiment in it; all that a server which was killed needs to go on.
"""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedblend.core import Key
from fedblend.experiment import central, harm, outputs, privacy, toml
from fedblend.experiment.config import Config, check
from fedblend.experiment.federation.agreement import (
    method_of,
    nodes_of,
    root_of,
    row_of,
    task_of,
    text_of,
)
from fedblend.experiment.federation.audit import Audit, plain
from fedblend.experiment.federation.roll import Counts, Roll
from fedblend.experiment.outputs import Folder
from fedblend.experiment.section import RunError
from fedblend.report.harm import plot_harm, sentence
from fedblend.runtime.checkpoint import CheckpointError
from fedblend.runtime.flower.books import Books, Entry
from fedblend.runtime.flower.directory import Directory
from fedblend.runtime.flower.leading import rowless, setting
from fedblend.runtime.flower.letters import UNKNOWN, Letter
from fedblend.runtime.flower.post import Patience, Post
from fedblend.runtime.flower.ruling import BelowQuorum, Rules
from fedblend.runtime.flower.server import Server
from fedblend.runtime.precision import precision


def lead(
    path: Path,
    post: Post,
    *,
    shared_seed: bool = False,
    on_step: Callable[[int, int], None] = lambda round, rounds: None,
    poll: float = 0.2,
) -> dict[str, Any]:
    """Run the experiment of a folder to its end, from wherever it is.

    Args:
        path: a folder with config.toml.
        post: how letters travel.
        shared_seed: draw the server's noise from the seed that nodes know, too. Only
            for tests: noise that clients can draw themselves protects nobody.
        on_step: called with the round after every step.
        poll: seconds between two looks into the letter box.

    Returns:
        The summary, as in ``summary.json``.

    Raises:
        RunError: it cannot go on, and why; the books are whole.
    """
    folder = Folder(path)
    config = check(toml.read(folder.config), str(folder.config))
    if folder.summary.exists():
        return outputs.read_summary(folder)
    books, audit = Books(path / "server"), Audit(path / "audit.jsonl")
    try:
        with precision(config.run.precision):
            return _led(folder, config, books, audit, post, shared_seed, on_step, poll)
    except BelowQuorum as error:
        raise RunError(
            f"{path}: {error}; the run stopped after its last counted round and goes "
            "on with --resume"
        ) from None
    finally:
        books.close()


STOPPED = "stopped.txt"
"""Why a run stopped by itself; a server that was killed leaves no word."""


AGAIN = "again.json"
"""Clients that have lost their states, to be enrolled again when the server starts."""


def lead_noted(path: Path, post: Post, shared_seed: bool) -> None:
    """Lead, and leave word in the folder if the run cannot go on."""
    (path / STOPPED).unlink(missing_ok=True)
    try:
        lead(path, post, shared_seed=shared_seed)
    except (ValueError, OSError) as error:
        outputs.write_text(path / STOPPED, f"{error}\n")
        raise


def reason_of_stop(path: Path) -> str | None:
    """Why an experiment stopped, if it did."""
    place = path / STOPPED
    return place.read_text().strip() if place.exists() else None


def progress(path: Path) -> tuple[int, int]:
    """The round that an experiment is in, and how many there are."""
    try:
        said = outputs.read_json(path / "server" / "progress.json")
        return int(said["round"]), int(said["rounds"])
    except (RunError, KeyError, TypeError, ValueError):
        return 0, 0


def _led(folder, config, books, audit, post, shared_seed, on_step, poll):
    def note(event: str, **fields: Any) -> None:
        audit.append(event, **plain(fields))

    known = _known(folder.path / "server" / "experiment.json")
    entry = books.read()
    for complaint in entry.complaints if entry is not None else ():
        note("books were damaged", reason=complaint)
    recalled = _recalled(entry)
    clients = nodes_of(config).clients
    roll = Roll(config, clients, recalled.counts)
    words = {"config": text_of(config)}
    invitation = Letter("meet", known["experiment"], UNKNOWN, words=words)
    directory = Directory(post, invitation, roll.accept, note)
    patience = _patience(config, poll)
    counts = roll.complete(directory, patience)
    root = root_of(config)
    own = root if shared_seed else _server_key(config, known, root, recalled.redone)
    server = _server(config, known, counts, directory, patience, note, own)
    if entry is not None:
        entry.restore(server)
    about = {
        "counts": {name: held.tolist() for name, held in counts.items()},
        "redone": recalled.redone,
    }
    again = folder.path / "server" / AGAIN
    if again.exists():
        server.enroll_again([int(one) for one in outputs.read_json(again)["clients"]])
        books.save(server, about)
        again.unlink()
    said = folder.path / "server" / "progress.json"

    def tell() -> None:
        now = {"round": server.round, "rounds": server.rounds}
        outputs.write_text(said, outputs.as_json(now))
        on_step(server.round, server.rounds)

    tell()
    while not server.done:
        before = server.round
        server.step()
        books.save(server, about)
        if server.records:
            run: Any = server
            outputs.write_metrics(folder, run, [_seed(config)])
        if server.round != before:
            tell()
    return _finish(folder, config, server, note, recalled.redone)


class Recalled(NamedTuple):
    """What the books say beside where the server is."""

    counts: dict[str, list[int]] | None = None
    """Every client's rows in each split, once they are known."""
    redone: int = 0
    """Rounds that may be counted a second time, because newer books were damaged."""


def _recalled(entry: Entry | None) -> Recalled:
    if entry is None:
        return Recalled()
    try:
        counts = {
            str(name): [int(count) for count in held]
            for name, held in entry.about["counts"].items()
        }
        # Older books are one step behind.
        redone = int(entry.about.get("redone", 0)) + bool(entry.complaints)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{entry.path}: its words are damaged ({type(error).__name__})"
        ) from None
    return Recalled(counts, redone)


def _known(path: Path) -> dict[str, Any]:
    """The name of the experiment and the server's secret, drawn once."""
    if not path.exists():
        drawn = {"experiment": secrets.token_hex(8), "secret": secrets.randbits(63)}
        outputs.write_text(path, outputs.as_json(drawn))
        path.chmod(0o600)
    known = outputs.read_json(path)
    if not isinstance(known.get("experiment"), str) or not isinstance(
        known.get("secret"), int
    ):
        raise RunError(f"{path}: is damaged: it has no experiment and no secret")
    return known


def _patience(config: Config, poll: float) -> Patience:
    asked = config.federation
    if asked is None:
        return Patience(poll=poll)
    return Patience(
        deadline=asked.deadline,
        resend=asked.resend,
        attempts=asked.attempts,
        poll=poll,
    )


def _server(
    config: Config, known, counts: Counts, directory, patience, note, server_key: Key
) -> Server:
    clients = nodes_of(config).clients
    built, run, asked = method_of(config, clients), config.run, config.federation
    more: dict[str, Any] = {}
    if asked is not None:
        more = {
            "quorum": asked.quorum,
            "spare": asked.spare,
            "longest": asked.longest_update,
            "largest": asked.largest_answer,
        }
    rules = Rules(
        rounds=run.rounds,
        cohort=run.cohort or clients,
        every=run.every or max(1, -(-run.rounds // 20)),
        patience=patience,
        **more,
    )
    root = root_of(config)
    federation = rowless(counts, ())
    capacities = {name: split.capacity for name, split in federation.splits.items()}
    own = None
    if config.central is not None and config.central.file is not None:
        data = nodes_of(config)
        rows = central.own_rows(config.central, task_of(data), None, data.seed)
        own = rows.train.shard(0)
    return Server(
        setting(
            built.algorithm,
            built.model.init(root),
            federation,
            root,
            rules,
            row=row_of(task_of(nodes_of(config))),
            experiment=known["experiment"],
            terms={"config": text_of(config), "capacities": capacities},
            note=note,
            weights=run.weights,
            reduction=run.reduction,
            trim=run.trim,
            central=own,
            server_key=server_key,
        ),
        directory,
        rules,
    )


def _server_key(config: Config, known: dict[str, Any], root: Key, redone: int) -> Key:
    """Noise that protects is drawn from what nodes do not know.

    A round that is counted again may hear others than before: the same noise on both
    sums would cancel out of their difference.
    """
    if config.privacy is None:
        return root
    low, high = known["secret"] & 0xFFFFFFFF, known["secret"] >> 32
    secret = jax.random.wrap_key_data(jnp.asarray([high, low], jnp.uint32))
    return jax.random.fold_in(secret, redone) if redone else secret


def _seed(config: Config) -> int:
    assert isinstance(config.run.seed, int)
    return config.run.seed


def _finish(
    folder: Folder, config: Config, server: Server, note, redone: int
) -> dict[str, Any]:
    """Write what is known at the end; the summary last, it says that all is there."""
    from fedblend.report.figures import plot_rows

    seeds = [_seed(config)]
    run: Any = server
    outputs.write_models(folder, run, seeds)
    outputs.write_clients(folder, run, seeds, {})
    rows = outputs.rows(run, seeds)
    harmed = harm.harm_of(run, rows, {}) if server.measured[0] else None
    if server.measured[0]:
        plot_rows(rows, folder.figures, server.measured)
    if harmed is not None:
        harm.write_harm(folder, harmed)
        plot_harm(*harmed, folder.figures / "harm")
    rounds = config.run.rounds + redone
    told = config.model_copy(
        update={"run": config.run.model_copy(update={"rounds": rounds})}
    )
    summary = {
        "name": config.name,
        "algorithm": getattr(config.algorithm, "name"),  # noqa: B009
        **privacy.report(told, server.federation.clients),
        **({} if harmed is None else {"harm": sentence(harmed.found)}),
        "runs": [{"seed": seeds[0], **server.summary()}],
    }
    note("finished", round=server.round)
    outputs.write_text(folder.summary, outputs.as_json(summary))
    return outputs.read_json(folder.summary)
