# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The peers of ``adapters.py``: a loop over clients in PyTorch.

``--peer torch`` has a GPT-2 and LoRA layers of its own, written as ``peft`` writes
them; ``--peer peft`` needs ``transformers`` and ``peft``.
"""

import argparse
import json
import statistics
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import adapters_work as work

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def stacked(path: str, layer: int, shape: tuple[int, ...], layers: int) -> torch.Tensor:
    """One layer of a weight that ``adapters.py`` has for all layers."""
    key = (path, layers)
    if key not in _DRAWN:
        _DRAWN[key] = work.weight(path, (layers, *shape))
    return torch.from_numpy(_DRAWN[key][layer])


_DRAWN: dict[tuple[str, int], np.ndarray] = {}


class LoraLinear(nn.Module):
    """A frozen product in bfloat16, plus ``B(A(x)) * scale`` in float32 factors."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)
        self.scale = 1.0

    def forward(self, inputs):
        """The product and its change."""
        change = self.lora_b(self.lora_a(inputs.to(self.lora_a.weight.dtype)))
        return self.base(inputs) + change * self.scale


class Layer(nn.Module):
    """A layer of GPT-2, with factors at the products of attention."""

    def __init__(self, size: work.Size, place: int):
        super().__init__()
        wide, inner = size.width, size.hidden
        self.heads = size.heads
        self.norms = nn.ModuleList([nn.LayerNorm(wide), nn.LayerNorm(wide)])

        def product(name: str, inputs: int, outputs: int) -> nn.Linear:
            layer = nn.Linear(inputs, outputs)
            nn.init.zeros_(layer.bias)
            own = stacked(
                f"layers/{name}/weight", place, (outputs, inputs), size.layers
            )
            with torch.no_grad():
                layer.weight.copy_(own)
            return layer

        self.products = nn.ModuleDict(
            {
                name: LoraLinear(product(name, wide, wide), size.rank)
                for name in work.ADAPTED
            }
        )
        self.up, self.down = product("up", wide, inner), product("down", inner, wide)

    def forward(self, here):
        """The states after the layer."""
        normed = self.norms[0](here)
        shape = (*here.shape[:2], self.heads, -1)
        query, key, value = (
            self.products[name](normed).view(shape).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        here = here + self.products["out"](mixed.transpose(1, 2).flatten(2))
        inner = functional.gelu(self.up(self.norms[1](here)), approximate="tanh")
        return here + self.down(inner)


class Gpt2(nn.Module):
    """GPT-2 with the weights of ``adapters_work``."""

    def __init__(self, size: work.Size):
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.length, size.width)
        for table, path in ((self.tokens, "tokens"), (self.places, "positions")):
            own = work.weight(f"embedding/{path}", tuple(table.weight.shape))
            with torch.no_grad():
                table.weight.copy_(torch.from_numpy(own))
        self.layers = nn.ModuleList([Layer(size, at) for at in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)

    def forward(self, tokens):
        """The scores of the next tokens."""
        here = self.tokens(tokens) + self.places.weight[None, : tokens.shape[1]]
        for layer in self.layers:
            here = layer(here)
        return functional.linear(self.norm(here), self.tokens.weight)


def own_model(size: work.Size) -> nn.Module:
    model = Gpt2(size).to(DEVICE)
    for name, parameter in model.named_parameters():
        trained = "lora_" in name
        parameter.requires_grad_(trained)
        if not trained:
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


class PeftModel(nn.Module):
    """GPT-2 of ``transformers`` with the same weights, and the LoRA of ``peft``."""

    def __init__(self, size: work.Size):
        super().__init__()
        import peft
        import transformers

        config = transformers.GPT2Config(
            vocab_size=size.vocabulary,
            n_positions=size.length,
            n_embd=size.width,
            n_layer=size.layers,
            n_head=size.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        plain = transformers.GPT2LMHeadModel(config)
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(_as_gpt2(name, parameter, size))
        plain = plain.to(dtype=torch.bfloat16)  # pyright: ignore
        chosen = peft.LoraConfig(
            r=size.rank,
            lora_alpha=size.rank,
            target_modules=["attn.c_attn", "attn.c_proj"],
            fan_in_fan_out=True,
        )
        self.inner = peft.get_peft_model(plain, chosen)

    def forward(self, tokens):
        """The scores of the next tokens."""
        return self.inner(input_ids=tokens, use_cache=False).logits


def _as_gpt2(name: str, like: torch.Tensor, size: work.Size) -> torch.Tensor:
    """The same weights under the names of ``transformers``, products transposed."""
    if name.endswith("bias") or "ln_" in name:
        return torch.full_like(like, float(name.endswith("weight")))
    if "wte" in name or "wpe" in name:
        path = "tokens" if "wte" in name else "positions"
        return torch.from_numpy(work.weight(f"embedding/{path}", tuple(like.shape)))
    layer = int(name.split(".")[2])
    ours = {
        "attn.c_attn": ("query", "key", "value"),
        "attn.c_proj": ("out",),
        "mlp.c_fc": ("up",),
        "mlp.c_proj": ("down",),
    }[".".join(name.split(".")[3:5])]
    shape = (like.shape[1] // len(ours), like.shape[0])
    parts = [stacked(f"layers/{one}/weight", layer, shape, size.layers) for one in ours]
    return torch.cat(parts).T


MODELS = {"torch": own_model, "peft": lambda size: PeftModel(size).to(DEVICE)}
MODES = ("eager", "default", "reduce-overhead")
"""As it is, and modes of ``torch.compile``; the last one has CUDA graphs."""


def measure(who: str, size: work.Size, rounds: int, mode: str) -> dict:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = MODELS[who](size)
    factors = [own for own in model.parameters() if own.requires_grad]
    call = model if mode == "eager" else torch.compile(model, mode=mode)
    inputs, targets = (
        torch.from_numpy(part).long().to(DEVICE) for part in work.rows(size)
    )
    low = torch.autocast(DEVICE, torch.bfloat16)

    def loss_of(picked):
        with low:
            scores = call(inputs[picked])
        flat = scores.float().flatten(0, 1)
        return functional.cross_entropy(flat, targets[picked].flatten())

    def client(rows) -> None:
        optimizer = torch.optim.SGD(factors, lr=work.RATE)
        chosen = torch.randint(len(rows), (size.steps, size.batch), device=DEVICE)
        for picked in rows[chosen]:
            optimizer.zero_grad(set_to_none=True)
            loss_of(picked).backward()
            optimizer.step()

    def one_round() -> None:
        start = [own.detach().clone() for own in factors]
        total = [torch.zeros_like(own) for own in factors]
        cohort = torch.randperm(size.clients)[: size.cohort]
        for number in cohort.tolist():
            first = number * size.rows
            client(torch.arange(first, first + size.rows, device=DEVICE))
            with torch.no_grad():
                for own, sum_, old in zip(factors, total, start, strict=True):
                    sum_ += own / size.cohort
                    own.copy_(old)
        with torch.no_grad():
            for own, sum_ in zip(factors, total, strict=True):
                own.copy_(sum_)
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    with torch.no_grad():
        first_loss = loss_of(torch.arange(size.batch, device=DEVICE)).item()
    client(torch.arange(size.rows, device=DEVICE))  # compiles, and warms up
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        one_round()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    return {
        "who": f"{who}, {mode}",
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "adapter_weights": sum(own.numel() for own in factors),
        "first_loss": first_loss,
        "seconds_per_round": statistics.median(seconds),
        "rounds_seconds": [round(one, 4) for one in seconds],
        "clients_per_second": size.cohort / statistics.median(seconds),
        "gigabytes": peak / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--peer", choices=list(MODELS), default="torch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--modes", nargs="+", choices=MODES, help="all if not --small")
    given = parser.parse_args()
    size = work.SMALL if given.small else work.FULL
    for mode in given.modes or (MODES[:1] if given.small else MODES):
        try:
            found = measure(given.peer, size, given.rounds, mode)
        except Exception as error:
            if mode == "eager":
                raise
            reason = str(error).strip().split("\n")[0]
            found = {"who": f"{given.peer}, {mode}", "failed": reason}
        print(json.dumps(found), flush=True)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
