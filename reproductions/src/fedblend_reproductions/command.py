# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend reproduce``: measure a paper's claims.

``fedblend.cli`` loads this module by its entry point, so nothing of ``fedblend.cli`` is
imported before the command runs.
"""

import importlib
from collections.abc import Sequence
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

LARGE = "_paper_sized"
"""The end of the names of folders and pages with the paper's sizes."""


class Paper(StrEnum):
    """The papers whose claims can be measured."""

    flix = "flix"
    apfl = "apfl"
    mixed = "mixed"
    adapters = "adapters"


def _renamed(given: bool) -> None:
    if given:
        raise typer.BadParameter("--kept: is called --cached now")


def reproduce(
    paper: Annotated[Paper, typer.Argument(help="The paper.", show_choices=True)],
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="CLAIM", help="Its claims; all of them if none."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Small sizes, to see that everything works."),
    ] = False,
    paper_sized: Annotated[
        bool,
        typer.Option(
            "--paper-sized", help="The paper's sizes, for a GPU; only some claims."
        ),
    ] = False,
    page_only: Annotated[
        bool,
        typer.Option(
            "--page", help="Measure nothing; rewrite the page from OUT's JSON files."
        ),
    ] = False,
    cached_only: Annotated[
        bool,
        typer.Option(
            "--cached", help="Measure nothing; conclude from the parts cached in OUT."
        ),
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Folder of the page, its figures and numbers.")
    ] = Path("reproduced"),
    kept: Annotated[
        bool, typer.Option("--kept", hidden=True, callback=_renamed, is_eager=True)
    ] = False,
) -> None:
    """Measure what a paper claims: figures, numbers, and a verdict for each claim.

    The data is read from $FEDBLEND_DATA. The page OUT/PAPER.md shows all results in
    the same folder, so claims can be measured one at a time.

    [bold]Examples[/bold]

    fedblend reproduce flix --quick

    fedblend reproduce flix F3 F4 --out results

    fedblend reproduce mixed M3 --paper-sized

    fedblend reproduce apfl --page --out docs/results

    fedblend reproduce mixed M4 --cached --out docs/results
    """
    from fedblend.cli import screen

    screen.compile_cache()
    from fedblend_reproductions import cache, claims, page

    module = importlib.import_module(f"fedblend_reproductions.{paper}")
    known, folder, target = module.CLAIMS, out / paper, out / f"{paper}.md"
    large = out / f"{paper}{LARGE}"
    if paper_sized:
        known, folder = _paper_sized(module, paper, quick), large
    chosen = _chosen(known, names or [])
    _check_cache(folder, claims.CACHED, chosen, cached_only)
    if page_only:
        if not claims.read_entries(folder, known):
            raise typer.BadParameter(f"--page: {folder} holds no claim of {paper}")
        claims.refresh(folder, known)
        chosen = []
    try:
        with cache.read_only() if cached_only else nullcontext():
            found = claims.reproduce(
                chosen,
                folder,
                quick=quick,
                on_claim=lambda claim: screen.note(f"{claim.name}: {claim.title} ..."),
            )
    except cache.NotCached as error:
        raise typer.BadParameter(str(error)) from error
    finally:  # results of earlier claims are shown if one fails
        parts = [
            page.Part(of, claims.read_entries(at, of), at.name, sizes)
            for of, at, sizes in (
                (module.CLAIMS, out / paper, ""),
                (getattr(module, "PAPER_SIZED", ()), large, "paper-sized"),
            )
        ]
        command = f"fedblend reproduce {paper}{' --quick' if quick else ''}"
        target.write_text(page.page(module.TITLE, command, *parts))
    if found:
        _show(known, found)
    screen.console().print(f"page: {target}", markup=False, soft_wrap=True)


def _paper_sized(module: ModuleType, paper: Paper, quick: bool) -> Sequence[Any]:
    if quick:
        raise typer.BadParameter("--paper-sized: is not for --quick; take one of them")
    if not hasattr(module, "PAPER_SIZED"):
        raise typer.BadParameter(
            f"--paper-sized: {paper} has no such claims; mixed has"
        )
    return module.PAPER_SIZED


def _chosen(claims: Sequence[Any], names: list[str]) -> list[Any]:
    known = {claim.name.lower(): claim for claim in claims}
    for name in names:
        if name.lower() not in known:
            listed = ", ".join(claim.name for claim in claims)
            raise typer.BadParameter(f"claim: {name!r} is none of {listed}")
    wanted = {name.lower() for name in names} or set(known)
    return [claim for name, claim in known.items() if name in wanted]


def _check_cache(folder: Path, cached: str, chosen: list[Any], only: bool) -> None:
    """Refuse claims without a cache, and a cache under its old name."""
    for claim in chosen:
        if only and not claim.resumable:
            raise typer.BadParameter(f"--cached: {claim.name} caches no parts")
    if (old := folder / "kept").exists():
        raise typer.BadParameter(f"--out: rename {old} to {folder / cached}")


def _show(claims: Sequence[Any], entries: list[dict[str, Any]]) -> None:
    """A table of the results, as at the top of the page."""
    from fedblend.cli import screen

    by_name = {claim.name: claim for claim in claims}
    made = screen.table("claim", "ours", "the paper", "verdict")
    for found in entries:
        claim = by_name[found["claim"]]
        headline = claim.headline(found["numbers"])
        made.add_row(claim.name, headline, claim.paper_number, found["verdict"])
    screen.console().print(made)
