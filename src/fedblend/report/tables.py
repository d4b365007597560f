# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Tables of methods for a paper: LaTeX with booktabs, and Markdown.

A number is the mean over seeds with its standard deviation. The best of a column is
bold only where it is better than every other method after the correction for many
comparisons; where none is, nothing is bold. A dagger marks what is worse than the best
mean, likewise.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "±": r"$\pm$",
    "†": r"$^\dagger$",
}
NOTHING = "-"
WORSE = "†"


class Cell(NamedTuple):
    """One entry: values over seeds, or a text."""

    values: Sequence[float] = ()
    text: str = ""
    best: bool = False
    worse: bool = False
    """Whether it is surely worse than the best mean of its column."""


class MeasureColumn(NamedTuple):
    """A column: its heading, a cell for each row, the factor of its unit."""

    head: str
    cells: Mapping[str, Cell]
    scale: float = 1.0


class MethodTable(NamedTuple):
    """Methods by columns, with a caption."""

    rows: Sequence[str]
    columns: Sequence[MeasureColumn]
    caption: str

    def cells(self, sign: str) -> list[list[tuple[str, bool]]]:
        """The texts of every row, and which of them are best.

        Args:
            sign: between the mean and the standard deviation.
        """
        shown = [(column, _decimals(column)) for column in self.columns]
        return [
            [
                (
                    _text(column.cells.get(row, Cell()), column.scale, places, sign),
                    column.cells.get(row, Cell()).best,
                )
                for column, places in shown
            ]
            for row in self.rows
        ]


def markdown(table: MethodTable) -> str:
    """The table in Markdown; best values are bold."""
    heads = ["method", *(column.head for column in table.columns)]
    lines = [
        _line(map(markdown_text, heads)),
        _line(["---", *["---:"] * len(table.columns)]),
    ]
    for row, cells in zip(table.rows, table.cells(" ± "), strict=True):
        texts = [f"**{text}**" if best else text for text, best in cells]
        lines.append(_line([markdown_text(row), *texts]))
    return "\n".join([*lines, "", table.caption, ""])


def markdown_text(text: str) -> str:
    r"""Text on one line of Markdown, none of which is markup.

    >>> markdown_text("a|b <i> [x](y)" + chr(10) + "# c")
    'a\\|b &lt;i> \\[x\\](y) # c'
    """
    line = re.sub(r"([\\`\[\]|*])", r"\\\1", " ".join(text.split()))
    return line.replace("<", "&lt;")


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def latex(table: MethodTable, label: str = "tab:comparison") -> str:
    r"""The table in LaTeX; it needs ``\usepackage{booktabs}``."""
    heads = ["method", *(column.head for column in table.columns)]
    lines = [
        "% \\usepackage{booktabs}",
        "\\begin{table}[t]",
        "  \\centering",
        f"  \\caption{{{escape_latex(table.caption)}}}",
        f"  \\label{{{label}}}",
        f"  \\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        "    \\toprule",
        f"    {' & '.join(map(escape_latex, heads))} \\\\",
        "    \\midrule",
    ]
    for row, cells in zip(table.rows, table.cells(" \\pm "), strict=True):
        texts = [_latex_cell(*cell) for cell in cells]
        lines.append(f"    {' & '.join([escape_latex(row), *texts])} \\\\")
    lines += ["    \\bottomrule", "  \\end{tabular}", "\\end{table}", ""]
    return "\n".join(lines)


def _latex_cell(text: str, best: bool) -> str:
    mark = "^\\dagger" * text.endswith(WORSE)
    text = text.removesuffix(WORSE)
    if not re.fullmatch(r"-?[\d.]+( \\pm [\d.]+)?", text):
        return escape_latex(text) if text != NOTHING else "--"
    return f"$\\mathbf{{{text}}}$" if best else f"${text}{mark}$"


def escape_latex(text: str) -> str:
    r"""Text with LaTeX's special signs escaped.

    >>> escape_latex("worst_tenth (%)")
    'worst\\_tenth (\\%)'
    """
    line = " ".join(text.split())  # an empty line would end the paragraph
    return "".join(_SPECIAL.get(sign, sign) for sign in line)


def _decimals(column: MeasureColumn) -> int:
    """Decimals that show two digits of the smallest deviation, or four of a value."""
    values = [np.asarray(cell.values) * column.scale for cell in column.cells.values()]
    spreads = [of.std(ddof=1) for of in values if len(of) > 1]
    spreads = [float(one) for one in spreads if np.isfinite(one) and one > 0]
    means = [abs(float(of.mean())) for of in values if len(of)]
    means = [one for one in means if math.isfinite(one) and one > 0]
    if spreads:
        wanted = 1 - math.floor(math.log10(min(spreads)))
    elif means:
        wanted = 3 - math.floor(math.log10(max(means)))
    else:
        wanted = 0
    return min(max(wanted, 0), 2 if column.scale == 100 else 4)


def _text(cell: Cell, scale: float, decimals: int, sign: str) -> str:
    if cell.text or not len(cell.values):
        return cell.text or NOTHING
    values = np.asarray(cell.values, float) * scale
    if not np.isfinite(values).all():
        return "not finite"
    text, mark = f"{values.mean():.{decimals}f}", WORSE * cell.worse
    if len(values) > 1:
        text += f"{sign}{values.std(ddof=1):.{decimals}f}"
    return f"{text}{mark}"


def human_bits(bits: float) -> str:
    """Bits with a unit.

    >>> human_bits(1248000), human_bits(12)
    ('1.25 Mbit', '12 bit')
    """
    for unit in ("bit", "kbit", "Mbit", "Gbit"):
        if bits < 999.5:
            return f"{bits:.3g} {unit}"
        bits /= 1000
    return f"{bits:.3g} Tbit"


def mean_to_target(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    """The mean over seeds of the rounds or bits to a target, if all seeds reach it.

    Args:
        rows: of one run, one for each seed.
        key: "round", "bits_up" or "bits_down".
    """
    there = [row[key] for row in rows if row["reached"]]
    if len(there) < len(rows):
        few = f" ({len(there)} of {len(rows)} seeds)" if there else ""
        return f"not reached{few}"
    mean = float(np.mean(there))
    return f"{round(mean, 1):g}" if key == "round" else human_bits(mean)
