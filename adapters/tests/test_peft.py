# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters of ``peft`` have its scores here, and those written here have them there.

The bases are small random models of ``transformers``, which ``from_torch`` takes. Both
libraries take seconds to import, so tests import them when they run.
"""

import json
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend import mixing
from fedblend.errors import InputError, UserError

safetensors = pytest.importorskip("safetensors.numpy")
torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(
        not all(map(find_spec, ("peft", "transformers"))),
        reason="peft or transformers is not installed",
    ),
    pytest.mark.filterwarnings(
        "ignore::FutureWarning",  # between peft and transformers
        "ignore:fan_in_fan_out is set to False",  # peft sees by itself what GPT-2 needs
    ),
]
GAP = 1e-4
"""Of scores of about 1 to 10 in float32, by two libraries."""
ROWS = np.random.default_rng(1).integers(0, 11, (3, 6))
MODULES = {
    "gpt2": ["attn.c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"],
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
    "bert": ["query", "value", "attention.output.dense", "transform.dense"],
}
RANKS = {"gpt2": {"c_attn": 3}, "llama": {"q_proj": 4}, "bert": {}}
"""Ranks of modules that have another one than 2."""
LATER = [
    pytest.param(kind, marks=() if kind == "gpt2" else pytest.mark.slow)
    for kind in MODULES
]


def base_of(kind):
    """A module with weights that are far from zero; the same in every call."""
    import transformers

    class Gpt2(transformers.GPT2LMHeadModel):
        def forward(self, tokens):
            return super().forward(tokens, use_cache=False).logits

    class Llama(transformers.LlamaForCausalLM):
        def forward(self, tokens):
            return super().forward(tokens, use_cache=False).logits

    class Bert(transformers.BertForMaskedLM):
        def forward(self, tokens):
            return super().forward(tokens).logits

    sizes = {"vocab_size": 11, "num_hidden_layers": 2, "hidden_size": 8}
    makers = {
        "gpt2": lambda: Gpt2(
            transformers.GPT2Config(
                vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2
            )
        ),
        "llama": lambda: Llama(
            transformers.LlamaConfig(
                **sizes,
                intermediate_size=12,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=16,
            )
        ),
        "bert": lambda: Bert(
            transformers.BertConfig(
                **sizes,
                num_attention_heads=2,
                intermediate_size=12,
                max_position_embeddings=8,
            )
        ),
    }
    torch.manual_seed(0)
    module = makers[kind]().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            factor = name.endswith("weight") and parameter.ndim == 1
            parameter.normal_(float(factor), 0.3 if factor else 0.7)
    return module


def scores(module):
    with torch.no_grad():
        return module(torch.as_tensor(ROWS)).numpy()


def model_of(kind):
    return fb.models.from_torch(base_of(kind), ROWS, dropout="off")


def moved(params, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: leaf + jnp.asarray(0.3 * rng.normal(size=leaf.shape), leaf.dtype),
        params,
    )


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, atol=GAP, rtol=GAP)


def files(folder):
    arrays = safetensors.load_file(folder / "adapter_model.safetensors")
    return json.loads((folder / "adapter_config.json").read_text()), arrays


def written(kind, folder):
    """An adapter that peft wrote; returns the scores of its model."""
    import peft

    settings = peft.LoraConfig(
        r=2,
        lora_alpha=6,
        target_modules=MODULES[kind],
        rank_pattern=RANKS[kind],
        fan_in_fan_out=kind == "gpt2",
    )
    module = peft.get_peft_model(base_of(kind), settings).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    module.save_pretrained(str(folder))
    return scores(module)


@pytest.mark.parametrize("kind", LATER)
def test_modules_of_transformers_have_their_scores_and_gradients(kind):
    module, model = base_of(kind), model_of(kind)
    weights = np.random.default_rng(2).normal(size=(3, 6, 11)).astype(np.float32)
    found = module(torch.as_tensor(ROWS))
    (found * torch.as_tensor(weights)).sum().backward()

    def total(params):
        ours = model.apply(params, ROWS)
        return (ours * weights).sum(), ours

    start = model.init(jax.random.key(0))
    slopes, ours = jax.jit(jax.grad(total, has_aux=True))(start)
    close(ours, found.detach().numpy())
    for name, parameter in module.named_parameters():
        wanted = parameter.grad.numpy()
        assert np.abs(slopes[name] - wanted).max() < GAP * max(1, np.abs(wanted).max())


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODULES)
def test_adapters_of_peft_have_its_scores(kind, tmp_path):
    wanted = written(kind, tmp_path / "theirs")
    adapter, how = fb.adapt.import_peft(tmp_path / "theirs")
    model = model_of(kind)
    own = fb.adapt.adapt(model, how=how, inputs=ROWS, where=list(adapter))
    close(own.apply(adapter, ROWS), wanted)
    assert np.abs(wanted - scores(base_of(kind))).max() > 0.1
    # What is written of it here, with its scales, are the same products by name.
    fb.adapt.export_peft(tmp_path / "ours", adapter, how=how)
    (first, ours), (_, theirs) = files(tmp_path / "ours"), files(tmp_path / "theirs")
    assert sorted(ours) == sorted(theirs)
    for name in (name for name in theirs if "lora_A" in name):
        other = name.replace("lora_A", "lora_B")
        scale = 6 / len(theirs[name])
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        alpha = first["alpha_pattern"].get(module, first["lora_alpha"])
        rank = first["rank_pattern"].get(module, first["r"])
        assert module in first["target_modules"] and rank == len(ours[name])
        np.testing.assert_allclose(
            ours[other] @ ours[name] * alpha / rank,
            scale * theirs[other] @ theirs[name],
            atol=1e-5,
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODULES)
def test_peft_computes_what_the_adapted_model_does(kind, tmp_path):
    """A mixture of two adapters with a scale, loaded and merged by peft."""
    import peft

    how = fb.adapt.lora(2, alpha=6)
    model = fb.adapt.adapt(model_of(kind), how=how, inputs=ROWS)
    one, other = (moved(model.init(jax.random.key(0)), seed) for seed in (1, 2))
    mixed = mixing.products(0.3, one, other)
    fb.adapt.export_peft(tmp_path, mixed, how=how)
    module = peft.PeftModel.from_pretrained(base_of(kind), tmp_path).eval()
    wanted = model.apply(mixed, ROWS)
    assert np.abs(wanted - scores(base_of(kind))).max() > 0.1
    close(scores(module), wanted)
    close(scores(module.merge_and_unload()), wanted)


@pytest.fixture
def network():
    """A module with a convolution, and rows of it."""
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(48, 6),
        torch.nn.GELU(),
        torch.nn.Linear(6, 2),
    )
    return net, np.random.default_rng(0).normal(size=(3, 1, 6, 6)).astype(np.float32)


def test_peft_loads_adapters_of_any_module_of_torch(network, tmp_path):
    import peft

    net, images = network
    how = fb.adapt.lora(2)
    model = fb.adapt.adapt(fb.models.from_torch(net, images), how=how, inputs=images)
    adapter = moved(model.init(jax.random.key(0)))
    assert sorted(adapter) == ["0.weight", "3.weight"]
    fb.adapt.export_peft(tmp_path, adapter, how=how)
    module = peft.PeftModel.from_pretrained(net, tmp_path).eval()
    close(
        module(torch.as_tensor(images)).detach().numpy(), model.apply(adapter, images)
    )
    again, how = fb.adapt.import_peft(tmp_path)
    close(again["0.weight"]["a"], adapter["0.weight"]["a"])


def test_an_adapter_with_a_frozen_a_is_written_with_it(network, tmp_path):
    net, images = network
    model, how = fb.models.from_torch(net, images), fb.adapt.lora(2, train="b")
    own = fb.adapt.adapt(model, how=how, inputs=images, where="3.weight")
    adapter = moved(own.init(jax.random.key(0)))
    with pytest.raises(UserError, match="with b is not factors a and b; two adapters"):
        fb.adapt.export_peft(tmp_path, adapter, how=how)
    whole = fb.adapt.add_frozen(model, adapter, how=how, inputs=images)
    fb.adapt.export_peft(tmp_path, whole, how=how)
    again, plain = fb.adapt.import_peft(tmp_path)
    both = fb.adapt.adapt(model, how=plain, inputs=images, where=list(again))
    close(both.apply(again, images), own.apply(adapter, images))


def test_bad_files_get_one_line(network, tmp_path):
    net, images = network
    how = fb.adapt.lora(2)
    model = fb.adapt.adapt(fb.models.from_torch(net, images), how=how, inputs=images)
    fb.adapt.export_peft(tmp_path, model.init(jax.random.key(0)), how=how)
    table, arrays = files(tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({**table, "use_dora": True}))
    with pytest.raises(InputError, match="use_dora = True is not supported, only Fals"):
        fb.adapt.import_peft(tmp_path)
    config.write_text(json.dumps(table))
    arrays.pop("base_model.model.3.lora_A.weight")
    safetensors.save_file(arrays, tmp_path / "adapter_model.safetensors")
    with pytest.raises(InputError, match=r"3 lacks a factor"):
        fb.adapt.import_peft(tmp_path)
    safetensors.save_file({"odd": np.ones(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(InputError, match=r"'odd' is not a factor of a module"):
        fb.adapt.import_peft(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(InputError, match="not an adapter of PEFT: "):
        fb.adapt.import_peft(tmp_path)
