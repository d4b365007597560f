# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Figures for a paper: what they show, and that they fit."""

from itertools import islice

import numpy as np
import pytest

from fedblend.report import paper_figures
from fedblend.report.paper_figures import ONE, STYLE, draw_sweep, looks


@pytest.fixture
def drawn(monkeypatch):
    """The figures, instead of files."""
    figures = []
    monkeypatch.setattr(
        paper_figures, "_save", lambda figure, path: figures.append(figure) or path
    )
    return figures


def test_lines_differ_in_color_marker_or_dashes():
    every = [str(look) for look in islice(looks(), 280)]
    assert len(set(every)) == 280


def test_a_sweep_shows_means_and_deviations_over_seeds(drawn, tmp_path):
    values = np.array([[0.6, 0.8], [0.7, 0.9]])
    models = {"personal model": values, "training alone": values / 2}
    path = tmp_path / "x" / "y.pdf"
    draw_sweep([0.1, 0.9], models, "algorithm.alpha", "test accuracy", path)
    (figure,) = drawn
    (axes,) = figure.axes
    for container, scale in zip(axes.containers, (1, 0.5), strict=True):
        line, _, (bars,) = container
        assert line.get_xdata() == pytest.approx([0.1, 0.9])
        assert line.get_ydata() == pytest.approx(values.mean(axis=1) * scale)
        ends = np.array([segment[:, 1] for segment in bars.get_segments()])
        deviation = values.std(axis=1, ddof=1) * scale
        assert np.diff(ends)[:, 0] == pytest.approx(2 * deviation)
    assert axes.get_xscale() == "linear"


def test_the_legend_fits_into_a_column(drawn, tmp_path):
    """As many columns as fit; text has 7 points or more."""
    for length, columns in ((1, 4), (9, 2), (20, 1)):
        models = {f"{n}{'m' * length}": np.ones((2, 1)) for n in range(4)}
        draw_sweep([0.001, 1.0], models, "rate", "loss", tmp_path / "x.pdf")
        figure = drawn[-1]
        (legend,) = figure.legends
        assert legend.get_window_extent().width <= ONE * figure.dpi
        assert legend._ncols == columns
        assert figure.axes[0].get_xscale() == "log"
    sizes = [
        of for name, of in STYLE.items() if name.endswith(("labelsize", "fontsize"))
    ]
    assert min(sizes) >= 7
