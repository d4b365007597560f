# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend audit-privacy``: an empirical lower bound beside the promised epsilon."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedblend.cli import screen
from fedblend.cli.screen import ConfigFile, Format, OutputFormat, Settings, option

if TYPE_CHECKING:
    from fedblend_reproductions.audit_privacy.audit import Audit

VIOLATED = 1
LEAST_TRIALS = 8


def audit_privacy(
    file: ConfigFile,
    trials: Annotated[
        int, option("Private runs with canaries.", "N", min=LEAST_TRIALS)
    ] = 400,
    confidence: Annotated[
        float, option("That the lower bound is below the true epsilon.", "P")
    ] = 0.95,
    canaries: Annotated[
        int, option("Canaries in a run at most; 1 for independent games.", "N", min=1)
    ] = 64,
    seed: Annotated[
        int, option("Of coins and directions; noise is never the same.", "S", min=0)
    ] = 0,
    policy: Annotated[
        Path | None,
        option("Audit the clip and noise of this policy.toml instead.", "FILE"),
    ] = None,
    sets: Settings = None,
    format: OutputFormat = Format.table,
) -> None:
    """Attack a private training with canaries; bound its epsilon from below.

    For a file with the table [privacy], or with --policy for the answers of a node to
    an experiment that the file describes. Runs its clipping, noise and sampling many
    times, with clients that each send one of two updates, guesses which, and prints
    the epsilon that the guesses prove beside the promised one. Exit code 1 means that
    more leaks than is promised. No violation is no proof: another attack may find one.

    [bold]Examples[/bold]

    fedblend audit-privacy private.toml

    fedblend audit-privacy private.toml --trials 2000 --confidence 0.99 --format json

    fedblend audit-privacy experiment.toml --policy policy.toml
    """
    if not 0.5 <= confidence < 1:
        raise typer.BadParameter(f"--confidence: {confidence:g} is not in [0.5, 1)")
    config = screen.load(file, sets)
    audit = _audit_of(policy)
    with screen.errors_of(file), _progress() as on_step:
        found = audit(
            config,
            trials=trials,
            seed=seed,
            confidence=confidence,
            canaries=canaries,
            on_step=on_step,
        )
    if format is Format.json:
        screen.say_json({**found._asdict(), "verdict": _verdict(found)})
    else:
        _print(found)
    if found.violated:
        raise typer.Exit(VIOLATED)


def _audit_of(policy: Path | None) -> "Callable[..., Audit]":
    """The audit of a configuration, or of a node with this policy."""
    if policy is None:
        from fedblend_reproductions.audit_privacy.audit import audit

        return audit
    from fedblend_federation.policy.policy import load_policy
    from fedblend_reproductions.audit_privacy.node import audit_node

    with screen.errors_of(policy):
        own = load_policy(policy)
    return lambda config, **options: audit_node(config, own, **options)


def _print(found: "Audit") -> None:
    neighbors = found.adjacency.replace("_", " ")
    table = screen.table("epsilon", "", "", right=1)
    table.columns[2].justify = "left"
    rows = (
        (
            "promised",
            found.promised,
            f"at most, at delta {found.delta:g} ({neighbors})",
        ),
        ("lower bound", found.lower, f"at least, with confidence {found.confidence:g}"),
        ("  of any mechanism", found.any_mechanism, "assumes nothing of the noise"),
        ("  of the accountant's", found.by_accountant, "the least it could promise"),
    )
    for name, value, about in rows:
        table.add_row(name, f"{value:.4g}", about)
    screen.console().print(table)
    screen.say(
        f"{found.trials} runs, {found.games} guesses, {found.accuracy:.1%} right",
        _verdict(found),
    )


def _verdict(found: "Audit") -> str:
    if found.violated:
        return (
            f"VIOLATION: epsilon is at least {found.lower:.4g}, and "
            f"{found.promised:.4g} is promised: clipping, noise or sampling is not "
            "what [privacy], or [protect] of the policy, says"
        )
    share = found.lower / found.promised if found.promised else 0.0
    return (
        f"no violation found: this attack shows {share:.0%} of the promised epsilon; "
        "another one may show more"
    )


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar of rounds; nothing without a terminal."""
    console = screen.console(stderr=True)
    if not console.is_terminal:
        yield lambda done, rounds: None
        return
    from rich import progress as bars

    with bars.Progress(console=console, transient=True) as bar:
        task = bar.add_task("runs with canaries", total=None)
        yield lambda done, rounds: bar.update(task, completed=done, total=rounds)
