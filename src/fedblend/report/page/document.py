# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The HTML file: template, style, scripts and content in one, which asks for nothing.

Names of clients and texts of configurations are not trusted. The content is compressed
and in base64, so no text of it is markup; the script puts it on the page as text, never
as HTML; and the file's content security policy allows the file's own scripts alone, by
their hashes, and no request.
"""

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from fedblend.errors import RunError
from fedblend.report.page.content import client_content, page_content
from fedblend.runs.run_folder import write_text

SCRIPTS = (
    "format.js",
    "charts.js",
    "table.js",
    "sections.js",
    "explorer.js",
    "details.js",
    "page.js",
)
"""The page's own scripts, in the order in which they are read."""


def write_page(
    folders: Sequence[Path],
    out: Path,
    *,
    client: str | None = None,
) -> Path:
    """Write the report of runs as one HTML file.

    Args:
        folders: run folders; one that holds ``runs`` stands for those in it.
        out: the file to write.
        client: write the page for this client, by id or name, about itself: it holds
            nothing of other clients.

    Returns:
        ``out``.

    Raises:
        RunError: a folder holds no run, or a damaged one, or there is no such client.
    """
    if client is None:
        content = page_content(folders)
    elif len(folders) == 1:
        content = client_content(folders[0], client)
    else:
        raise RunError(
            f"--client: the page of a client is about one run; give one folder, not "
            f"{len(folders)}"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, document(content))
    return out


def document(content: dict[str, Any]) -> str:
    """The HTML of a page with this content."""
    style = _asset("vendor/uPlot.min.css") + _asset("template/page.css")
    plots = _asset("vendor/uPlot.iife.min.js")
    own = "\n".join(_asset(f"template/{name}") for name in SCRIPTS)
    own = f'"use strict";\n(() => {{\n{own}\n}})();\n'
    parts = {
        "policy": _policy(style, (plots, own)),
        "title": html.escape(str(content["title"])),
        "verdict": "".join(
            f"<p>{html.escape(line)}</p>" for line in content["verdict"]
        ),
        "tone": html.escape(content["tone"]),
        "style": style,
        "plots": plots,
        "script": own,
        "content": pack_content(content),
    }
    page = _asset("template/page.html")
    # One pass: text that a part brings along is never taken for a place in the page.
    pieces = page.split("%%")
    return "".join(
        parts[piece] if number % 2 else piece for number, piece in enumerate(pieces)
    )


def pack_content(content: dict[str, Any]) -> str:
    """The content as gzipped JSON in base64."""
    try:
        text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise RunError("a run folder has a number that is not finite") from None
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _policy(style: str, scripts: Sequence[str]) -> str:
    """The content security policy: these texts, and no request."""
    parts = [
        "default-src 'none'",
        f"style-src {_hash(style)}",
        f"script-src {' '.join(map(_hash, scripts))}",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "; ".join(parts)


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _asset(name: str) -> str:
    return (resources.files("fedblend.report.page") / name).read_text("utf-8")
