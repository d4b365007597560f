# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The page of the cross-silo board in Markdown, from its JSON."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedblend_reproductions.board.page import MARK
from fedblend_reproductions.silos.tables import TABLES

ROWS = {
    "constant": "constant",
    "own_constant": "own constant",
    "local_only": "alone",
    "fedavg": "one for all",
    "own_intercepts": "own intercepts",
    "hierarchical": "hierarchical",
    "flix": "FLIX",
    "network": "network",
    "own_trees": "own trees",
    "pooled_trees": "pooled trees",
}
VERDICT = ("table", "clients", "rows", "score", "verdict", "gain", "p", "seconds")
SCORES = ("accuracy", "log_loss")
Entry = Mapping[str, Any]


def page(found: Mapping[str, Entry], guide: str = "") -> str:
    """The page of all entries, below its guide."""
    pairs = found.items()
    lines = [
        guide.partition(MARK)[0].strip() or "# The cross-silo board",
        "",
        MARK,
        "",
        "Made by `fedblend board silos --page`. Test scores are means over clients and "
        "splits, less is better. The rows *elsewhere* are [anchors](#anchors).",
        "",
        "## All tables",
        "",
        *_table(["table", *ROWS.values()], _scores(found)),
        "",
        "The verdict is the method that `fedblend auto` deploys. The gain is that of "
        "the best federated method over training alone, with a 95 % interval.",
        "",
        *_table(VERDICT, (_verdict(*pair) for pair in pairs)),
        "",
    ]
    for name, of in pairs:
        if of["left_out"]:
            lines += [f"Not finished on {name}: {', '.join(of['left_out'])}.", ""]
        if "converged" in of:
            lines += [*_flamby(of), ""]
    lines += ["## Sources", ""]
    head = ["table", "what", "source and license", "measured"]
    lines += _table(head, (_source(*pair) for pair in pairs))
    return "\n".join(lines) + "\n"


def _scores(found: Mapping[str, Entry]) -> Iterable[list[str]]:
    for name, of in found.items():
        methods = of["methods"]
        scores = of["constants"] | {one: methods[one]["test"] for one in methods}
        networks = [one for one in methods if one.startswith("network")]
        if networks:
            best = min(networks, key=lambda one: methods[one]["validation"])
            scores["network"] = scores[best]
        yield [name, *_numbers(scores)]
        if name in TABLES and TABLES[name].anchors:
            yield [f"{name}, elsewhere", *_numbers(TABLES[name].anchors)]


def _numbers(scores: Mapping[str, float]) -> list[str]:
    return [f"{scores[one]:.4g}" if one in scores else "" for one in ROWS]


def _verdict(name: str, of: Entry) -> list[str]:
    gain = chance = ""
    if of["findings"]:
        gain = "{:.3g} [{:.3g}, {:.3g}]".format(*of["findings"]["mean_gain"])
        chance = f"{of['findings']['p']:.2g}"
    deploy = of["deploy"] or "nothing"
    size = [f"{of['clients']}", f"{of['rows']:,}", of["criterion"]]
    return [name, *size, deploy, gain, chance, f"{of['seconds']:.0f}"]


def _flamby(of: Entry) -> list[str]:
    rows = (
        [
            name,
            f"{one['published']:.3f} ± {one['published_deviation']:.3f}",
            f"{one['ours']:.3f} ± {one['deviation']:.3f}",
            "yes" if one["reproduced"] else "no",
        ]
        for name, one in of["reproduced"].items()
    )
    majority = sum(of["majority"]) / len(of["majority"])
    optima = [
        [name, *(f"{min(one[key]):.3f} to {max(one[key]):.3f}" for key in SCORES)]
        for name, one in of["converged"].items()
    ]
    deployed = {of["deploy"]: ", its verdict"}
    chosen = [
        [
            f"fedblend, {ROWS[name]}{deployed.get(name, '')}",
            *(f"{one[key]:.3f}" for key in SCORES),
        ]
        for name, one in of["ours"].items()
    ]
    return [
        "## FLamby's heart benchmark",
        "",
        "Its rows, with its scaling and its training: mean accuracy of the four "
        "hospitals, and deviations over five seeds. "
        f"**Each hospital's majority class has {majority:.3f}.**",
        "",
        *_table(["method", "published", "ours", "within a deviation"], rows),
        "",
        "Models at their optimum, on the same split: by scikit-learn with six "
        "penalties, of which none is chosen, and by fedblend with settings from the "
        "training rows.",
        "",
        *_table(["model", "accuracy", "log loss"], [*optima, *chosen]),
    ]


def _source(name: str, of: Entry) -> list[str]:
    known = TABLES.get(name, TABLES["heart"])
    commit, plus, dirty = (of["commit"] or "unknown").partition("+")
    measured = f"{of['date']}, {of['device']}, commit {commit[:8]}{plus}{dirty}"
    return [name, known.title, f"{known.source}; {known.license}", measured]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
