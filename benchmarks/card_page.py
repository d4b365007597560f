# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What cards found: lines, the figure, the page, and two results side by side."""

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
NAMES = {
    "fedblend": "fedblend",
    "hand": "JAX by hand",
    "loop": "PyTorch, a loop over clients",
    "vmap": "PyTorch, vmap and compile",
    "pfl": "pfl 0.6",
    "fedjax": "FedJAX",
}
PARTS = ("setup", "compile", "start", "rounds", "measuring")
"""Of a card's seconds."""
INTRODUCTION = """\
## Cards measured

Written by `python benchmarks/cards.py --page` from the JSON files in
`docs/results/speed`.

- *whole* is the time of the card from the call of `simulate`, compilation included;
  *compile*, *rounds* and *measuring* are its parts.
- A card that was ended early is extrapolated from the rounds it had, and says so.
- *ms per round* is the median over blocks.
- Peers compute the same rounds in the same run, each in its own process, alternating.
  Their ratio is that of the least times.
"""


def line(result: dict[str, Any]) -> str:
    """A card in a line."""
    if "failure" in result:
        return f"failed: {result['failure']}"
    if "table" in result:
        return f"{len(result['table'])} lines"
    if "to_ten_single_rounds" in result:
        ratio = result["to_ten_single_rounds"]
        return f"a round of the sweep is {ratio:.2f} of ten single ones"
    seconds = result["seconds"]
    parts = ", ".join(f"{name} {seconds[name]:.2f}" for name in PARTS)
    how = " (extrapolated)" if result["extrapolated"] else ""
    return (
        f"{result['seconds_of_card']:.1f} s{how} of {result['settings']['rounds']} "
        f"rounds; {result['rounds']} computed: {parts}, "
        f"{result['ms_a_round']:.2f} ms a round, {result['store']}"
    )


def peers_line(result: dict[str, Any]) -> str:
    """The peers of a card in a line."""
    return ", ".join(
        f"{name} {of['least_ms_a_round']:.2f} ms ({of.get('to_fedblend', 0):.2f})"
        if "least_ms_a_round" in of
        else f"{name} failed ({of['failure']})"
        for name, of in result["peers"].items()
    )


def comparison(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """New over old, card by card: below 1 is faster."""
    lines = [
        f"{of['commit']}, {of['hardware']['device']}, jax {of['versions']['jax']}"
        for of in (old, new)
    ]
    lines += [
        "| card | whole | compile | measuring | ms per round | relative to its peers |"
    ]
    lines += ["|---|---|---|---|---|---|"]
    for name, after in new["cards"].items():
        before = old["cards"].get(name, {"failure": ""})
        if "seconds" not in after or "seconds" not in before:
            continue
        ratios = [
            (before["seconds_of_card"], after["seconds_of_card"]),
            *(
                (before["seconds"][part], after["seconds"][part])
                for part in ("compile", "measuring")
            ),
            (before["ms_a_round"], after["ms_a_round"]),
        ]
        shown = " | ".join(_ratio(*pair) for pair in ratios)
        peers = ", ".join(
            f"{kind} {_ratio(own, before['peers'][kind]['to_fedblend'])}"
            for kind, of in after.get("peers", {}).items()
            if kind != "fedblend"
            and (own := of.get("to_fedblend"))
            and "to_fedblend" in before.get("peers", {}).get(kind, {})
        )
        lines.append(f"| {name} | {shown} | {peers} |")
    return lines


def _ratio(before: float | None, after: float | None) -> str:
    return f"{after / before:.2f}" if before and after else "-"


def figure(found: dict[str, Any], path: Path) -> bool:
    """The parts of every card's time, and its peers; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    whole = {n: of for n, of in found["cards"].items() if "seconds" in of}
    beside = {n: of for n, of in whole.items() if "peers" in of}
    drawn, axes = pyplot.subplots(
        1, 1 + len(beside), figsize=(5 + 4 * len(beside), 4), layout="constrained"
    )
    axes = [axes] if not beside else list(axes)
    left = [0.0] * len(whole)
    for part in PARTS:
        width = [max(of["seconds"][part], 0) for of in whole.values()]
        axes[0].barh(list(whole), width, left=left, label=part)
        left = [a + b for a, b in zip(left, width, strict=True)]
    axes[0].invert_yaxis()
    axes[0].set_xlabel("seconds")
    axes[0].legend(frameon=False)
    for place, (name, of) in zip(axes[1:], beside.items(), strict=True):
        known = {k: p for k, p in of["peers"].items() if "least_ms_a_round" in p}
        place.barh(
            [NAMES[k] for k in known], [p["least_ms_a_round"] for p in known.values()]
        )
        place.set_xscale("log")
        place.set_xlabel(f"{name}: ms a round")
        place.invert_yaxis()
    drawn.savefig(path, dpi=120)
    pyplot.close(drawn)
    return True


def write(
    folder: Path = DOCS / "results" / "speed", page: Path = DOCS / "benchmarks.md"
) -> None:
    """The end of a page, from the JSON files in a folder."""
    files = sorted(folder.glob("*.json"))
    parts = [INTRODUCTION, *(map(_section, files) if files else ["No results yet.\n"])]
    before = page.read_text() if page.exists() else ""
    heading = INTRODUCTION.partition("\n")[0]
    page.write_text(before.partition(heading)[0] + "\n".join(parts).strip() + "\n")


def _section(path: Path) -> str:
    """The tables of one file."""
    found = json.loads(path.read_text())
    hardware, versions = found["hardware"], found["versions"]
    known = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        f"### {hardware['device']}: {path.stem}",
        "",
        f"{hardware['backend']}, {hardware['cores']} cores; {known}; commit "
        f"{found['commit']}, {found['date'][:10]}.",
        "",
        "| card | what | whole s | bar s | compile | rounds | measuring | "
        "ms per round | store |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    others = []
    for name, of in found["cards"].items():
        if "seconds" not in of:
            others += [f"- {name}, {of.get('title', '')}: {line(of)}."]
            others += [f"  {row}" for row in ["", *of.get("table", [])]]
            continue
        seconds, most = of["seconds"], of["settings"]["most"]
        early = f"; {of['rounds']} rounds, extrapolated" if of["extrapolated"] else ""
        lines.append(
            f"| {name} | {of['title']}{early} | {of['seconds_of_card']:.1f} "
            f"| {most or ''} | {seconds['compile']:.1f} | {seconds['rounds']:.1f} "
            f"| {seconds['measuring']:.1f} | {of['ms_a_round']:.2f} | {of['store']} |"
        )
    for name, of in found["cards"].items():
        if "peers" in of:
            lines += ["", f"Peers on {name} ({of['title']}):", ""]
            lines += [
                "| peer | least ms per round | relative to fedblend | first block s |"
            ]
            lines += ["|---|---|---|---|"]
            lines += [_peer(kind, peer) for kind, peer in of["peers"].items()]
    figure = path.with_suffix(".png")
    if figure.exists():
        shown = f"results/speed/{figure.name}"
        lines += ["", f"![Parts of every card's time, and peers]({shown})"]
    return "\n".join([*lines, "", *others, ""])


def _peer(kind: str, peer: dict[str, Any]) -> str:
    if "failure" in peer:
        return f"| {NAMES[kind]} | failed: {peer['failure']} | | |"
    return (
        f"| {NAMES[kind]} | {peer['least_ms_a_round']:.2f} "
        f"| {peer.get('to_fedblend', float('nan')):.2f} "
        f"| {peer['first_seconds']:.1f} |"
    )
