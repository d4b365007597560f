# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A paper's page in Markdown: a table with a row for each claim, then its sections."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from fedblend_reproductions.claims import Claim, Verdict

SHORT = {Verdict.partly: "partly"}
"""Verdicts that are shorter in the table."""
CRITERION = re.compile(r"(?:The criterion|Criterion)(, fixed before the run)?: ")
"""How a text begins that states the criterion before the setting."""


def page(
    title: str,
    command: str,
    claims: Iterable[Claim],
    entries: Sequence[dict[str, Any]],
    figures: str,
    also: str | None = None,
) -> str:
    """Results of claims as Markdown.

    Args:
        title: of the page.
        command: that made the page.
        claims: of the paper, at least those of the entries.
        entries: stored results, see ``claims.entry``.
        figures: the folder of figures and JSON files, relative to the page.
        also: another page, with the same claims at the paper's sizes.
    """
    by_name = {claim.name: claim for claim in claims}
    pairs = [(by_name[found["claim"]], found) for found in entries]
    lines = [f"# {title}", "", f"Made by `{command}`.", ""]
    if also is not None:
        lines += [f"Some claims at the paper's sizes: [{also}]({also}).", ""]
    if any(found["quick"] for found in entries):
        lines += ["Small sizes (`--quick`): verdicts mean little.", ""]
    lines += ["| claim | ours | the paper | verdict |", "|---|---|---|---|"]
    lines += [_row(claim, found) for claim, found in pairs]
    for claim, found in pairs:
        lines += ["", *_section(claim, found, figures)]
    return "\n".join(lines) + "\n"


def anchor(heading: str) -> str:
    """The fragment by which GitHub links to a heading.

    >>> anchor("F9b Shakespeare: FLIX against FedAvg")
    'f9b-shakespeare-flix-against-fedavg'
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _heading(found: dict[str, Any]) -> str:
    return f"{found['claim']} {found['title']}"


def _row(claim: Claim, found: dict[str, Any]) -> str:
    verdict = SHORT.get(found["verdict"], found["verdict"])
    link = f"[{verdict}](#{anchor(_heading(found))})"
    headline = claim.headline(found["numbers"])
    return _line((_heading(found), headline, claim.paper_number, link))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _section(claim: Claim, found: dict[str, Any], figures: str) -> list[str]:
    lines = [f"## {_heading(found)}", ""]
    theirs = f" The paper: {claim.paper_number}." if claim.paper_number else ""
    verdict = found["verdict"].capitalize()
    lines += [f"**{verdict}.** {claim.headline(found['numbers'])}.{theirs}", ""]
    lines += [f"**The paper.** {found['paper']}", ""]
    lines += [f"**Ours.** {found['ours']}", ""]
    for part in ("criterion", "why"):
        if found.get(part):
            lines += [_labeled(part, found[part]), ""]
    if found.get("undecided") and found["verdict"] != Verdict.reproduced:
        lines += [f"**It cannot be decided here:** {found['undecided']}.", ""]
    if before := found.get("before"):
        rule = before.get("criterion")
        text = f"{before['ours']} Criterion: {rule}" if rule else before["ours"]
        lines += [f"**Before ({before['verdict']}).** {text}", ""]
    if found.get("table"):
        head, *rows = found["table"]
        lines += [_line(head), "|---" * len(head) + "|", *map(_line, rows), ""]
    for name in found["figures"]:
        lines += [f"![{found['claim']}: {found['title']}]({figures}/{name})", ""]
    numbers = f"[{found['claim']}.json]({figures}/{found['claim']}.json)"
    return [*lines, f"All numbers: {numbers}. {_measured(found)}"]


def _labeled(part: str, text: str) -> str:
    """A paragraph of a criterion or a setting, with its label in bold."""
    label = {"criterion": "Criterion", "why": "Setting"}[part]
    if match := CRITERION.match(text):
        setting = " and setting" if part == "why" else ""
        label = f"Criterion{setting}{match[1] or ''}"
        text = text[match.end() :]
    return f"**{label}.** {text[0].upper()}{text[1:]}"


def _measured(found: dict[str, Any]) -> str:
    """When, where and at which commit a claim was measured."""
    here = {name: found.get(name) for name in ("commit", "device")}
    rest = ", the parts that were not cached" if found.get("resumed") else ""
    text = f"Measured in {found['seconds']:.0f} s on {_source(here)}{rest}."
    others = [one for one in found.get("measured_by", ()) if one != here]
    if others:
        text += f" Cached parts: {'; '.join(map(_source, others))}."
    return text


def _source(one: dict[str, Any]) -> str:
    """A device and the first digits of a commit."""
    if not one["commit"]:
        return one["device"]
    commit, plus, changes = one["commit"].partition("+")
    return f"{one['device']} at commit {commit[:8]}{plus}{changes}"
