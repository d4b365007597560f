# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Results that are kept in a folder, so that a long claim goes on where it stopped."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedblend.papers.claims import plain


class Kept:
    """Answers of costly questions, one file each.

    An answer is used again only if everything it depends on is the same, which
    ``settings`` has to say.

    Args:
        folder: of the files; it is made when there is something to keep.
        settings: plain values that all answers depend on.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, plain(settings)

    def __call__(self, name: str, compute: Callable[[], Any]) -> Any:
        """The kept answer, or a computed one, as plain values."""
        path = self.folder / f"{name.replace(' ', '_')}.json"
        if path.exists():
            known = json.loads(path.read_text())
            if known["settings"] == self.settings:
                return known["answer"]
        answer = plain(compute())
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"settings": self.settings, "answer": answer})
        # Renamed when it is whole: a run that is stopped leaves no half of a file.
        unfinished = path.with_suffix(".part")
        unfinished.write_text(text)
        os.replace(unfinished, path)
        return answer
