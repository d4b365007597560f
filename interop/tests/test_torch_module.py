# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What is a parameter, what is refused, and the way back into the module."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import fedblend as fb
from fedblend.errors import InputError
from fedblend.trees import precision
from fedblend_interop.torch_program import OPERATORS, decompositions

KEY = jax.random.key(0)
ROWS = torch.linspace(-1, 1, 12).reshape(4, 3)
from_torch = fb.models.from_torch


class Layer(nn.Module):
    """A linear layer, and then what ``after`` makes of it."""

    def __init__(self, after=lambda module, outputs, inputs: outputs):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.after = after

    def forward(self, inputs):
        return self.after(self, self.linear(inputs), inputs)


class Tied(nn.Module):
    """Two layers with the same weights; a bias is frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, inputs):
        return self.second(self.first(inputs)) * self.scale


def branch(_, outputs, inputs):
    return outputs if inputs.sum() > 0 else -outputs


REFUSED = {
    "has BatchNorm1d at '1' with momentum=None": (
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None))
    ),
    "has BatchNorm1d at '1', which takes the statistics of the batch in eval": (
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False))
    ),
    "branches on values of its inputs": Layer(branch),
    "makes a number or a size from the values": Layer(
        lambda _, outputs, inputs: outputs[inputs[:, 0] > 0]
    ),
    "works for one number of rows only": Layer(
        lambda _, outputs, __: outputs.view(4, 3)
    ),
    "returns 2 values": Layer(lambda _, outputs, inputs: (outputs, inputs)),
    r"returns a tensor of shape \(3\); the first axis": Layer(
        lambda _, outputs, __: outputs.mean(0)
    ),
    r"cannot run: aten._fft_r2c.default \(in Layer\), aten.erfinv.default \(in": (
        Layer(lambda _, outputs, __: torch.erfinv(torch.fft.fft(outputs).abs()))
    ),
    "does not take the example, of shape .*RuntimeError: mat1": nn.Linear(5, 2),
    "no parameters that require gradients": nn.ReLU(),
    "linear.weight: float16 is not float32 or float64": Layer().half(),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_run_is_refused_in_one_line(message, capfd):
    with pytest.raises(InputError, match=message) as caught:
        rows = ROWS.half() if "float16" in message else ROWS
        from_torch(REFUSED[message], rows)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, ROWS), "source: an int is not an nn.Module"),
        ((lambda: 3, ROWS), "source: a function that returns an int is not an nn.Mod"),
        (
            (Layer(), torch.tensor(1.0)),
            r"example: an array of shape \(\) is not an arr",
        ),
        ((Layer(), torch.zeros(0, 3)), r"example: an array of shape \(0, 3\) is not"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        from_torch(*arguments)


def same(model, params, module, rows=ROWS):
    expected = module(rows).detach().numpy()
    np.testing.assert_allclose(
        model.apply(params, jnp.asarray(rows.numpy())), expected, atol=1e-6
    )


def test_dropout_off_and_frozen_statistics_are_evaluation_mode():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    net(ROWS)  # running statistics that are not 0 and 1
    model = from_torch(net, ROWS, dropout="off", freeze_batch_norm=True)
    params = model.init(KEY)
    assert set(params) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert net.training  # the user's own stays as it was
    same(model, params, net.eval())
    with pytest.raises(InputError, match=r'dropout: 0.5 is not "off" or None'):
        from_torch(net, ROWS, dropout=0.5, freeze_batch_norm=True)  # pyright: ignore


def test_tied_and_frozen_parameters_and_buffers_go_there_and_back():
    net = Tied()
    model = from_torch(net, ROWS)
    params = model.init(KEY)
    assert set(params) == {"first.weight", "second.bias"}
    same(model, params, net)
    moved = jax.tree.map(lambda leaf: 3 * leaf, params)
    tensors = fb.models.state_dict(moved, net)
    assert set(tensors) == set(net.state_dict())
    fresh = Tied()
    fresh.load_state_dict(tensors)
    same(model, moved, fresh)
    assert set(fb.models.state_dict(moved)) == set(params)


def test_a_function_draws_as_the_module_does_seeded_by_the_key():
    state = torch.get_rng_state()
    model = from_torch(lambda: nn.Sequential(nn.LazyLinear(5), nn.Tanh()), ROWS)
    keys = jax.random.split(KEY, 3)
    many = jax.jit(jax.vmap(model.init))(keys)
    assert many["0.weight"].shape == (3, 5, 3)
    assert not np.allclose(many["0.weight"][0], many["0.weight"][1])
    np.testing.assert_array_equal(many["0.weight"][1], model.init(keys[1])["0.weight"])
    assert np.abs(many["0.weight"]).max() <= 1 / np.sqrt(3)  # PyTorch's own bound
    assert torch.equal(torch.get_rng_state(), state)


def test_a_mixture_of_outputs_is_a_module_that_mixes():
    net = Layer()
    model = from_torch(net, ROWS)
    params = model.init(KEY)
    blend = fb.mixing.outputs(0.25, params, jax.tree.map(jnp.cos, params))
    scores = fb.mixing.predict(model.apply, blend, jnp.asarray(ROWS.numpy()))
    mixed = fb.models.to_torch(blend, net)
    np.testing.assert_allclose(mixed(ROWS).detach().numpy(), scores, atol=1e-6)
    with pytest.raises(InputError, match="outputs of two models; take the two halves"):
        fb.models.state_dict(blend, net)


def test_parameters_of_another_module_are_refused():
    params = from_torch(Layer(), ROWS).init(KEY)
    with pytest.raises(InputError, match="another one, Tied"):
        fb.models.state_dict(params, Tied())
    with pytest.raises(InputError, match="a list is not a dictionary by names"):
        fb.models.state_dict([1], Tied())


def test_float64_is_kept_or_refused():
    net = Layer().double()
    model = from_torch(net, ROWS)  # the example follows the module
    with pytest.raises(InputError, match="is float64, and JAX computes in float32"):
        model.init(KEY)
    with precision("float64"):
        params = model.init(KEY)
        outputs = model.apply(params, jnp.asarray(ROWS.double().numpy()))
        assert outputs.dtype == np.float64
        expected = net(ROWS.double()).detach().numpy()
        np.testing.assert_allclose(outputs, expected, rtol=1e-14)


def test_rows_of_other_shapes_are_taken_where_they_mean_the_same():
    net = nn.Conv2d(2, 1, 3)
    model = from_torch(net, torch.zeros(1, 2, 4, 5))
    params = model.init(KEY)
    images = torch.rand(3, 2, 4, 5)
    expected = net(images).detach().numpy()
    last = images.permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(model.apply(params, last), expected, atol=1e-6)
    with pytest.raises(InputError, match=r"inputs: \(40,\) is not \(2, 4, 5\), the"):
        model.apply(params, images.reshape(3, -1).numpy())
    gray = nn.Conv2d(1, 1, 3)
    model = from_torch(gray, torch.zeros(1, 1, 4, 5))
    params = model.init(KEY)
    images = torch.rand(3, 1, 4, 5)
    expected = gray(images).detach().numpy()
    for shape in ((4, 5), (4, 5, 1), (20,)):
        rows = images.reshape(3, *shape).numpy()
        np.testing.assert_allclose(model.apply(params, rows), expected, atol=1e-6)


def test_personal_models_of_a_run_load_into_the_module():
    """APFL trains the module; what a client deploys gives its scores in PyTorch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model = from_torch(net, ROWS)
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(60, 3)).astype(np.float32)
    labels = (inputs[:, 0] > 0).astype(np.int32)
    data = fb.federate((inputs, labels), fb.partition.contiguous(60, 3))
    algorithm = fb.apfl(
        fb.losses.cross_entropy(model.apply), fb.Work(0.5, 5, 10), alpha=0.5
    )
    run = fb.simulate(algorithm, model.init, data, KEY, rounds=4)
    run.complete()
    for client in range(3):
        own = run.personal(client)
        net.load_state_dict(fb.models.state_dict(own, net))
        scores = net(torch.from_numpy(inputs)).detach().numpy()
        np.testing.assert_allclose(model.apply(own, inputs), scores, atol=1e-5)
        assert (scores.argmax(1) == labels).mean() > 0.8


NOT_OF_ATEN = {"convert_element_type", "stop_gradient", "sym_numel", "sym_size"}


def test_every_operator_may_be_left_in_a_graph():
    """Those that are taken apart need no function in JAX."""
    apart = decompositions()
    for name in set(OPERATORS) - NOT_OF_ATEN:
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base)
        overloads = [overload] if overload else packet.overloads()
        left = [one for one in overloads if getattr(packet, one) not in apart]
        assert [one for one in left if "out" not in one], name
