# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The page of a reproduced paper, in Markdown: a table, and a section a claim."""

from collections.abc import Sequence
from typing import Any

from fedblend_reproductions.claims import Verdict


def page(
    title: str,
    command: str,
    entries: Sequence[dict[str, Any]],
    at: str,
    also: str | None = None,
) -> str:
    """All that was found.

    Args:
        title: of the page.
        command: that made it.
        entries: of claims, see ``claims.entry``.
        at: the folder of the figures, as seen from the page.
        also: another page, where the same claims are measured at the paper's sizes.
    """
    lines = [f"# {title}", "", f"Made by `{command}`.", ""]
    if also is not None:
        lines += [f"Some claims at the paper's sizes: [{also}]({also}).", ""]
    if any(found["quick"] for found in entries):
        lines += ["Small sizes (`--quick`): verdicts mean little.", ""]
    lines += ["| claim | paper | ours | verdict |", "|---|---|---|---|"]
    lines += [_row(found) for found in entries]
    for found in entries:
        lines += ["", *_section(found, at)]
    return "\n".join(lines) + "\n"


def _row(found: dict[str, Any]) -> str:
    claim = f"{found['claim']} {found['title']}"
    verdict = found["verdict"]
    if before := found.get("before"):
        verdict += f" (before: {before['verdict']})"
    return _line((claim, found["paper"], found["ours"], verdict))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _section(found: dict[str, Any], at: str) -> list[str]:
    lines = [f"## {found['claim']} {found['title']}", ""]
    lines += [f"The paper: {found['paper']}", ""]
    lines += [f"Ours ({found['verdict']}): {found['ours']}", ""]
    if before := found.get("before"):
        rule = before.get("criterion")
        told = f"{before['ours']} Criterion: {rule}" if rule else before["ours"]
        lines += [f"Before ({before['verdict']}): {told}", ""]
    for part in ("criterion", "why"):
        if found.get(part):
            lines += [found[part], ""]
    if found.get("undecided") and found["verdict"] != Verdict.reproduced:
        lines += [f"It cannot be decided here: {found['undecided']}.", ""]
    if found.get("table"):
        head, *rows = found["table"]
        lines += [_line(head), "|---" * len(head) + "|", *map(_line, rows), ""]
    for name in found["figures"]:
        lines += [f"![{found['claim']}: {found['title']}]({at}/{name})", ""]
    numbers = f"[{found['claim']}.json]({at}/{found['claim']}.json)"
    took = f"{found['seconds']:.0f} s on {found['device']}"
    if found.get("resumed"):
        took += " for what was not kept from earlier runs"
    if found.get("commit"):
        took += f", commit {found['commit']}"
    here = {name: found.get(name) for name in ("commit", "device")}
    for one in found.get("measured_by", ()):
        if one != here:
            took += f"; measured on {one['device']}, commit {one['commit']}"
    return [*lines, f"All numbers: {numbers}; {took}."]
