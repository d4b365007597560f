# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The page of ``fedblend auto``, from its folder.

``auto.json`` has the verdict and the methods, ``clients.csv``, ``why.csv`` and
``effects.csv`` what is told of clients. A section without facts is left out.
"""

import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedblend.algorithms.local_only import local_only
from fedblend.errors import RunError, hint
from fedblend.report.page.auto_tables import (
    CLIENT_GAIN,
    MISSING,
    AutoFiles,
    Row,
    calibration_section,
    clients_section,
    columns_section,
    curves_section,
    effects_section,
    interval_cells,
    interval_text,
    parse_number,
    ranks_section,
    section,
    short,
    table_block,
    why_section,
)
from fedblend.report.page.run_values import DAMAGED, Plain
from fedblend.report.tables import human_bits
from fedblend.runs.run_folder import (
    AUTO,
    Folder,
    read_json,
    read_summary,
    read_table,
)
from fedblend.stats.intervals import LEVEL

ALONE = local_only.__name__
"""The method of a verdict to train alone."""
FILES = ("clients", "why", "effects", "curves")
NUMBER_BITS = 32
PRICE = 1.0
"""USD per GB that is sent or received, as of mobile data."""
GIGABYTE = 8e9
"""In bits."""


def read_auto(path: Path) -> AutoFiles | None:
    """The folder of ``fedblend auto`` where a verdict was reached; None elsewhere."""
    if not (path / AUTO).is_file():
        return None
    state = read_json(path / AUTO)
    if not state.get("verdict") or not state.get("findings"):
        return None
    files = [path / f"{name}.csv" for name in FILES]
    return AutoFiles(
        path, state, *(read_table(file) if file.is_file() else [] for file in files)
    )


def auto_content(files: AutoFiles) -> Plain:
    """The content of the page.

    Raises:
        RunError: a file is damaged.
    """
    try:
        return _content(files)
    except DAMAGED:
        raise RunError(f"{files.path / AUTO}: is damaged") from None


REFERENCE = "kaplan_meier"


def _content(files: AutoFiles) -> Plain:
    state, seen = files.state, files.state["seen"]
    splits = state["methods"][files.choice["alone"]]["splits"]
    about = f"{seen['rows']:,} rows of {seen['clients']:,} clients · {splits} splits"
    return {
        "title": _title(files),
        "about": f"{about} · {_date(files)}",
        "tone": "open" if state["deploy"] is None else tone(state["findings"]),
        "verdict": list(map(str, state["verdict"])),
        "tiles": _tiles(files),
        "sections": _make(files, SECTIONS),
    }


def _title(files: AutoFiles) -> str:
    asked = files.state["request"]
    return f"{asked['target']} in {Path(asked['table']).name}, by {asked['client']}"


def _date(files: AutoFiles) -> str:
    written = (files.path / AUTO).stat().st_mtime
    return time.strftime("%d %B %Y", time.localtime(written))


def tone(found: Plain) -> str:
    """Whether taking part pays: "good", "bad", "mixed" or "open"."""
    _, low, _ = found["mean_gain"]
    if found["choice"]["method"] == ALONE:
        return "bad" if found["answer"] == "alone" else "open"
    if found["p"] is None or found["p"] >= LEVEL or low is None or low <= 0:
        return "open"
    return "mixed" if found["who"]["harmed"] else "good"


GAIN = ("mean_gain", "low", "high")


def _tile(words: str, value: str, more: str, tone: str | None = None) -> Plain:
    return {"words": words, "value": value, "more": more, "tone": tone}


def _tiles(files: AutoFiles) -> list[Plain]:
    state, found = files.state, files.state["findings"]
    methods, choice, who = state["methods"], files.choice, found["who"]
    others = dict.fromkeys([choice["alone"], choice["candidate"]])
    shown = [f"{files.title(name)} {short(methods[name]['test'])}" for name in others]
    mean, low, high = found["mean_gain"]
    clear = "good" if (low or 0) > 0 else "bad" if (high or 0) < 0 else "open"
    shown.append(f"constant {short(found['constant'])}")
    candidate = files.title(choice["candidate"])
    tiles = [
        _tile(
            f"Test {state['criterion']}, {files.title(files.first)}",
            short(methods[files.first]["test"]),
            " · ".join(shown),
        ),
        _tile(
            f"Mean gain of {candidate} over training alone",
            short(mean, "+.3g"),
            f"95 % interval {short(low, '+.2g')} to {short(high, '+.2g')}",
            clear,
        ),
        _tile(
            "Clients that clearly gain",
            f"{len(who['gain'])} of {who['measured']}",
            f"{len(who['harmed'])} better alone, the others unclear",
            "bad" if who["harmed"] else "open",
        ),
    ]
    if worth := state.get("worth"):
        value, _, ends = worth["said"].partition(" the rows")
        more = f"the rows of training alone{ends}"
        tiles.append(_tile(f"{candidate} is worth".capitalize(), value, more))
    return tiles


def _warnings(files: AutoFiles) -> Plain | None:
    lines = list(map(str, files.state["warnings"]))
    return section("warnings", "Warnings", "", {"lines": lines}) if lines else None


def _role(files: AutoFiles, name: str) -> str:
    known, choice = files.state["methods"][name], files.choice
    if "not_trained" in known:
        return f"not trained: {known['not_trained']}"
    if name == files.state["deploy"]:
        return "the verdict"
    if name in (choice["alone"], ALONE):
        return "what clients can do alone"
    if name == choice["candidate"]:
        return "chosen by validation rows"
    if name in choice["alike"]:
        return "as good, and less simple"
    return "reference" if name.endswith(("_trees", REFERENCE)) else ""


def _methods(files: AutoFiles) -> Plain:
    state = files.state
    done = {name: of for name, of in state["methods"].items() if "test" in of}
    ahead = [files.first, files.choice["candidate"]]
    place = {name: number for number, name in enumerate(dict.fromkeys(ahead))}
    order = sorted(
        done, key=lambda name: (place.get(name, 2), parse_number(done[name]["test"]))
    )
    _, *metrics = done[files.first]["metrics"]
    second = "auc" if "auc" in metrics else metrics[0]
    gains = [done[name].get("gain_over_alone", {}) for name in order]
    rows = [
        [
            files.title(name),
            _role(files, name),
            short(done[name]["test"]),
            short(done[name]["metrics"].get(second)),
            *cells,
            f"{gain['better']} / {gain['worse']}" if gain else MISSING,
            MISSING
            if (bits := done[name].get("bits_per_client")) is None
            else human_bits(bits),
        ]
        for name, gain, cells in zip(
            order, gains, interval_cells(gains, GAIN, "+.2g"), strict=True
        )
    ]
    if REFERENCE not in done:  # which is the constant of times
        row = ["constant", "reference", short(state["findings"]["constant"]), MISSING]
        rows.append([*row, MISSING, None, MISSING, MISSING])
    criterion = state["criterion"]
    heads = ["Method", "Role", f"Test {criterion}", second]
    heads += ["Gain over training alone (95 %)", "loses ← → gains"]
    heads += ["Clients better / worse", "Bits per client"]
    settings = [
        f"{files.title(name)}: "
        + ", ".join(f"{key} {value:g}" for key, value in done[name]["setting"].items())
        for name in order
        if done[name]["setting"]
    ]
    return section(
        "methods",
        "Methods",
        f"Test {criterion}, mean over clients and splits; less is better. The method "
        "of the verdict comes first. Another row may have a lower value: it is then "
        "not clearly better, was not chosen by validation rows, or is less simple. "
        "Bits are those of one training, both ways.",
        table_block(heads, rows, 2),
        {"fold": "Settings, chosen on validation rows", "text": "\n".join(settings)},
        *(
            [{"fold": "Configuration of the verdict", "text": config.read_text()}]
            if (config := files.path / "config.toml").is_file()
            else []
        ),
    )


def _leaves(files: AutoFiles) -> Plain | None:
    name, methods = files.choice["candidate"], files.state["methods"]
    folder, known = Folder(files.path / "runs" / name), methods[name]
    if "letters" in known:
        rounds, up = known["letters"], NUMBER_BITS * known["numbers"]
    elif folder.summary.is_file():
        run = read_summary(folder)["runs"][0]
        rounds, up = int(run["round"]), run["bits"]["up_per_client"]["mean"]
        up /= rounds
    else:
        return None
    bits, title = known.get("bits_per_client"), files.title(name)
    clients, inputs = (files.state["seen"][key] for key in ("clients", "inputs"))
    lines = [
        f"With {title}, in each of {rounds} rounds: "
        f"{up / NUMBER_BITS:,.0f} numbers ({human_bits(up)}), "
        + (
            "the slope and the curvature of its loss at the shared model, which are "
            "sums over its rows. No row and no own coefficient leaves it."
            if {"level", "ridge"} & {*known["setting"]}
            else "by how much its rows change the shared model. No row leaves it."
        ),
        "Once, before: its number of rows, and for each column the share of rows with "
        "a value, their mean and variance, or the share of each category.",
    ]
    if "letters" in known:
        lines.append(
            "This is what Newton's method would send; fedblend federation does not "
            "run models of times yet, and found these with all rows in one place."
        )
    if name != files.state["deploy"]:
        lines.insert(0, "With training alone: nothing.")
    few = [row for row in files.clients if int(row["rows"]) <= inputs]
    if few:
        lines.append(
            f"{len(few)} of {clients} clients have no more rows than the model has "
            f"coefficients ({inputs + 1}): sums over so few rows tell much of single "
            "ones; docs/what_leaves.md has the protection."
        )
    if bits is not None:
        cost = PRICE * bits * clients / GIGABYTE
        price = f"{cost:.2f} USD" if cost >= 0.01 else "less than 0.01 USD"
        lines.append(
            f"Trained again once per month: {human_bits(bits)} per client, both ways, "
            f"{human_bits(bits * clients)} for all {clients}; {price} per month at "
            f"{PRICE:g} USD per GB."
        )
    return section("leaves", "What leaves a client", "", {"lines": lines})


def _next(files: AutoFiles) -> Plain:
    path = shlex.quote(str(files.path))
    if files.state["deploy"] is None:
        words = "More rows, other inputs, or another target: then the same command."
        return section("next", "Next steps", words)
    client = shlex.quote(files.clients[0]["client"]) if files.clients else "NAME"
    steps = [
        (f"predict {path} new.csv --out predictions.csv", "predict new rows"),
        (f"export {path} --all --to onnx", "every client's model as a file"),
        (f"report {path} --client {client}", "the page to send to a client"),
        (f"personalize {path} --data new_client.csv", "a model for a new client"),
        (
            f"federation init trial --from {path} --with-keys",
            "a federation on this machine, to try it; prints how to go on",
        ),
    ]
    alone = files.state["deploy"] == ALONE
    if "letters" in files.state["methods"][files.state["deploy"]]:
        steps = [steps[0], steps[2]]  # no run, so nothing else takes it
    steps = steps[:3] if alone else steps
    blocks = [{"commands": [[f"fedblend {line}", words] for line, words in steps]}]
    lead = "The folder is the model of the verdict for all commands below. "
    lead += str(files.state.get("deployed", ""))
    if alone:
        lead += " Training together needs no decision now: ask again with more rows."
    return section("next", "Next steps", lead, *blocks)


def auto_client_content(files: AutoFiles, client: str) -> Plain:
    """The page of one client: its own lines of the tables, and nothing of others.

    Raises:
        RunError: there is no such client, or a file is damaged.
    """
    names = [row["client"] for row in files.clients]
    if client not in names and client.isdecimal() and int(client) < len(names):
        client = names[int(client)]
    if client not in names:
        raise RunError(f"{files.path}: has no client {client!r}; {hint(client, names)}")
    try:
        return _client(files, files.clients[names.index(client)])
    except DAMAGED:
        raise RunError(f"{files.path}: is damaged") from None


def _client(files: AutoFiles, row: Row) -> Plain:
    own = files._replace(
        clients=[row],
        why=[one for one in files.why if one["client"] == row["client"]],
        curves=[one for one in files.curves if one["client"] == row["client"]],
        effects=[],
    )
    title = files.title(files.choice["candidate"])
    criterion, known = files.state["criterion"], bool(row["gain"])
    change = f"change your {criterion} from {short(row['alone'], '.3g')} to "
    change += short(row["method"], ".3g")
    says = {
        "gains": ("good", f"Taking part pays for you: {title} would {change}."),
        "better alone": ("bad", f"You are better off alone: {title} would {change}."),
    }
    may = f"Taking part ({title}) would {change}; this may be chance."
    tone, line = says.get(row["verdict"], ("open", may))
    deployed = files.state["deploy"]
    if not known:
        line = "You have too few rows to be tested: your gain is not known."
    lines = [line]
    if deployed is not None:
        advice = "train alone" if deployed == ALONE else f"use {files.title(deployed)}"
        lines.append(f"The advice to all clients together is to {advice}.")
    if known:
        gain = interval_text(row, CLIENT_GAIN, "+.2g")
        lines.append(f"Gain over training alone on your test rows (95 %): {gain}.")
    return {
        "title": row["client"],
        "about": f"{_title(files)} · {int(row['rows']):,} rows · {_date(files)}",
        "kind": "fedblend report for one client",
        "tone": tone,
        "verdict": lines,
        "tiles": [],
        "sections": _make(own, OWN),
    }


OWN = (clients_section, why_section, calibration_section, curves_section)
"""Sections of the page, and of that of a client."""
SECTIONS = (_warnings, _methods, ranks_section, *OWN, effects_section, _leaves, _next)
SECTIONS += (columns_section,)


def _make(
    files: AutoFiles, makers: Sequence[Callable[[AutoFiles], Plain | None]]
) -> list[Plain]:
    """Those of these sections that there are facts for."""
    return [found for make in makers if (found := make(files))]
