# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The server's side of an experiment: from a folder and a post to results.

The folder is that of a run, see ``outputs``, with the server's books, its audit and the
name of the experiment in it; all that a server which was killed needs to go on.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fedblend.config import privacy, toml
from fedblend.config.config import Config, check
from fedblend.config.data import own_rows
from fedblend.core import Key
from fedblend.deploy.contract import (
    Facts,
    budget_alone,
    in_theory,
    method_of,
    nodes_of,
    rates_of,
    root_of,
    row_of,
    task_of,
    text_of,
)
from fedblend.deploy.messages import UNKNOWN, Message
from fedblend.deploy.ops.audit import Audit, plain
from fedblend.deploy.server.attendance import Attendance, Known
from fedblend.deploy.server.checkpoint import Busy, ServerCheckpoint
from fedblend.deploy.server.coordinator import Coordinator
from fedblend.deploy.server.membership import Membership
from fedblend.deploy.server.progress import Identity, identity, recalled
from fedblend.deploy.server.settings import BelowQuorum, RoundRules, Setting
from fedblend.deploy.server.setup import rowless, setting
from fedblend.deploy.transport import Patience, Transport
from fedblend.errors import ConfigError, RunError
from fedblend.experiments import results, run_folder
from fedblend.experiments.run_folder import Folder
from fedblend.simulation.precision import precision


def lead(
    path: Path,
    post: Transport,
    *,
    shared_seed: bool = False,
    on_step: Callable[[int, int], None] = lambda round, rounds: None,
    poll: float = 0.2,
) -> dict[str, Any]:
    """Run the experiment of a folder to its end, from wherever it is.

    Args:
        path: a folder with config.toml.
        post: how messages travel.
        shared_seed: draw the server's noise from the seed that nodes know, too. Only
            for tests: noise that clients can draw themselves protects nobody.
        on_step: called with the round after every step.
        poll: seconds between two looks into the message box.

    Returns:
        The summary, as in ``summary.json``.

    Raises:
        RunError: it cannot go on, and why; the books are whole.
    """
    folder = Folder(path)
    config = check(toml.read(folder.config), str(folder.config))
    if folder.summary.exists():
        return run_folder.read_summary(folder)
    books, audit = ServerCheckpoint(path / "server"), Audit(path / "audit.jsonl")
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


def lead_noted(path: Path, post: Transport, shared_seed: bool) -> None:
    """Lead, and leave word in the folder if the run cannot go on."""
    (path / STOPPED).unlink(missing_ok=True)
    try:
        lead(path, post, shared_seed=shared_seed)
    except Busy:
        # Another server leads this experiment, which goes on.
        raise
    except (ValueError, OSError) as error:
        run_folder.write_text(path / STOPPED, f"{error}\n")
        raise


def reason_of_stop(path: Path) -> str | None:
    """Why an experiment stopped, if it did."""
    place = path / STOPPED
    return place.read_text().strip() if place.exists() else None


def progress(path: Path) -> tuple[int, int]:
    """The round that an experiment is in, and how many there are."""
    try:
        said = run_folder.read_json(path / "server" / "progress.json")
        return int(said["round"]), int(said["rounds"])
    except (RunError, KeyError, TypeError, ValueError):
        return 0, 0


def _led(folder, config, books, audit, post, shared_seed, on_step, poll):
    def note(event: str, **fields: Any) -> None:
        audit.append(event, **plain(fields))

    own = identity(folder.path / "server" / "experiment.json")
    entry = books.read()
    for complaint in entry.complaints if entry is not None else ():
        note("books were damaged", reason=complaint)
    before = recalled(entry)
    clients = nodes_of(config).clients
    roll = Attendance(config, clients, before.known)
    words = {"config": text_of(config)}
    invitation = Message("meet", own.experiment, UNKNOWN, words=words)
    directory = Membership(post, invitation, roll.accept, note)
    patience = _patience(config, poll)
    known = roll.complete(directory, patience)
    facts = _facts(config, known)
    if known.silent:
        note("constants are not told", clients=known.silent)
    root = root_of(config)
    key = root if shared_seed else _server_key(config, own, root, before.redone)
    rules = _rules(config, patience)
    chosen = _setting(config, own, known, facts, rules, note, key)
    budget = budget_alone(config, method_of(config, clients, facts))
    alone = None if budget is None else budget._asdict()
    server = Coordinator(chosen._replace(alone=alone), directory, rules)
    if entry is not None:
        entry.restore(server)
    about = before._replace(known=known).words()
    again = folder.path / "server" / AGAIN
    if again.exists():
        server.enroll_again(
            [int(one) for one in run_folder.read_json(again)["clients"]]
        )
        books.save(server, about)
        again.unlink()
    said = folder.path / "server" / "progress.json"

    def tell() -> None:
        now = {"round": server.round, "rounds": server.rounds}
        run_folder.write_text(said, run_folder.as_json(now))
        on_step(server.round, server.rounds)

    tell()
    while not server.done:
        counted = server.round
        server.step()
        books.save(server, about)
        if server.records:
            run_folder.write_metrics(folder, server, [_seed(config)])
        if server.round != counted:
            tell()
    return _finish(folder, config, server, note, before.redone)


def _facts(config: Config, known: Known) -> Facts:
    """What the method is made of; refused if it needs what nodes do not tell."""
    solver = getattr(getattr(config.algorithm, "personal", None), "solver", None)
    for key, value in (
        ("algorithm.rate", "theory" if in_theory(config) else None),
        ("algorithm.personal.solver", solver),
    ):
        if known.silent and value in ("theory", "gradient_descent"):
            raise ConfigError(
                f'{key}: "{value}" needs constants L_i of all nodes, and clients '
                f"{list(known.silent)} do not tell theirs: accept.constants of a policy"
            )
    return Facts(known.rooms, known.constants, rates_of(config, known.constants))


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


def _rules(config: Config, patience: Patience) -> RoundRules:
    run, asked, clients = config.run, config.federation, nodes_of(config).clients
    more: dict[str, Any] = {}
    if asked is not None:
        more = {
            "quorum": asked.quorum,
            "spare": asked.spare,
            "longest": asked.longest_update,
            "longest_rest": asked.longest_rest,
            "largest": asked.largest_answer,
        }
    return RoundRules(
        rounds=run.rounds,
        cohort=run.cohort or clients,
        every=run.every or max(1, -(-run.rounds // 20)),
        patience=patience,
        **more,
    )


def _setting(
    config: Config, own: Identity, known: Known, facts: Facts, rules, note, key: Key
) -> Setting:
    run, root, task = config.run, root_of(config), task_of(config)
    built = method_of(config, nodes_of(config).clients, facts)
    federation = rowless(known.counts, ())
    capacities = {name: split.capacity for name, split in federation.splits.items()}
    rows = None
    if config.central is not None and config.central.file is not None:
        seed = nodes_of(config).seed
        rows = own_rows(config.central, task, None, seed).train.shard(0)
    return setting(
        built.algorithm,
        built.model.init(root),
        federation,
        root,
        rules,
        row=row_of(task),
        experiment=own.experiment,
        terms={
            "config": text_of(config),
            "capacities": capacities,
            "rooms": dict(facts.rooms),
            "constants": facts.known is not None,
            "rates": facts.rates,
        },
        note=note,
        metrics=built.measures,
        weights=run.weights,
        reduction=run.reduction,
        trim=run.trim,
        central=rows,
        server_key=key,
    )


def _server_key(config: Config, own: Identity, root: Key, redone: int) -> Key:
    """Noise that protects is drawn from what nodes do not know.

    A round that is counted again may hear others than before: the same noise on both
    sums would cancel out of their difference.
    """
    if config.privacy is None:
        return root
    low, high = own.secret & 0xFFFFFFFF, own.secret >> 32
    secret = jax.random.wrap_key_data(jnp.asarray([high, low], jnp.uint32))
    return jax.random.fold_in(secret, redone) if redone else secret


def _seed(config: Config) -> int:
    assert isinstance(config.run.seed, int)
    return config.run.seed


def _finish(
    folder: Folder, config: Config, server: Coordinator, note, redone: int
) -> dict[str, Any]:
    """Write what is known at the end; the summary last, it says that all is there."""
    harm = results.write_results(folder, server, [_seed(config)], {})
    rounds = config.run.rounds + redone
    told = config.model_copy(
        update={"run": config.run.model_copy(update={"rounds": rounds})}
    )
    summary = {
        "name": config.name,
        "algorithm": getattr(config.algorithm, "name"),  # noqa: B009
        **privacy.report(told, server.federated_data.clients),
        **harm,
        "runs": [{"seed": _seed(config), **server.summary()}],
    }
    note("finished", round=server.round)
    run_folder.write_text(folder.summary, run_folder.as_json(summary))
    return run_folder.read_json(folder.summary)
