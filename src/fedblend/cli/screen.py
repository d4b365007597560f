# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Where the command line writes: results on stdout, everything else on stderr."""

from typing import Any

BAD_INPUT = 2
INTERRUPTED = 130


def console(*, stderr: bool = False) -> Any:
    """A rich console; made anew, so that it follows redirections."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def note(text: str) -> None:
    """One line on stderr, whatever its width."""
    console(stderr=True).print(text, markup=False, soft_wrap=True)


def complain(text: str) -> int:
    """Say what is wrong with the input; the answer is the exit code."""
    note(f"error: {' '.join(text.split())}")
    return BAD_INPUT


def say_privacy(where: Any, summary: dict[str, Any]) -> None:
    """What a run promises of its clients' privacy, if it was asked to."""
    if "privacy" in summary:
        text = f"privacy: {summary['privacy']['sentence']}"
        where.print(text, markup=False, soft_wrap=True)
