# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Exported models predict as the run did, from the raw table; each has its card."""

import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pandas
import polars
import pytest
import safetensors.torch
import torch
from mixed_run import ROWS, run_mixed, table, write_csv
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch import nn

import fedblend as fb
from fedblend import models
from fedblend.cli import main
from fedblend.data.dataset import DataError
from fedblend.errors import InputError, RunError, UserError
from fedblend.runs.export.export import FORMATS, export_models
from fedblend.runs.model_card import model_card
from fedblend.runs.predict import predict_file
from fedblend.runs.run_folder import file_words, read_table
from fedblend.simulation.serialize import pack
from fedblend_interop.onnx_graph import ExportError
from fedblend_interop.torch_names import state_dict


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, compiled):
    """A run with a personal model, a blend, for each of three hospitals."""
    folder = tmp_path_factory.mktemp("mixed")
    return fb.load(
        run_mixed(folder, name="apfl", alpha=0.4, held_out=0.2, mix="outputs")
    )


@pytest.fixture(scope="module")
def exports(mixed, tmp_path_factory):
    """The model of one hospital and the shared one, in every format."""
    out = tmp_path_factory.mktemp("exports")
    for name in set(FORMATS) - {"peft"}:  # which is for adapters
        export_models(mixed, out, to=name, clients=["far east"], shared=True)
    return out


def test_every_file_predicts_as_the_run_did(mixed, exports, tmp_path):
    path = write_csv(table(), tmp_path / "new.csv")
    for stem, client in (("client-far-east", "far east"), ("shared", None)):
        shared = client is None
        expected = mixed.predictions(path, client, shared=shared)
        assert set(expected.labels) == {"died", "lived"}
        for suffix in (".safetensors", ".onnx"):
            found = predict_file(exports / f"{stem}{suffix}", path)
            assert found.labels.tolist() == expected.labels.tolist()
            assert found.classes == ("died", "lived")
            # onnxruntime adds in another order; the other files are the same model.
            most = 1e-5 if suffix == ".onnx" else 0.0
            assert np.abs(found.outputs - expected.outputs).max() <= most


def test_onnxruntime_alone_predicts_from_raw_columns(mixed, exports):
    """As documented: texts, numbers, days since 1970; nothing of fedblend."""
    columns = table()
    days = columns["admitted"].astype("datetime64[s]").astype(np.float64) / 86400
    smokes = [np.nan if one is None else float(one) for one in columns["smoker"]]
    wards = ["" if one is None else one for one in columns["ward"]]
    inputs = {
        "age": columns["age"],
        "sex": columns["sex"],
        "ward": np.array(wards, object),
        "admitted": days,
        "smoker": np.array(smokes),
        "stays": columns["stays"].astype(np.float64),
    }
    session = onnxruntime.InferenceSession(exports / "client-far-east.onnx")
    wide = {name: values[:, None] for name, values in inputs.items()}
    label, shares, outputs = map(np.asarray, session.run(None, wide))
    expected = mixed.predictions(columns, "far east")
    assert np.abs(outputs - expected.outputs).max() < 1e-5
    assert np.abs(shares - expected.probabilities).max() < 1e-5
    assert label.tolist() == expected.labels.tolist()
    # What training did not see: another ward, a truth value that is none.
    odd = {name: values[:1].copy() for name, values in columns.items()}
    odd["ward"][0], odd["sex"][0], odd["age"][0] = "cellar", "?", np.nan
    first = {name: values[:1].copy() for name, values in wide.items()}
    first["ward"][0], first["sex"][0], first["age"][0] = "cellar", "?", np.nan
    (outputs,) = session.run(["outputs"], first)
    expected = mixed.predictions(odd, "far east").outputs
    assert np.abs(outputs - expected).max() < 1e-5


def test_each_row_has_the_model_of_its_own_client(mixed, tmp_path):
    columns = table()
    path = write_csv(columns, tmp_path / "new.csv")
    found = mixed.predictions(path)
    assert found.clients == tuple(columns["hospital"])
    for client in mixed.names:
        rows = np.flatnonzero(columns["hospital"] == client)
        own = mixed.predictions(path, client).outputs
        assert np.array_equal(found.outputs[rows], own[rows])
    for frame in (pandas.DataFrame(columns), polars.from_pandas(pandas.read_csv(path))):
        assert np.abs(mixed.predictions(frame).outputs - found.outputs).max() < 1e-6
    shared = mixed.predictions(path, shared=True)
    assert shared.clients is None
    without = {name: of for name, of in columns.items() if name != "hospital"}
    assert np.array_equal(mixed.predictions(without).outputs, shared.outputs)
    assert mixed.predict(path).tolist() == found.labels.tolist()


def test_the_command_line(mixed, exports, tmp_path, capsys):
    path = write_csv(table(), tmp_path / "new.csv")
    out = tmp_path / "predictions.csv"
    run = str(mixed.folder.path)
    assert main(["predict", run, str(path), "--probabilities", "--out", str(out)]) == 0
    frame = pandas.read_csv(out)
    assert list(frame) == [
        "row", "client", "prediction", "probability died", "probability lived"
    ]  # fmt: skip
    assert len(frame) == ROWS
    assert np.allclose(frame["probability died"] + frame["probability lived"], 1)
    capsys.readouterr()
    assert main(["predict", str(exports / "shared.onnx"), str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "row,prediction"
    made = tmp_path / "models"
    command = ["export", run, "--all", "--shared", "--out", str(made)]
    assert main(command) == 0
    assert len(list(made.glob("*.safetensors"))) == 4 == len(list(made.glob("*.md")))
    for wrong, line in (
        (["export", run], "--client ID, --all or --shared"),
        (["export", run, "--shared", "--to", "pickle"], "'pickle' is not one of"),
        (["export", run, "--client", "west"], "'west' is not a client of this run"),
        (["predict", run, "none.csv"], "none.csv"),
        (["predict", run, str(path), "--client", "9"], "9 is not between 0 and 2"),
        (
            ["predict", str(exports / "shared.onnx"), str(path), "--shared"],
            "need a run",
        ),
        (["predict", "nothing.onnx", str(path)], "nothing.onnx: no such file"),
        (["predict", str(path), str(path)], "neither the folder of a run nor"),
    ):
        capsys.readouterr()
        assert main(wrong) == 2
        said = capsys.readouterr().err
        assert line in said.replace("\n", " ")
        assert len(said.splitlines()) == 1


def test_rows_that_cannot_be_predicted_are_one_line(mixed, exports, tmp_path):
    columns = table()
    columns["hospital"][4] = "west"
    with pytest.raises(DataError, match=r"row 4 .* client 'west' .* --shared"):
        mixed.predict(columns)
    columns["hospital"][4] = None
    with pytest.raises(DataError, match=r"row 4 .* no client"):
        mixed.predict(columns)
    del columns["age"]
    for name in ("shared.safetensors", "shared.onnx"):
        with pytest.raises(DataError, match="age"):
            predict_file(exports / name, columns)
    with pytest.raises(RunError, match="shared model is asked for, too"):
        mixed.predict(table(), "north", shared=True)
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes((exports / "shared.safetensors").read_bytes()[:-30])
    with pytest.raises(RunError, match=r"damaged\.safetensors"):
        predict_file(damaged, table())
    plain = mixed.folder.personal(None)
    with pytest.raises(RunError, match="not a model that fedblend export wrote"):
        predict_file(plain, table())
    wrong = tmp_path / "wrong.onnx"
    wrong.write_bytes(b"nothing")
    with pytest.raises(RunError, match="is not an ONNX file"):
        predict_file(wrong, table())


def test_a_file_does_not_decide_which_code_runs(mixed, tmp_path):
    portable = mixed.model()
    metadata = portable.metadata()
    for key, name in (("model", "mlp"), ("algorithm", "apfl")):
        changed = metadata["config"].replace(f'name = "{name}"', 'name = "os:getcwd"')
        assert changed != metadata["config"]
        path = tmp_path / "model.safetensors"
        path.write_bytes(pack(portable.params, metadata | {"config": changed}))
        with pytest.raises(RunError, match=rf"{key}\.name: 'os:getcwd' is code"):
            predict_file(path, table())


@pytest.mark.parametrize(
    "change",
    [{"kind": "x"}, {"kind": ["x"]}, {"shape": [-1]}, {"outputs": 10**15}, None],
)
def test_a_task_that_cannot_be_is_one_line(change, mixed, tmp_path):
    portable, path = mixed.model(), tmp_path / "model.safetensors"
    metadata = portable.metadata()
    task = None if change is None else json.loads(metadata["task"]) | change
    path.write_bytes(pack(portable.params, metadata | {"task": json.dumps(task)}))
    with pytest.raises(InputError, match=r"\A.+\Z"):
        predict_file(path, table())


def test_the_card_has_the_facts_of_its_model(mixed, exports):
    file = exports / "client-far-east.onnx"
    card = (exports / "client-far-east.onnx.md").read_text()
    assert card.startswith("# mixed: the model of client far east\n")
    assert hashlib.sha256(file.read_bytes()).hexdigest() in card
    (own,) = (one for one in mixed.clients() if one["name"] == "far east")
    for name in ("accuracy", "auc", "loss"):
        value = float(own[f"test_personal_{name}"])
        assert f"| {name} | {value:.4f} |" in card
    lines = read_table(mixed.folder.harm)
    (gain,) = (line for line in lines if line["id"] == own["id"])
    assert f"{float(gain['gain_low']):+.4f} to {float(gain['gain_high']):+.4f}" in card
    assert (
        f"| alpha, the weight of the shared model | {float(own['alpha']):.4g} |" in card
    )
    assert f"| train rows | {own['train']} |" in card
    assert "No guarantee: the run has no `[privacy]`" in card
    assert "age, sex, ward, admitted, smoker, stays" in card
    shared = (exports / "shared.safetensors.md").read_text()
    assert "the shared model" in shared.splitlines()[0]
    mixed.summary["privacy"] = {"sentence": "epsilon 3"}
    try:
        again = export_models(mixed, exports / "again", clients=[0], shared=True)
    finally:
        del mixed.summary["privacy"]
    cards = [path.with_name(f"{path.name}.md").read_text() for path in again]
    assert "\nepsilon 3.\n" in cards[0]
    assert "No guarantee for this model" in cards[1]


def test_plain_readers_read_the_files(mixed, exports):
    model = mixed.personal("far east")
    found = load_file(exports / "client-far-east.safetensors")
    assert np.array_equal(found[".personal.last.weight"], model.personal.last.weight)
    assert np.array_equal(found[".alpha"], model.alpha)
    with safe_open(exports / "client-far-east.safetensors", "numpy") as file:
        metadata = file.metadata()
    assert metadata["client"] == "far east"
    assert json.loads(metadata["task"])["labels"] == ["died", "lived"]
    named = load_file(exports / "client-far-east.torch.safetensors")
    assert np.array_equal(named["shared.hidden.0.bias"], model.shared.hidden[0].bias)


def test_names_of_files():
    assert file_words(["a b", "c"]) == ["a-b", "c"]
    assert file_words(["a b", "A-b"]) == ["0-a-b", "1-A-b"]
    assert file_words(["../../x", ".."]) == ["..-..-x", ".."]
    long = file_words(["病院" * 300, "病院" * 301])
    assert len(set(long)) == 2 and all(len(one.encode()) < 120 for one in long)


def test_a_name_writes_nothing_else_on_a_card(mixed, monkeypatch):
    name = "north\n\n## Privacy\n\nepsilon = 0.1 <script> [x](http://y)"
    lines = [{**line, "name": name} for line in mixed.clients()]
    monkeypatch.setattr(mixed, "clients", lambda seed=None: lines)
    card = model_card(mixed, 0, mixed.seeds[0], "a.onnx", "0" * 64)
    assert card.count("\n## Privacy\n") == 1 and "\nepsilon" not in card
    assert "<script>" not in card and "[x]" not in card


def test_an_unknown_format(mixed, tmp_path):
    with pytest.raises(UserError, match="to: 'pickle' is not one of safetensors, onnx"):
        export_models(mixed, tmp_path, to="pickle", shared=True)


class Cnn(nn.Module):
    """The network ``cnn`` as PyTorch writes it."""

    def __init__(self, norm: bool | str = False):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5)
        self.hidden, self.last = nn.Linear(50, 512), nn.Linear(512, 10)
        norms = [nn.GroupNorm(1, 20), nn.GroupNorm(1, 50), nn.LayerNorm(512)]
        if norm == "batch":
            norms = [nn.BatchNorm2d(20), nn.BatchNorm2d(50), nn.BatchNorm1d(512)]
        self.norm = nn.ModuleList(norms if norm else [nn.Identity()] * 3)

    def forward(self, x):
        pool, (first, second, third) = nn.functional.max_pool2d, self.norm
        x = pool(torch.relu(first(self.first(x))), 2)
        x = pool(torch.relu(second(self.second(x))), 2).flatten(1)
        return self.last(torch.relu(third(self.hidden(x))))


class Mlp(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        self.hidden = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 5)])
        norms = [nn.LayerNorm(6), nn.LayerNorm(5)]
        self.norm = nn.ModuleList(norms if norm else [nn.Identity()] * 2)
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        for layer, norm in zip(self.hidden, self.norm, strict=True):
            x = torch.relu(norm(layer(x)))
        return self.last(x)


class CharRnn(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.rnn = kind(8, 6, num_layers=2, batch_first=True)
        self.last = nn.Linear(6, 20)

    def forward(self, x):
        return self.last(self.rnn(self.embedding(x))[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "outputs", "options", "module"),
    [
        ("softmax", (4,), 3, {}, lambda: nn.Linear(4, 3)),
        ("mlp", (4,), 3, {"hidden": (6, 5)}, Mlp),
        ("cnn", (17, 16), 10, {}, Cnn),
        ("mlp", (4,), 3, {"hidden": (6, 5), "norm": True}, lambda: Mlp(norm=True)),
        ("cnn", (17, 16), 10, {"norm": True}, lambda: Cnn(norm=True)),
        ("cnn", (17, 16), 10, {"norm": "batch"}, lambda: Cnn(norm="batch").eval()),
        ("char_rnn", (5,), 20, {"hidden": 6}, lambda: CharRnn(nn.LSTM)),
        (
            "char_rnn",
            (5,),
            20,
            {"hidden": 6, "cell": "gru"},
            lambda: CharRnn(nn.GRU),
        ),
    ],
)
def test_pytorch_loads_the_parameters(name, shape, outputs, options, module, tmp_path):
    model = models.build(name, shape, outputs, **options)
    draw = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: leaf + 0.1 * draw.normal(size=leaf.shape).astype(np.float32),
        model.init(jax.random.key(0)),
    )
    path = tmp_path / "model.safetensors"
    save_file({k: np.ascontiguousarray(v) for k, v in state_dict(params).items()}, path)
    net = module()
    net.load_state_dict(safetensors.torch.load_file(path))
    if name == "char_rnn":
        rows = draw.integers(0, outputs, (3, *shape))
        given = torch.from_numpy(rows)
    else:
        rows = draw.normal(size=(3, *shape)).astype(np.float32)
        given = torch.from_numpy(rows)
        given = given[:, None] if name == "cnn" else given
    with torch.no_grad():
        found = net(given).numpy()
    expected = np.asarray(model.apply(params, jnp.asarray(rows)))
    scale = max(1.0, float(np.abs(expected).max()))
    assert np.abs(found - expected).max() <= 1e-5 * scale


def test_what_pytorch_has_no_layout_for():
    own = {"0.weight": np.ones(2)}
    assert state_dict(own) == own
    with pytest.raises(ExportError, match="tuple has no layout of PyTorch"):
        state_dict((np.ones(2),))
