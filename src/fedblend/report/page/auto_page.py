# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The page of ``fedblend auto``: sections of texts and tables, from its folder.

``auto.json`` has the verdict and the methods, ``clients.csv``, ``why.csv`` and
``effects.csv`` what is told of clients. A section without facts is left out.
"""

import math
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedblend.algorithms.local_only import local_only
from fedblend.errors import RunError
from fedblend.report.page.run_values import DAMAGED, Plain
from fedblend.report.tables import human_bits
from fedblend.report.verdict import MINUS
from fedblend.runs.run_folder import AUTO, Folder, read_json, read_summary, read_table
from fedblend.stats.intervals import LEVEL

ALONE = local_only.__name__
"""The method of a verdict to train alone."""
MOST_SHOWN = 40
"""Clients of a table."""
SIDE_BY_SIDE = 6
"""Clients whose coefficients have a column each."""
NUMBER_BITS = 32
PRICE = 1.0
"""USD per GB that is sent or received, as of mobile data."""
TERABYTE = 8e9
Row = dict[str, str]


class AutoFiles(NamedTuple):
    """What the folder of a comparison holds."""

    path: Path
    state: Plain
    clients: list[Row]
    why: list[Row]
    effects: list[Row]

    @property
    def choice(self) -> Plain:
        """What the verdict chooses."""
        return self.state["findings"]["choice"]

    @property
    def first(self) -> str:
        """The method that the verdict is about."""
        return self.state["deploy"] or self.state["findings"]["better"]

    def title(self, method: str) -> str:
        """A method in words."""
        return str(self.state["methods"][method]["title"])


def read_auto(path: Path) -> AutoFiles | None:
    """The folder of ``fedblend auto`` where a verdict was reached; None elsewhere."""
    if not (path / AUTO).is_file():
        return None
    state = read_json(path / AUTO)
    if not state.get("verdict") or not state.get("findings"):
        return None
    files = [path / f"{name}.csv" for name in ("clients", "why", "effects")]
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


def _content(files: AutoFiles) -> Plain:
    state, makers = files.state, (_warnings, _methods, _clients, _why, _calibration)
    sections = [make(files) for make in (*makers, _effects, _leaves, _next, _columns)]
    seen, asked = state.get("seen", {}), state.get("request", {})
    table = Path(asked.get("table", files.path)).name
    splits = state["methods"][files.choice["alone"]].get("splits")
    about = [
        f"{seen['rows']:,} rows of {seen['clients']:,} clients" if seen else "",
        f"{splits} splits" if splits else "",
        time.strftime("%d %B %Y", time.localtime((files.path / AUTO).stat().st_mtime)),
    ]
    return {
        "title": f"{asked.get('target', 'target')} in {table}, "
        f"by {asked.get('client', 'client')}",
        "about": " · ".join(filter(None, about)),
        "tone": "open" if state["deploy"] is None else tone(state["findings"]),
        "verdict": list(map(str, state["verdict"])),
        "tiles": _tiles(files),
        "sections": [one for one in sections if one],
    }


def tone(found: Plain) -> str:
    """Whether taking part pays: "good", "bad", "mixed" or "open"."""
    _, low, _ = found["mean_gain"]
    if found["choice"]["method"] == ALONE:
        return "bad" if found["answer"] == "alone" else "open"
    if found["p"] is None or found["p"] >= LEVEL or low is None or low <= 0:
        return "open"
    return "mixed" if found["who"]["harmed"] else "good"


def _section(name: str, heading: str, lead: str, *blocks: Plain) -> Plain:
    return {"id": name, "heading": heading, "lead": lead, "blocks": list(blocks)}


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[Any]], texts: int = 1
) -> Plain:
    """A table; its first columns are texts."""
    return {"heads": list(heads), "rows": [list(row) for row in rows], "texts": texts}


def _number(text: Any) -> float:
    return math.nan if text in ("", None) else float(text)


def short(value: Any, style: str = "#.4g") -> str:
    """A number as tables show it.

    >>> short("0.38316"), short(-0.5, "+.2g"), short("")
    ('0.3832', '−0.5', '–')
    """
    known = _number(value)
    if not math.isfinite(known):
        return "–"
    return f"{known:{style}}".rstrip(".").replace("-", MINUS, 1)


def percent(value: Any) -> str:
    """A share of rows.

    >>> percent("0.4587")
    '45.9 %'
    """
    known = _number(value)
    return f"{100 * known:.1f} %" if math.isfinite(known) else "–"


def _interval(row: Plain, keys: Sequence[str], style: str) -> str:
    mean, low, high = (short(row.get(key), style) for key in keys)
    return f"{mean} ({low} to {high})" if "–" not in (low, high) else mean


def _picture(rows: Sequence[Plain], of: Callable[[Plain], list[float]]) -> list[Any]:
    """Intervals around zero, drawn on one scale; None where one is not known."""
    ends = [of(row) for row in rows]
    known = [one for one in ends if all(map(math.isfinite, one))]
    most = 1.05 * max((abs(value) for one in known for value in one), default=1.0)
    return [
        [*one, most or 1.0] if all(map(math.isfinite, one)) else None for one in ends
    ]


def _ends(keys: Sequence[str]) -> Callable[[Plain], list[float]]:
    return lambda row: [_number(row.get(key)) for key in keys]


GAIN = ("mean_gain", "low", "high")


def _tiles(files: AutoFiles) -> list[Plain]:
    state, found = files.state, files.state["findings"]
    methods, choice, who = state["methods"], files.choice, found["who"]
    others = dict.fromkeys([choice["alone"], choice["candidate"]])
    shown = [f"{files.title(name)} {short(methods[name]['test'])}" for name in others]
    mean, low, high = found["mean_gain"]
    clear = "good" if (low or 0) > 0 else "bad" if (high or 0) < 0 else "open"
    gain = dict(zip(GAIN, found["mean_gain"], strict=True))
    tiles = [
        {
            "words": f"Test {state.get('criterion', 'criterion')}, "
            f"{files.title(files.first)}",
            "value": short(methods[files.first]["test"]),
            "more": " · ".join([*shown, f"constant {short(found.get('constant'))}"]),
            "tone": None,
        },
        {
            "words": f"Mean gain of {files.title(choice['candidate'])} over training "
            "alone",
            "value": short(mean, "+.3g"),
            "more": "95 % interval "
            + _interval(gain, GAIN, "+.2g").split("(")[-1][:-1],
            "tone": clear,
        },
        {
            "words": "Clients that clearly gain",
            "value": f"{len(who.get('gain', ()))} of {who.get('measured', '–')}",
            "more": f"{len(who['harmed'])} better alone, the others unclear",
            "tone": "bad" if who["harmed"] else "open",
        },
    ]
    if worth := state.get("worth"):
        tiles.append(
            {
                "words": f"{files.title(choice['candidate'])} is worth".capitalize(),
                "value": worth["said"].split(" (")[0].replace(" the rows", ""),
                "more": "the rows of training alone; 95 % interval "
                f"{worth['low']:.1f} to {worth['high']:.1f}",
                "tone": None,
            }
        )
    return tiles


def _warnings(files: AutoFiles) -> Plain | None:
    lines = list(map(str, files.state.get("warnings", ())))
    return _section("warnings", "Warnings", "", {"lines": lines}) if lines else None


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
    if name in choice.get("alike", ()):
        return "as good, and less simple"
    return "reference" if name.endswith("_trees") else ""


def _methods(files: AutoFiles) -> Plain:
    state = files.state
    done = {name: of for name, of in state["methods"].items() if "test" in of}
    ahead = [files.first, files.choice["candidate"]]
    place = {name: number for number, name in enumerate(dict.fromkeys(ahead))}
    order = sorted(
        done, key=lambda name: (place.get(name, 2), _number(done[name]["test"]))
    )
    metrics = [key for key in done[files.first].get("metrics", ())][1:]
    second = "auc" if "auc" in metrics else next(iter(metrics), None)
    gains = [done[name].get("gain_over_alone", {}) for name in order]
    rows = [
        [
            files.title(name),
            _role(files, name),
            short(done[name]["test"]),
            *([short(done[name]["metrics"].get(second))] if second else []),
            _interval(gain, GAIN, "+.2g"),
            picture,
            f"{gain['better']} / {gain['worse']}" if gain else "–",
            human_bits(done[name]["bits_per_client"])
            if done[name].get("bits_per_client") is not None
            else "–",
        ]
        for name, gain, picture in zip(
            order, gains, _picture(gains, _ends(GAIN)), strict=True
        )
    ]
    criterion = state.get("criterion", "criterion")
    heads = ["Method", "Role", f"Test {criterion}", *([second] if second else [])]
    heads += ["Gain over training alone (95 %)", "loses ← → gains"]
    heads += ["Clients better / worse", "Bits per client"]
    settings = [
        f"{files.title(name)}: "
        + ", ".join(f"{key} {value:g}" for key, value in done[name]["setting"].items())
        for name in order
        if done[name].get("setting")
    ]
    return _section(
        "methods",
        "Methods",
        f"Test {criterion}, mean over clients and splits; less is better. The method of "
        "the verdict comes first. Another row may have a lower value: it is then not "
        "clearly better, was not chosen by validation rows, or is less simple. Bits are "
        "those of one training, both ways.",
        _table(heads, rows, 2),
        {"fold": "Settings, chosen on validation rows", "text": "\n".join(settings)},
        *(
            [{"fold": "Configuration of the verdict", "text": config.read_text()}]
            if (config := files.path / "config.toml").is_file()
            else []
        ),
    )


def _some(rows: Sequence[Row], file: str) -> tuple[Sequence[Row], list[Plain]]:
    """As many rows as a table shows, and where the others are."""
    left = len(rows) - MOST_SHOWN
    more = [{"lines": [f"{left:,} more are in {file}."]}] if left > 0 else []
    return rows[:MOST_SHOWN], more


def _target_heading(state: Plain) -> str:
    if state.get("outcome") is not None:
        return f"Rows with {state['outcome']!r}"
    return "Mean of the target"


def _target_text(state: Plain) -> Callable[[Any], str]:
    return short if state.get("outcome") is None else percent


CLIENT_GAIN = ("gain", "low", "high")


def _clients(files: AutoFiles) -> Plain | None:
    if not files.clients:
        return None
    state, share = files.state, _target_text(files.state)
    lost = sorted(
        files.clients,
        key=lambda row: (row["verdict"] != "better alone", _number(row["gain"])),
    )
    shown, more = _some(lost, "clients.csv")
    pictures = _picture(shown, _ends(CLIENT_GAIN))
    rows = [
        [
            row["client"],
            row["verdict"],
            f"{int(row['rows']):,}",
            share(row["target"]),
            percent(row["missing"]),
            short(row["alone"]),
            short(row["method"]),
            _interval(row, CLIENT_GAIN, "+.2g"),
            picture,
        ]
        for row, picture in zip(shown, pictures, strict=True)
    ]
    title = files.title(files.choice["candidate"])
    heads = ["Client", "Verdict", "Rows", _target_heading(state), "Values missing"]
    heads += ["Alone", f"With {title}", "Gain (95 %)", "loses ← → gains"]
    missing = [
        f"{row['client']}: mostly missing are {row['missing_most']}"
        for row in shown
        if row["missing_most"]
    ]
    return _section(
        "clients",
        "Clients",
        f"Test {state.get('criterion', 'criterion')} of each client, mean over splits. "
        "The verdict judges all clients together (Holm's correction, 5 %), each "
        "interval one client by itself.",
        _table(heads, rows, 2),
        *more,
        *([{"lines": missing}] if missing else []),
    )


def _why(files: AutoFiles) -> Plain | None:
    if not files.why:
        return None
    shown, more = _some(
        sorted(files.why, key=lambda row: -_number(row["loss"])), "why.csv"
    )
    rows = [
        [
            row["client"],
            row["why"],
            short(row["loss"], "#.3g"),
            *(short(row[part], "+.2g") for part in ("columns", "level", "slopes")),
        ]
        for row in shown
    ]
    heads = ["Client", "Differs by", "Loss of the others' model", "Columns mended"]
    return _section(
        "why",
        "Why clients differ",
        "The linear model of the other clients predicts a client's rows, and is then "
        "mended in steps: columns that look wrong, its own level, its own slopes. The "
        "last columns are by how much each step lowers the loss on rows that it was "
        "not fitted to; named is what is beyond chance.",
        _table([*heads, "Own level", "Own slopes"], rows, 2),
        *more,
    )


EXPECTED = ("target", "observed_low", "observed_high")


def _off(row: Row, share: bool) -> list[float]:
    """Observed over expected less 1; of a number, observed less expected."""
    expected = _number(row.get("expected"))
    found = [_number(row.get(key)) for key in EXPECTED]
    if not share:
        return [value - expected for value in found]
    return [value / expected - 1 if expected else math.nan for value in found]


def _calibration(files: AutoFiles) -> Plain | None:
    clients = [row for row in files.clients if row.get("expected")]
    if not clients:
        return None
    share, text = files.state.get("outcome") is not None, _target_text(files.state)
    shown, more = _some(
        sorted(clients, key=lambda row: -abs(_off(row, share)[0])), "clients.csv"
    )
    pictures = _picture(shown, lambda row: _off(row, share))
    rows = []
    for row, picture in zip(shown, pictures, strict=True):
        ends = dict(zip(EXPECTED, _off(row, share), strict=True))
        low, high = ends["observed_low"], ends["observed_high"]
        says = "as expected" if low <= 0 <= high else "more than expected"
        says = "less than expected" if high < 0 else says
        if share:
            ends = {key: 1 + value for key, value in ends.items()}
        shown_text = _interval(ends, EXPECTED, ".2f" if share else "+.2g")
        cells = [row["client"], says, text(row["target"]), text(row["expected"])]
        rows.append([*cells, shown_text, picture])
    what = "Observed / expected" if share else "Observed less expected"
    return _section(
        "calibration",
        "Calibration",
        f"Rows predicted by {files.title(files.choice['method'])}, which was fitted to "
        "the other four fifths of all rows.",
        _table(
            ["Client", "Is", "Observed", "Expected", f"{what} (95 %)", "less ← → more"],
            rows,
            2,
        ),
        *more,
    )


EFFECT = ("effect", "low", "high")


def _effects(files: AutoFiles) -> Plain | None:
    if not files.effects:
        return None
    ratio = files.state["effect"] != "change of the target"
    style = "#.3g" if ratio else "+.2g"
    neutral = 1.0 if ratio else 0.0

    def ends(row: Plain) -> list[float]:
        found = [_number(row[key]) for key in EFFECT]
        if not ratio:
            return found
        return [math.log(value) if value > 0 else math.nan for value in found]

    def lines(rows: Sequence[Row], key: str) -> list[list[Any]]:
        return [
            [row[key], _interval(row, EFFECT, style), picture]
            for row, picture in zip(rows, _picture(rows, ends), strict=True)
        ]

    def is_clear(row: Row) -> bool:
        return not _number(row["low"]) <= neutral <= _number(row["high"])

    shared = [row for row in files.effects if not row["client"]]
    own = [row for row in files.effects if row["client"]]
    name, blocks = f"{files.state['effect']} (95 %)", []
    if shared:
        slopes = [row for row in shared if row["input"] != "level"]
        blocks.append(
            _table(["Input", name, "lowers ← → raises"], lines(slopes, "input"))
        )
        levels = [row for row in own if row["input"] == "level"]
        some, more = _some(
            sorted(levels, key=lambda row: -abs(ends(row)[0])), "effects.csv"
        )
        if some:
            heads = ["Own level of", name, "lower ← → higher"]
            blocks += [_table(heads, lines(some, "client")), *more]
        clear = [row for row in own if row["input"] != "level" and is_clear(row)]
        if clear:
            said = [
                f"{row['client']}: {row['input']}, beyond the shared one "
                f"{_interval(row, EFFECT, style)}"
                for row in clear[:MOST_SHOWN]
            ]
            blocks.append({"lines": said})
    else:
        names = list(dict.fromkeys(row["client"] for row in own))[:SIDE_BY_SIDE]
        cells = {
            (row["client"], row["input"]): _interval(row, EFFECT, style) for row in own
        }
        inputs = dict.fromkeys(row["input"] for row in own if row["input"] != "level")
        rows = [[of, *(cells.get((who, of), "–") for who in names)] for of in inputs]
        blocks.append(_table(["Input", *names], rows))
        if len(names) < len({row["client"] for row in own}):
            blocks.append({"lines": ["Those of all clients are in effects.csv."]})
    return _section(
        "effects",
        "Effects",
        f"Coefficients of {files.title(files.choice['method'])} on all rows, as "
        f"{name}, of inputs together. They are shrunk as the method shrinks them, "
        "and say what predicts, not what causes.",
        *blocks,
    )


def _leaves(files: AutoFiles) -> Plain | None:
    name, methods = files.choice["candidate"], files.state["methods"]
    folder = Folder(files.path / "runs" / name)
    if not folder.summary.is_file():
        return None
    rounds = int(read_summary(folder)["runs"][0]["round"])
    bits, title = methods[name].get("bits_per_client"), files.title(name)
    up = read_summary(folder)["runs"][0]["bits"]["up_per_client"]["mean"]
    clients, inputs = len(files.clients), files.state["seen"]["inputs"]
    lines = [
        f"With {title}, in each of {rounds} rounds: "
        f"{up / rounds / NUMBER_BITS:,.0f} numbers ({human_bits(up / rounds)}), "
        + (
            "the slope and the curvature of its loss at the shared model, which are "
            "sums over its rows. No row and no own coefficient leaves it."
            if "level" in methods[name]["setting"]
            or "ridge" in methods[name]["setting"]
            else "by how much its rows change the shared model. No row leaves it."
        ),
        "Once, before: its number of rows, and for each column the share of rows with "
        "a value, their mean and variance, or the share of each category.",
    ]
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
        cost = PRICE * bits * clients / TERABYTE
        price = f"{cost:.2f} USD" if cost >= 0.01 else "less than 0.01 USD"
        lines.append(
            f"Trained again once per month: {human_bits(bits)} per client, both ways, "
            f"{human_bits(bits * clients)} for all {clients}; {price} per month at "
            f"{PRICE:g} USD per GB."
        )
    return _section("leaves", "What leaves a client", "", {"lines": lines})


def _next(files: AutoFiles) -> Plain:
    path = shlex.quote(str(files.path))
    if files.state["deploy"] is None:
        words = "More rows, other inputs, or another target: then the same command."
        return _section("next", "Next steps", words)
    client = shlex.quote(files.clients[0]["client"]) if files.clients else "NAME"
    steps = [
        (f"predict {path} new.csv --out predictions.csv", "predict new rows"),
        (f"export {path} --all --to onnx", "every client's model as a file"),
        (f"report {path} --client {client}", "the page to send to a client"),
        (f"personalize {path} --data new_client.csv", "a model for a new client"),
        (f"federation init trial --from {path}", "the same on real machines"),
    ]
    alone = files.state["deploy"] == ALONE
    steps = steps[:3] if alone else steps
    blocks = [{"commands": [[f"fedblend {line}", words] for line, words in steps]}]
    lead = "The folder is the model of the verdict for all commands below."
    if alone:
        lead += " Training together needs no decision now: ask again with more rows."
    return _section("next", "Next steps", lead, *blocks)


def _columns(files: AutoFiles) -> Plain | None:
    columns = files.state.get("seen", {}).get("columns")
    if not columns:
        return None
    rows = [[one[key] for key in ("column", "kind", "seen", "done")] for one in columns]
    heads = ["Column", "Kind", "Seen", "Done"]
    return _section(
        "columns",
        "Columns",
        "What was done to every column: fitted on training rows only, and part of every model.",
        _table(heads, rows, 99),
    )


def auto_client_content(files: AutoFiles, client: str) -> Plain:
    """The page of one client: its own lines of the tables, and nothing of others.

    Raises:
        RunError: there is no such client, or a file is damaged.
    """
    from fedblend.errors import hint

    names = [row["client"] for row in files.clients]
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
        effects=[],
    )
    title = files.title(files.choice["candidate"])
    criterion, known = files.state.get("criterion", "criterion"), bool(row["gain"])
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
        gain = _interval(row, CLIENT_GAIN, "+.2g")
        lines.append(f"Gain over training alone on your test rows (95 %): {gain}.")
    sections = [make(own) for make in (_clients, _why, _calibration)]
    return {
        "title": row["client"],
        "about": f"{int(row['rows']):,} rows",
        "kind": "fedblend report for one client",
        "tone": tone,
        "verdict": lines,
        "tiles": [],
        "sections": [one for one in sections if one],
    }
