# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A plot in the terminal: braille characters of two by four dots."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike
from rich.text import Text

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bit of each dot of a braille character, by column and row."""

Series = tuple[ArrayLike, ArrayLike]


def plot(
    series: Mapping[str, Series],
    colors: Mapping[str, str],
    width: int = 60,
    height: int = 10,
    braille: bool = True,
) -> Text:
    """Lines through the points of each series, with the ranges of both axes.

    Args:
        series: across and up values, by name.
        colors: of each name; where lines meet, the last one's.
        width: of the plot, in characters; names and numbers stand around it.
        height: of the plot, in lines.
        braille: a star for each character with a dot, if False.
    """
    points = [np.asarray(values, float) for values in series.values()]
    across = np.concatenate([values[0] for values in points])
    up = np.concatenate([values[1] for values in points])
    up = up[np.isfinite(up)]
    if not up.size:
        return Text("nothing to plot")
    left, right, low, high = across.min(), across.max(), up.min(), up.max()
    cells, ink = np.zeros((height, width), int), np.full((height, width), "", object)
    for name, (x, y) in zip(series, points, strict=True):
        fine = np.linspace(left, right, 8 * width)
        fine = fine[(fine >= x.min()) & (fine <= x.max())]
        level = np.interp(fine, x, y)
        fine, level = fine[np.isfinite(level)], level[np.isfinite(level)]
        column = np.rint((fine - left) / ((right - left) or 1) * (2 * width - 1))
        row = np.rint((high - level) / ((high - low) or 1) * (4 * height - 1))
        for dot_x, dot_y in zip(column.astype(int), row.astype(int), strict=True):
            cell = (dot_y // 4, dot_x // 2)
            cells[cell] |= DOTS[dot_x % 2][dot_y % 4]
            ink[cell] = colors[name]
    text = Text()
    for line in range(height):
        edge = {0: high, height - 1: low}.get(line)
        text.append(f"{'' if edge is None else format(edge, '.4g'):>9} ┤")
        for bits, color in zip(cells[line], ink[line], strict=True):
            glyph = chr(0x2800 + bits) if braille else " *"[int(bits > 0)]
            text.append(glyph, style=color or None)
        text.append("\n")
    ends = f"{left:.4g}", f"{right:.4g}"
    return text.append(f"{'':11}{ends[0]}{ends[1]:>{width - len(ends[0])}}")
