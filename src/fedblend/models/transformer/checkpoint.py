# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint: ``config.json``, and safetensors in one file or several.

Nothing is unpickled: a folder that has ``pytorch_model.bin`` alone is refused.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fedblend.data.dataset import require
from fedblend.errors import InputError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl"


class Checkpoint:
    """A folder with a configuration and weights, and which of these were taken.

    Args:
        folder: where the files are.

    Raises:
        InputError: one line on what is missing, damaged or not supported.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.config = self._json(CONFIG)
        self._readers: dict[str, Any] = {}
        self._taken: set[str] = set()
        self._files = dict(self._found())

    def refuse(self, why: str) -> NoReturn:
        """Raise one line about this folder."""
        raise InputError(f"{self.folder}: {why}")

    def __contains__(self, name: str) -> bool:
        """Whether there is a weight of this name."""
        return name in self._files

    def names(self) -> list[str]:
        """The names of all weights."""
        return list(self._files)

    def below(self, prefix: str) -> str:
        """The prefix, if names of weights have it; else an empty one."""
        return prefix if any(name.startswith(prefix) for name in self._files) else ""

    def setting(self, key: str, default: Any = None) -> Any:
        """A value of ``config.json``; one that must be there if the default is None."""
        found = self.config.get(key)
        found = default if found is None else found
        if found is None:
            self.refuse(f"{CONFIG} has no {key!r}")
        return found

    def count(self, key: str, default: int | None = None) -> int:
        """A setting that is a whole number of at least 1."""
        found = self.setting(key, default)
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            self.refuse(f"{CONFIG}: {key} = {found!r} is not a whole number above 0")
        return found

    def word(self, key: str, default: str | None, known: Mapping[str, str]) -> str:
        """What a setting of a few known values stands for."""
        found = self.setting(key, default)
        if found not in known:
            allowed = ", ".join(map(repr, known))
            self.refuse(f"{CONFIG}: {key} = {found!r} is not supported, but {allowed}")
        return known[found]

    def expect(self, **settings: Any) -> None:
        """Refuse other values of settings that may be left out."""
        for key, wanted in settings.items():
            found = self.config.get(key, wanted)
            if found != wanted:
                why = f"{key} = {found!r} is not supported, only {wanted!r}"
                self.refuse(f"{CONFIG}: {why}")

    def take(self, name: str) -> Any:
        """The weight of this name."""
        if name not in self._files:
            self.refuse(f"has no weight {name!r}, which {CONFIG} asks for")
        self._taken.add(name)
        return self._tensor(name)

    def stacked(self, name: str, layers: int) -> Any:
        """The weights of all layers, for a name with "{}" in place of the layer."""
        found = [self.take(name.format(layer)) for layer in range(layers)]
        if len({array.shape for array in found}) > 1:
            self.refuse(f"the weights {name!r} have several shapes")
        return np.stack(found)

    def all_taken(self, *unused: str) -> None:
        """Refuse weights that were not taken, but for names with such an ending."""
        left = sorted(
            name for name in set(self._files) - self._taken if not name.endswith(unused)
        )
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            self.refuse(
                f"has weights that {CONFIG} has no place for: {left[0]!r}{more}"
            )

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            self.refuse(f"has no {name}")
        except (OSError, ValueError, RecursionError):
            self.refuse(f"{name} is not JSON")
        if not isinstance(found, dict):
            self.refuse(f"{name} is not a JSON object")
        return found

    def _found(self) -> Iterator[tuple[str, str]]:
        """The names of all weights, and the files that have them."""
        if (self.folder / WEIGHTS).exists():
            yield from ((name, WEIGHTS) for name in self._names(WEIGHTS))
            return
        if not (self.folder / INDEX).exists():
            for pattern in PICKLES:
                for path in self.folder.glob(pattern):
                    self.refuse(
                        f"{path.name} holds pickled weights, which are never read; "
                        f"save the model as {WEIGHTS}"
                    )
            self.refuse(f"has neither {WEIGHTS} nor {INDEX}")
        places = self._json(INDEX).get("weight_map")
        if not isinstance(places, dict):
            self.refuse(f"{INDEX} has no weight_map")
        for file in sorted(set(map(str, places.values()))):
            if Path(file).name != file:
                self.refuse(f"{INDEX} names {file!r}, which is no file of this folder")
            names = set(self._names(file))
            lost = sorted(name for name in places if places[name] == file)
            lost = [name for name in lost if name not in names]
            if lost:
                self.refuse(f"{file} has no {lost[0]!r}, which {INDEX} says it has")
        yield from places.items()

    def _names(self, file: str) -> list[str]:
        return list(self._reader(file).keys())

    def _reader(self, file: str) -> Any:
        """The open file; its tensors are read when they are asked for."""
        if file not in self._readers:
            library = require("safetensors", "load_transformer", extra="text")
            try:
                opened = library.safe_open(self.folder / file, framework="numpy")
            except FileNotFoundError:
                self.refuse(f"has no {file}")
            except (OSError, library.SafetensorError) as error:
                self.refuse(f"{file} is not intact: {' '.join(str(error).split())}")
            self._readers[file] = opened
        return self._readers[file]

    def _tensor(self, name: str) -> np.ndarray:
        file = self._files[name]
        try:
            return self._reader(file).get_tensor(name)
        except (TypeError, ValueError, AttributeError) as error:
            self.refuse(f"{file}: {name!r} cannot be read: {error}")
