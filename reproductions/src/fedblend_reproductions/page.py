# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A paper's page in Markdown: a table with a row for each claim, then its sections."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedblend_reproductions.claims import Claim, Verdict

SHORT = {Verdict.partly: "partly"}
"""Verdicts that are shorter in the table."""
CRITERION = re.compile(r"(?:The criterion|Criterion)(, fixed before the run)?: ")
"""How a text begins that states the criterion before the setting."""
IN_JSON = ("training loss", "best round")
"""Columns beside the test accuracy that the page leaves to the JSON file."""
SENTENCE = re.compile(r"(?<=[\w%)][.!?]) (?=[A-Z\d`])")
SEMICOLON = re.compile(r"; (?![^(]*\))")
DECIMAL = re.compile(r"\d+\.\d+")
SHARED = "Settings of several claims"
"""Heading of the sentences that more than one claim has."""
LONGEST = 45
"""Words of a sentence that is not divided at its semicolons."""
SHORTEST = 30
"""Words of a sentence that needs no list."""


class Part(NamedTuple):
    """Claims that share a folder of results.

    Attributes:
        claims: of the paper, at least those of the entries.
        entries: stored results, see ``claims.entry``.
        figures: the folder of figures and JSON files, relative to the page.
        sizes: what distinguishes these claims from others of the same name.
    """

    claims: Iterable[Claim]
    entries: Sequence[dict[str, Any]]
    figures: str
    sizes: str = ""


def page(title: str, command: str, *parts: Part) -> str:
    """Results of claims as Markdown.

    Args:
        title: of the page.
        command: that made the page.
        parts: claims with their results.
    """
    rows, sections, shared = [], [], _shared_sentences(parts)
    for part in parts:
        by_name = {claim.name: claim for claim in part.claims}
        for found in part.entries:
            claim = by_name[found["claim"]]
            rows.append(_row(claim, found, part))
            sections += ["", *_section(claim, found, part, shared)]
    if shared:
        sections += ["", f"## {SHARED}", ""]
        sections += [f"- {at} ({', '.join(names)})" for at, names in shared.items()]
    lines = [f"# {title}", "", f"Made by `{command}`.", ""]
    if any(found["quick"] for part in parts for found in part.entries):
        lines += ["Small sizes (`--quick`): verdicts mean little.", ""]
    lines += ["| claim | ours | the paper | verdict |", "|---|---|---|---|", *rows]
    return "\n".join([*lines, *sections]) + "\n"


def anchor(heading: str) -> str:
    """The fragment by which GitHub links to a heading.

    >>> anchor("F9b Shakespeare: FLIX against FedAvg")
    'f9b-shakespeare-flix-against-fedavg'
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _heading(found: dict[str, Any], part: Part) -> str:
    return f"{_name(found, part)}{':' if part.sizes else ''} {found['title']}"


def _name(found: dict[str, Any], part: Part) -> str:
    return f"{found['claim']} {part.sizes}".strip()


def _row(claim: Claim, found: dict[str, Any], part: Part) -> str:
    verdict = SHORT.get(found["verdict"], found["verdict"])
    heading = _heading(found, part)
    headline = claim.headline(found["numbers"])
    link = f"[{verdict}](#{anchor(heading)})"
    return _line((heading, headline, claim.paper_number, link))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _section(
    claim: Claim, found: dict[str, Any], part: Part, shared: Mapping[str, Sequence[str]]
) -> list[str]:
    lines = [f"## {_heading(found, part)}", ""]
    theirs = f" The paper: {claim.paper_number}." if claim.paper_number else ""
    verdict = found["verdict"].capitalize()
    lines += [f"**{verdict}.** {claim.headline(found['numbers'])}.{theirs}", ""]
    lines += [f"**The paper.** {found['paper']}", ""]
    table = _table(found)
    lines += [*table, ""] if table else []
    ours = [one for one in _sentences(found["ours"]) if not _is_in(one, table)]
    lines += _bullets("Ours", ours)
    for kind in ("criterion", "why"):
        if found.get(kind):
            label, text = _labeled(kind, found[kind])
            sentences = _sentences(text)
            own = [one for one in sentences if one not in shared]
            lines += _bullets(label, own)
            if len(own) < len(sentences):
                lines[-1:] = [f"- More: [{SHARED.lower()}](#{anchor(SHARED)}).", ""]
    if found.get("undecided") and found["verdict"] != Verdict.reproduced:
        lines += [f"**It cannot be decided here:** {found['undecided']}.", ""]
    if before := found.get("before"):
        lines += [
            f"**By an earlier criterion or setting: {before['verdict']}.** The JSON "
            "file has both.",
            "",
        ]
    for name in found["figures"]:
        lines += [f"![{found['claim']}: {found['title']}]({part.figures}/{name})", ""]
    numbers = f"[{found['claim']}.json]({part.figures}/{found['claim']}.json)"
    return [*lines, f"All numbers: {numbers}. {_measured(found)}"]


def _table(found: dict[str, Any]) -> list[str]:
    """The table of a claim; with accuracies, without what only the JSON needs."""
    if not found.get("table"):
        return []
    head = found["table"][0]
    kept = [
        place
        for place, name in enumerate(head)
        if "test accuracy" not in head or name not in IN_JSON
    ]
    rows = [[row[place] for place in kept] for row in found["table"]]
    if rows[0] == ["", "", "rate", "test accuracy"]:
        rows = _by_setting(rows[1:])
    head, *rows = rows
    return [_line(head), "|---" * len(head) + "|", *map(_line, rows)]


def _by_setting(rows: Iterable[Sequence[str]]) -> list[list[str]]:
    """Accuracies with a row for each method and a column for each setting."""
    cells = {(method, at): f"{value} ({rate})" for at, method, rate, value in rows}
    methods, settings = (
        list(dict.fromkeys(names)) for names in zip(*cells, strict=True)
    )
    table = [
        [name, *(cells.get((name, at), "") for at in settings)] for name in methods
    ]
    return [["test accuracy (rate)", *settings], *table]


def _bullets(label: str, sentences: Sequence[str]) -> list[str]:
    """A labeled list; one short sentence stays in the label's line."""
    if not sentences:
        return []
    if len(sentences) == 1 and len(sentences[0].split()) <= SHORTEST:
        return [f"**{label}.** {sentences[0]}", ""]
    return [f"**{label}.**", "", *(f"- {one}" for one in sentences), ""]


def _sentences(text: str) -> list[str]:
    """The sentences of a text, long lists of results divided at their semicolons.

    >>> _sentences("Ours: 0.5 or so (no. 3). Theirs (a; b).")
    ['Ours: 0.5 or so (no. 3).', 'Theirs (a; b).']
    """
    found = []
    for sentence in SENTENCE.split(text):
        if len(sentence.split()) <= LONGEST:
            found.append(sentence)
        else:
            items = SEMICOLON.split(sentence)
            found += [f"{item[0].upper()}{item[1:].rstrip('.')}." for item in items]
    return found


def _shared_sentences(parts: Iterable[Part]) -> dict[str, list[str]]:
    """Sentences of settings that more than one claim has, with their claims."""
    claims: dict[str, list[str]] = {}
    for part in parts:
        for found in part.entries:
            if not found.get("why"):
                continue
            label, text = _labeled("why", found["why"])
            first = 1 if label.startswith("Criterion") else 0
            for sentence in dict.fromkeys(_sentences(text)[first:]):
                if not sentence.endswith((": yes.", ": no.")):
                    claims.setdefault(sentence, []).append(_name(found, part))
    return {at: names for at, names in claims.items() if len(names) > 1}


def _is_in(sentence: str, table: Sequence[str]) -> bool:
    """Whether a table has all numbers of a sentence that has several."""
    numbers, cells = DECIMAL.findall(sentence), set(DECIMAL.findall(" ".join(table)))
    return len(numbers) > 2 and cells.issuperset(numbers)


def _labeled(part: str, text: str) -> tuple[str, str]:
    """The label of a criterion or a setting, and its text."""
    label = {"criterion": "Criterion", "why": "Setting"}[part]
    if match := CRITERION.match(text):
        setting = " and setting" if part == "why" else ""
        label = f"Criterion{setting}{match[1] or ''}"
        text = text[match.end() :]
    return label, f"{text[0].upper()}{text[1:]}"


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
