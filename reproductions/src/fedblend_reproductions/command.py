# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend reproduce``: a paper's claims, measured here."""

import importlib
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fedblend.cli import screen

LARGE = "_paper_sized"
"""What names of folders and pages with the paper's sizes end with."""


class Paper(StrEnum):
    """The papers whose claims can be measured."""

    flix = "flix"
    apfl = "apfl"
    mixed = "mixed"


def reproduce(
    paper: Annotated[Paper, typer.Argument(help="The paper.", show_choices=True)],
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="CLAIM", help="Its claims; all of them if none."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes: that it works, not what is.")
    ] = False,
    paper_sized: Annotated[
        bool,
        typer.Option(
            "--paper-sized", help="The paper's sizes, for a GPU; of some claims."
        ),
    ] = False,
    page_only: Annotated[
        bool,
        typer.Option("--page", help="Measure nothing: the page of what OUT holds."),
    ] = False,
    kept_only: Annotated[
        bool,
        typer.Option(
            "--kept", help="Measure nothing: what parts in OUT come to, kept earlier."
        ),
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Folder of the page, its figures and numbers.")
    ] = Path("reproduced"),
) -> None:
    """Measure what a paper claims: figures, numbers, and a verdict for each claim.

    The data is looked for in $FEDBLEND_DATA. The page OUT/PAPER.md shows all that was
    measured into the same folder, so claims can be measured one at a time.

    [bold]Examples[/bold]

    fedblend reproduce flix --quick

    fedblend reproduce flix F3 F4 --out results

    fedblend reproduce mixed M3 --paper-sized

    fedblend reproduce apfl --page --out docs/results

    fedblend reproduce mixed M4 --kept --out docs/results
    """
    screen.compile_cache()
    from fedblend_reproductions import cache, claims, page

    module = importlib.import_module(f"fedblend_reproductions.{paper}")
    known, title, name = module.CLAIMS, module.TITLE, str(paper)
    option = " --quick" if quick else ""
    if paper_sized:
        known = _paper_sized(module, paper, quick)
        title, name = f"{title} at the paper's sizes", f"{paper}{LARGE}"
        option = " --paper-sized"
    chosen = _chosen(known, names or [])
    folder, target = out / name, out / f"{name}.md"
    if page_only:
        if not claims.read_entries(folder, known):
            raise typer.BadParameter(f"--page: {folder} holds no claim of {paper}")
        claims.refresh(folder, known)
        chosen = []
    for claim in chosen:
        if kept_only and not claim.resumable:
            raise typer.BadParameter(f"--kept: {claim.name} keeps no parts")
    try:
        with cache.alone() if kept_only else nullcontext():
            found = claims.reproduce(
                chosen,
                folder,
                quick=quick,
                on_claim=lambda claim: screen.note(f"{claim.name}: {claim.title} ..."),
            )
    finally:  # what was measured before a claim failed is shown, too
        entries = claims.read_entries(folder, known)
        command = f"fedblend reproduce {paper}{option}"
        large = out / f"{paper}{LARGE}.md"
        also = large.name if large.exists() and not paper_sized else None
        target.write_text(page.page(title, command, entries, name, also))
    if found:
        _show(found)
    screen.console().print(f"page: {target}", markup=False, soft_wrap=True)


def _paper_sized(module: Any, paper: Paper, quick: bool) -> Any:
    if quick:
        raise typer.BadParameter("--paper-sized: is not for --quick; take one of them")
    if not hasattr(module, "PAPER_SIZED"):
        raise typer.BadParameter(
            f"--paper-sized: {paper} has no such claims; mixed has"
        )
    return module.PAPER_SIZED


def _names(claims: Any) -> list[str]:
    return [claim.name for claim in claims]


def _chosen(claims: Any, names: list[str]) -> list[Any]:
    known = {claim.name.lower(): claim for claim in claims}
    for name in names:
        if name.lower() not in known:
            raise typer.BadParameter(
                f"claim: {name!r} is none of {', '.join(_names(claims))}"
            )
    wanted = {name.lower() for name in names} or set(known)
    return [claim for name, claim in known.items() if name in wanted]


def _show(entries: list[dict[str, Any]]) -> None:
    made = screen.table("claim", "paper", "ours", "verdict")
    for found in entries:
        made.add_row(*(found[key] for key in ("claim", "paper", "ours", "verdict")))
    screen.console().print(made)
