# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The page of the cross-silo board in Markdown, from its JSON."""

from collections.abc import Iterable, Mapping
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
NETWORKS = ("network", "network_level", "network_head", "network_slopes")
Entry = Mapping[str, Any]


def page(found: Mapping[str, Entry], guide: str = "") -> str:
    """The page of all entries, below its guide."""
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
        *_table(
            ["table", "clients", "rows", "score", "verdict", "gain", "p", "seconds"],
            (_verdict(name, of) for name, of in found.items()),
        ),
        "",
        *_notes(found),
    ]
    if "flamby_heart" in found:
        lines += ["", *_flamby(found["flamby_heart"])]
    return "\n".join([*lines, "", *_sources(found)]).rstrip() + "\n"


def _scores(found: Mapping[str, Entry]) -> Iterable[list[str]]:
    for name, of in found.items():
        scores = {**of["constants"]}
        scores |= {key: one["test"] for key, one in of["methods"].items()}
        networks = [scores[key] for key in NETWORKS if key in scores]
        if networks:
            scores["network"] = min(networks)
        yield [name, *_numbers(scores)]
        if TABLES[name].anchors:
            yield [f"{name}, elsewhere", *_numbers(TABLES[name].anchors)]


def _numbers(scores: Mapping[str, float | None]) -> list[str]:
    words = [scores.get(key) for key in ROWS]
    return ["" if word is None else f"{word:.4g}" for word in words]


def _verdict(name: str, of: Entry) -> list[str]:
    seen, gain, chance = of["findings"], "", ""
    if seen:
        middle, low, high = seen["mean_gain"]
        gain, chance = f"{middle:.3g} [{low:.3g}, {high:.3g}]", f"{seen['p']:.2g}"
    return [
        name,
        f"{of['clients']}",
        f"{of['rows']:,}",
        of["criterion"],
        of["deploy"] or "nothing",
        gain,
        chance,
        f"{of['seconds']:.0f}",
    ]


def _notes(found: Mapping[str, Entry]) -> list[str]:
    lines = [
        "The verdict is the method that `fedblend auto` deploys. The gain is that of "
        "the best federated method over training alone, with a 95 % interval."
    ]
    for name, of in found.items():
        if of["left_out"]:
            lines += ["", f"Not finished on {name}: {', '.join(of['left_out'])}."]
    return lines


def _flamby(of: Entry) -> list[str]:
    rows = (
        [
            name,
            f"{one['published']:.3f} ± {one['published_deviation']:.3f}",
            f"{one['ours']:.3f} ± {one['deviation']:.3f}",
            "yes" if one["reproduced"] else "no",
        ]
        for name, one in of["rows"].items()
    )
    majority = sum(of["majority"]) / len(of["majority"])
    again = sum(one["reproduced"] for one in of["rows"].values())
    ranges = (
        [name, *(f"{min(one[key]):.3f} to {max(one[key]):.3f}" for key in one)]
        for name, one in of["converged"].items()
    )
    ours = (
        [ROWS[name], f"{one['accuracy']:.3f}", f"{one['log_loss']:.3f}"]
        for name, one in of["ours"].items()
    )
    return [
        "## FLamby's heart benchmark",
        "",
        "### Its rows, with its scaling and its training",
        "",
        f"Mean accuracy of the four hospitals. {again} of {len(of['rows'])} rows are "
        "reproduced: the means differ by at most a deviation over five seeds. "
        f"**Each hospital's majority class has {majority:.3f}.**",
        "",
        *_table(["method", "published", "again", "reproduced"], rows),
        "",
        "### Logistic regression at its optimum, on the same split",
        "",
        "By scikit-learn, with six penalties of which none is chosen.",
        "",
        *_table(["model", "accuracy", "log loss"], ranges),
        "",
        "### fedblend, with settings from the training rows",
        "",
        *_table(["method", "accuracy", "log loss"], ours),
    ]


def _sources(found: Mapping[str, Entry]) -> list[str]:
    def words(name: str, of: Entry) -> list[str]:
        known = TABLES[name]
        commit, plus, dirty = (of["commit"] or "unknown").partition("+")
        versions = ", ".join(f"{key} {one}" for key, one in of["versions"].items())
        return [
            name,
            known.title,
            f"{known.source}; {known.license}",
            f"{of['date']}, {of['device']}, commit {commit[:8]}{plus}{dirty}",
            f"{versions}; seeds 0 to {of['seeds'][-1]}; {of['minutes']:g} minutes",
        ]

    head = ["table", "what", "source and license", "measured", "with"]
    return ["## Sources", "", *_table(head, (words(*pair) for pair in found.items()))]


def _table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
