# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The server's side of an experiment: from a folder and a transport to results.

The folder is that of a run, see ``runs.run_folder``, with the server's
checkpoint, its audit and the name of the experiment in it: all that a server which was
killed needs to go on.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from fedblend.config.config import load
from fedblend.config.tables import privacy
from fedblend.config.tables.central import own_rows
from fedblend.errors import ConfigError, RunError
from fedblend.runs import results, run_folder
from fedblend.runs.run_folder import Folder
from fedblend.trees import precision
from fedblend_federation import raw_tables
from fedblend_federation.contract import Contract, Facts, contract_of
from fedblend_federation.ops.audit import Audit
from fedblend_federation.server.checkpoint import (
    Busy,
    ServerCheckpoint,
    identity,
    plain_descriptions,
    read_descriptions,
    read_nodes,
    write_progress,
)
from fedblend_federation.server.coordinator import Coordinator
from fedblend_federation.server.membership import (
    Census,
    Descriptions,
    Membership,
    invitation,
)
from fedblend_federation.server.settings import (
    BelowQuorum,
    ServerSetup,
    round_rules,
    secure_sums,
)
from fedblend_federation.transport import Transport

STOPPED = "stopped.txt"
"""Why a run stopped by itself; a server that was killed leaves no such file."""
STOP_TEXT = "{}: was stopped; --resume goes on"
ENROLL_AGAIN = "enroll_again.json"
"""Clients that have lost their states, to be enrolled again when the server starts."""


class Stopped(RuntimeError):
    """Somebody has asked the server to stop: ``STOPPED`` is there while it runs."""


def run_server(
    path: Path,
    transport: Transport,
    *,
    on_step: Callable[[int, int], None] = lambda round, rounds: None,
    poll: float = 0.2,
) -> dict[str, Any]:
    """Run the experiment of a folder to its end, from wherever it is.

    Args:
        path: a folder with config.toml.
        transport: how messages travel.
        on_step: called with the round after every step.
        poll: seconds between two calls of ``transport.receive``.

    Returns:
        The summary, as in ``summary.json``.

    Raises:
        RunError: it cannot go on, and why; the checkpoint is whole.
    """
    folder = Folder(path)
    contract = contract_of(load(folder.config))
    if folder.summary.exists():
        return run_folder.read_summary(folder)
    checkpoint = ServerCheckpoint(path / "server")
    try:
        with precision(contract.config.run.precision):
            return _run(folder, contract, checkpoint, transport, on_step, poll)
    except Stopped:
        raise RunError(STOP_TEXT.format(path)) from None
    except BelowQuorum as error:
        raise RunError(
            f"{path}: {error}; the run stopped after its last counted round and goes "
            "on with --resume"
        ) from None
    finally:
        checkpoint.close()


def run_in_flower(path: Path, transport: Transport) -> None:
    """As ``run_server``; if the run cannot go on, the folder gets the reason."""
    (path / STOPPED).unlink(missing_ok=True)
    try:
        run_server(path, transport)
    except Busy:
        # Another server runs this experiment, which goes on.
        raise
    except (ValueError, OSError) as error:
        run_folder.write_text(path / STOPPED, f"{error}\n")
        raise


def reason_of_stop(path: Path) -> str | None:
    """Why an experiment stopped, if it did."""
    place = path / STOPPED
    return place.read_text().strip() if place.exists() else None


def _run(
    folder: Folder,
    contract: Contract,
    checkpoint: ServerCheckpoint,
    transport: Transport,
    on_step: Callable[[int, int], None],
    poll: float,
) -> dict[str, Any]:
    note, place = Audit(folder.path / "audit.jsonl").note, folder.path / "server"
    experiment = identity(place / "experiment.json")
    saved = checkpoint.read()
    for reason in () if saved is None else saved.damage:
        note("checkpoint damaged", reason=reason)
    begun, repeated = read_descriptions(saved)
    nodes = read_nodes(place)
    descriptions = Descriptions(contract, begun, nodes.retired)
    membership = Membership(
        transport,
        invitation(experiment, contract.text),
        descriptions.accept,
        note,
        registered=nodes.registered,
        check=partial(_check_stop, folder.path),
    )
    asked = round_rules(contract.config, contract.clients, poll)
    census = descriptions.collect(membership, asked.timeouts, asked.quorum)
    if census.absent and saved is None:
        note("began without", clients=census.absent)
    present = contract.clients - len(census.absent)
    rules = round_rules(contract.config, present, poll)
    facts = _facts(contract, census)
    if contract.schema is not None:
        if saved is None:
            found = raw_tables.finish(contract.schema, census.statistics)
            run_folder.write_preprocessing(folder, [found], [contract.seed])
        fitted = run_folder.read_preprocessing(folder, contract.seed)
        if fitted is None:
            raise RunError(f"{folder.path}: has lost its preprocessing.json")
        facts = facts._replace(preprocessing=fitted)
    if census.withheld:
        note("constants withheld", clients=census.withheld)
    built, config = contract.method(facts), contract.config
    rows = None
    if config.central is not None and config.central.file is not None:
        seed = contract.nodes.seed
        own = own_rows(config.central, contract.task, None, seed, facts.preprocessing)
        rows = own.train.shard(0)
    budget = contract.budget_alone(built)
    capacities = {name: max(int(n.max()), 1) for name, n in census.counts.items()}
    setup = ServerSetup(
        experiment=experiment,
        algorithm=built.algorithm,
        params=jax.jit(built.model.init)(contract.root),  # as in a simulation
        counts=census.counts,
        row=contract.row,
        key=contract.root,
        metrics=built.measures,
        note=note,
        terms=contract.terms(facts, capacities),
        weights=config.run.weights,
        reduction=config.run.reduction,
        trim=config.run.trim,
        central=rows,
        alone=None if budget is None else budget._asdict(),
        absent=census.absent,
        names=nodes.names,
        secure=secure_sums(config, place),
    )
    server = Coordinator(setup, membership, rules)
    if saved is not None:
        saved.restore(server)
    about = plain_descriptions(begun or descriptions.found, repeated)
    again = place / ENROLL_AGAIN
    if again.exists():
        server.enroll_again(
            [int(client) for client in run_folder.read_json(again)["clients"]]
        )
        checkpoint.save(server, about)
        again.unlink()

    def report() -> None:
        write_progress(place, server.round, server.rounds)
        on_step(server.round, server.rounds)

    report()
    while not server.done:
        before = server.round, len(server.records)
        try:
            server.step()
        except Stopped:
            membership.check = lambda: None
            server.stop(over=False)
            raise
        checkpoint.save(server, about)
        if len(server.records) > before[1]:
            run_folder.write_metrics(folder, server, [contract.seed])
        if server.round > before[0]:
            report()
    summary = _results(folder, contract, server, repeated)
    server.stop(over=True)
    note("finished", round=server.round)
    run_folder.write_text(folder.summary, run_folder.json_text(summary))
    return run_folder.read_json(folder.summary)


def _check_stop(path: Path) -> None:
    if (path / STOPPED).exists():
        raise Stopped


def _results(
    folder: Folder, contract: Contract, server: Coordinator, repeated: int
) -> dict[str, Any]:
    """Write models and tables; the summary, which is to be written last."""
    config = contract.config
    harm = results.write_results(folder, server, [contract.seed], {})
    # Rounds that were counted twice cost privacy twice.
    rounds = {"rounds": config.run.rounds + repeated}
    spent = config.model_copy(update={"run": config.run.model_copy(update=rounds)})
    return {
        "name": config.name,
        "algorithm": config.algorithm.name,
        **privacy.report(spent, len(server.active), contract.schema is not None),
        **harm,
        "runs": [{"seed": contract.seed, **server.summary()}],
    }


def _facts(contract: Contract, census: Census) -> Facts:
    """The facts of a census; refused if the method needs what nodes withhold."""
    algorithm = contract.config.algorithm
    solver = getattr(getattr(algorithm, "personal", None), "solver", None)
    for key, value in (
        ("algorithm.rate", "theory" if contract.uses_theory else None),
        ("algorithm.personal.solver", solver),
    ):
        if census.withheld and value in ("theory", "gradient_descent"):
            raise ConfigError(
                f'{key}: "{value}" needs constants L_i of all nodes, and clients '
                f"{list(census.withheld)} withhold theirs: accept.constants of a policy"
            )
    return Facts(census.constants, contract.rates(census.constants))
