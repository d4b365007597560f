# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.report.figures import plot_rows

PNG = b"\x89PNG"


def test_rows_become_figures_in_two_formats(rows, evidence, tmp_path):
    written = plot_rows(rows, tmp_path / "figures", evidence)
    names = {path.name for path in written}
    assert names == {
        f"{stem}_test.{end}" for stem in ("curves", "gains") for end in ("png", "svg")
    }
    for path in written:
        content = path.read_bytes()
        assert len(content) > 5000
        assert content.startswith(PNG) if path.suffix == ".png" else b"<svg" in content


def test_the_same_rows_give_the_same_svg(rows, tmp_path):
    first = plot_rows(rows, tmp_path / "one")[1].read_bytes()
    assert first == plot_rows(rows, tmp_path / "two")[1].read_bytes()


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
    assert across == ["rounds of communication", "bits sent, both ways, all clients"]
    assert len(figure.axes[0].lines) == 3
    assert "2 seeds" in figure.axes[0].get_title("left")
    assert (tmp_path / "run.png").read_bytes().startswith(PNG)
    # Nothing travels when everybody trains alone: no panels over bits.
    figure = alone.plot()
    assert [axes.get_ylabel() for axes in figure.axes] == ["test accuracy", "test loss"]


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
