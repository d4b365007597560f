# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Many small images as the tiles of one lossless image file."""

from pathlib import Path

import numpy as np

from fedblend.data.dataset import DataError, require


def read_mosaic(path: Path, side: int, count: int) -> np.ndarray:
    """The tiles of an image, row by row: [count, side, side, 3] in [0, 1]."""
    image = require("PIL.Image", path.name, "pillow")
    try:
        with image.open(path) as picture:
            pixels = np.asarray(picture.convert("RGB"))
    except (OSError, SyntaxError):
        raise DataError(f"{path}: is not a readable image") from None
    down, across = pixels.shape[0] // side, pixels.shape[1] // side
    if pixels.shape != (down * side, across * side, 3) or down * across != count:
        raise DataError(
            f"{path}: {pixels.shape[0]} x {pixels.shape[1]} pixels are not {count} "
            f"tiles of {side} x {side}"
        )
    tiles = pixels.reshape(down, side, across, side, 3).swapaxes(1, 2)
    return tiles.reshape(count, side, side, 3) / np.float32(255)
