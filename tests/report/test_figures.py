# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
import sys
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.report.figures import (
    FORMATS,
    LOOKS,
    STYLE,
    curves_figure,
    draw_gains,
    looks,
    new_figure,
    plot_rows,
)
from fedblend.report.measures import compare_models
from fedblend.stats.gains import Evidence

PNG = b"\x89PNG"


STARTS = {".png": PNG, ".svg": b"<?xml", ".pdf": b"%PDF"}


def test_rows_become_figures_in_three_formats(rows, evidence, tmp_path):
    written = plot_rows(rows, tmp_path / "figures", evidence, formats=FORMATS)
    names = {path.name for path in written}
    assert names == {
        f"{stem}_test{end}" for stem in ("curves", "gains") for end in STARTS
    }
    for path in written:
        content = path.read_bytes()
        assert len(content) > 5000
        assert content.startswith(STARTS[path.suffix])


def test_the_same_rows_give_the_same_files(rows, tmp_path):
    one, two = (
        plot_rows(rows, tmp_path / name, formats=FORMATS) for name in ("one", "two")
    )
    for first, second in zip(one, two, strict=True):
        assert first.read_bytes() == second.read_bytes()


def test_bars_have_the_clients_names_where_these_fit(evidence, tmp_path):
    found = compare_models(evidence, "test", "accuracy")
    assert found is not None
    names = ["St. Mary", "Abbey Road", "A hospital with a very long name", "9"]
    axes = new_figure(6, 3).subplots()
    draw_gains(axes, found, None, names=names)
    shown = [text.get_text() for text in axes.get_xticklabels()]
    order = np.argsort(found.gain.value, kind="stable")
    wanted = [names[place] for place in order]
    assert [text.rstrip("…") for text in shown] == [name[:17] for name in wanted]
    many = Evidence(
        [{"test": {m: {"accuracy": np.tile(v["accuracy"], 10)} for m, v in of.items()}}
         for one in evidence.measured for of in [one["test"]]],
        (), {"test": np.full(40, 60)}, evidence.metrics,
    )  # fmt: skip
    axes = new_figure(6, 3).subplots()
    found = compare_models(many, "test", "accuracy")
    assert found is not None
    draw_gains(axes, found, None, names=["x"] * 40)
    assert not axes.get_xticklabels()
    assert "40 clients, named in clients.csv" in axes.get_xlabel()


def test_lines_differ_by_more_than_color():
    looks = [(str(look["ls"]), look.get("marker")) for look in LOOKS.values()]
    assert len(set(looks)) == len({dashes for dashes, _ in looks}) == 3


def test_a_run_without_measures_writes_nothing(make_row, tmp_path):
    row = {**make_row(0), "measures": {}}
    assert plot_rows([row], tmp_path) == []
    assert plot_rows([], tmp_path) == []


def test_no_window_library_is_loaded(rows, tmp_path):
    plot_rows(rows, tmp_path)
    assert "matplotlib.pyplot" not in sys.modules


@pytest.fixture(scope="module")
def setting():
    """A federation of three clients, and what every run of it takes."""
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(60, 3)).astype(np.float32)
    labels = (inputs[:, 0] > 0).astype(np.int32)
    federated_data = fb.federate(
        (inputs, labels), np.array_split(np.arange(60), 3), test=0.3
    )
    model = fb.models.softmax(3, 2)
    loss = fb.losses.cross_entropy(model.apply)
    measures = fb.metrics.standard("classes", loss, model.apply)
    rest = {"rounds": 4, "every": 2, "measure": measures, "splits": ["test"]}
    return loss, model.init, federated_data, rest


@pytest.mark.slow
def test_a_run_with_seeds_and_a_reference_has_all_panels(setting, tmp_path):
    loss, init, federated_data, rest = setting
    keys = jax.random.split(jax.random.key(0), 2)
    work = {"steps": 2, "batch_size": 4}
    alone = fb.simulate(
        fb.local_only(loss, fb.Work(0.1, **work)), init, federated_data, keys, **rest
    )
    tuned = fb.finetune(
        fb.fedavg(loss, fb.Work(0.5, **work)), loss, fb.Work(0.1, **work)
    )
    run = fb.simulate(tuned, init, federated_data, keys, local=alone, **rest)
    figure = run.plot(tmp_path / "run.png")
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels[:4] == ["test accuracy", "", "test loss", ""]
    assert "gain over training alone" in labels[4]
    across = [axes.get_xlabel() for axes in figure.axes[2:4]]
    assert across == ["rounds of communication", "bits sent, both ways"]
    assert len(figure.axes[0].lines) == 3
    assert "2 seeds" in figure.axes[0].get_title("left")
    assert (tmp_path / "run.png").read_bytes().startswith(PNG)
    # Nothing travels when everybody trains alone: no panels over bits.
    figure = alone.plot()
    assert [axes.get_ylabel() for axes in figure.axes] == ["test accuracy", "test loss"]


def inside(figure, box) -> bool:
    """Whether nothing of a box is cut off at the edges of a figure."""
    whole = figure.bbox
    return bool(
        box.x0 >= whole.x0 and box.x1 <= whole.x1 and box.y1 <= whole.y1 and box.y0 >= 0
    )


@pytest.mark.parametrize("bits", [0, 1000], ids=["one column", "two columns"])
@pytest.mark.parametrize("same", [True, False], ids=["also personal", "three models"])
def test_the_legend_is_not_clipped(make_row, bits, same):
    rows = [make_row(number, sent=bits) for number in (0, 2, 4)]
    if same:
        for row in rows:
            models = row["measures"]["test"]
            models["personal"] = models["shared"]
    figure = curves_figure(rows, "test", {"rounds": None})
    figure.canvas.draw()
    (legend,) = figure.legends
    assert inside(figure, legend.get_window_extent())


def test_an_axis_of_a_fraction_ends_at_one(make_row):
    rows = [make_row(number) for number in (0, 10, 20)]  # accuracies up to 1
    figure = curves_figure(rows, "test", None)
    low, high = figure.axes[0].get_ylim()
    assert 0 <= low < high == 1
    assert figure.axes[2].get_ylim()[0] < 0.1  # the loss is free


def test_a_sweep_has_a_line_for_every_value(setting):
    loss, init, federated_data, rest = setting
    run = fb.simulate(
        lambda rate: fb.fedavg(loss, fb.Work(rate, steps=2, batch_size=4)),
        init,
        federated_data,
        jax.random.key(0),
        over=jnp.array([0.1, 0.5]),
        **rest,
    )
    figure = run.plot()
    names = [line.get_label() for line in figure.axes[0].lines]
    assert names == ["0.1", "0.5"]
    assert len({line.get_marker() for line in figure.axes[0].lines}) == 2


def test_a_shared_model_alone_is_drawn_once(setting):
    loss, init, federated_data, rest = setting
    plain = fb.fedavg(loss, fb.Work(0.1, steps=2, batch_size=4))
    run = fb.simulate(plain, init, federated_data, jax.random.key(0), **rest)
    (line,) = run.plot().axes[0].lines
    assert "also the personal one" in str(line.get_label())
    unmeasured = fb.simulate(
        plain, init, federated_data, jax.random.key(0), **{**rest, "measure": None}
    )
    assert unmeasured.plot().axes == []


def test_lines_differ_in_color_marker_or_dashes():
    every = [str(look) for look in islice(looks(), 280)]
    assert len(set(every)) == 280


def test_text_has_seven_points_or_more():
    sizes = [
        of for name, of in STYLE.items() if name.endswith(("labelsize", "fontsize"))
    ]
    assert min(sizes) >= 7
