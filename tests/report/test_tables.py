# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Tables for a paper."""

import numpy as np
import pytest

from fedblend.report.tables import (
    Cell,
    MeasureColumn,
    MethodTable,
    escape_latex,
    human_bits,
    latex,
    markdown,
    mean_to_target,
)

VALUES = {"a_b": [0.90, 0.92], "c|d": [0.80, 0.86]}
TABLE = MethodTable(
    list(VALUES),
    [
        MeasureColumn(
            "accuracy (%)",
            {name: Cell(of, best=name == "a_b") for name, of in VALUES.items()},
            100.0,
        ),
        MeasureColumn("bits", {"a_b": Cell(text="1.5 Mbit")}),
    ],
    "Mean ± deviation & more.",
)


def test_markdown_shows_mean_and_deviation_of_the_sample():
    lines = markdown(TABLE).splitlines()
    deviations = [100 * np.std(of, ddof=1) for of in VALUES.values()]
    assert lines[2] == f"| a_b | **91.0 ± {deviations[0]:.1f}** | 1.5 Mbit |"
    assert lines[3] == rf"| c\|d | 83.0 ± {deviations[1]:.1f} | - |"
    assert lines[-1] == "Mean ± deviation & more."


def test_latex_is_booktabs_with_everything_escaped():
    text = latex(TABLE)
    for part in (
        r"\toprule",
        r"\midrule",
        r"\bottomrule",
        r"\begin{tabular}{lrr}",
        r"a\_b & $\mathbf{91.0 \pm 1.4}$ & 1.5 Mbit \\",
        r"c|d & $83.0 \pm 4.2$ & -- \\",
        r"accuracy (\%)",
        r"Mean $\pm$ deviation \& more.",
    ):
        assert part in text
    assert text.count("{") == text.count("}")
    for line in text.splitlines():
        assert line.count("$") % 2 == 0


def test_what_is_worse_has_a_dagger_and_a_table_a_label():
    cells = {"a": Cell([0.5, 0.7], worse=True), "b": Cell([0.9], best=True)}
    table = MethodTable(list(cells), [MeasureColumn("f1", cells)], "†: worse")
    assert r"a & $0.60 \pm 0.14^\dagger$" in latex(table, "tab:1")
    assert r"\label{tab:1}" in latex(table, "tab:1")
    assert r"\caption{$^\dagger$: worse}" in latex(table)
    assert "| a | 0.60 ± 0.14† |" in markdown(table)


def test_a_value_that_is_not_finite_is_named():
    table = MethodTable(["a"], [MeasureColumn("loss", {"a": Cell([1.0, np.nan])})], "")
    assert "| a | not finite |" in markdown(table)
    assert r"a & not finite \\" in latex(table)


@pytest.mark.parametrize(
    ("bits", "text"), [(0, "0 bit"), (999, "999 bit"), (12_300, "12.3 kbit")]
)
def test_bits_have_units(bits, text):
    assert human_bits(bits) == text


def test_a_target_that_some_seeds_miss_is_not_reached():
    there = {"reached": True, "round": 10, "bits_up": 2e6}
    missed = {"reached": False, "round": None, "bits_up": None}
    assert mean_to_target([there, {**there, "round": 15}], "round") == "12.5"
    assert mean_to_target([there], "bits_up") == "2 Mbit"
    assert mean_to_target([there, missed], "round") == "not reached (1 of 2 seeds)"
    assert mean_to_target([missed], "round") == "not reached"


def test_special_signs_of_latex():
    assert escape_latex("a&b_c^d~e\\") == (
        r"a\&b\_c\textasciicircum{}d\textasciitilde{}e\textbackslash{}"
    )


def test_names_are_no_markup():
    name = "a\n\n\\input{x} ^^5c`b` [x](y) <i>"
    table = MethodTable(
        [name], [MeasureColumn("n", {name: Cell(text="1^^5cinput")})], ""
    )
    shown = latex(table)
    assert "\n\n" not in shown and "\\input" not in shown and "^^" not in shown
    row = markdown(table).splitlines()[2]
    assert row.startswith(r"| a \\input{x} ^^5c\`b\` \[x\](y) &lt;i> |")
