# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Small random adapters with the scores of their models, written by ``peft`` itself.

    python tests/models/adapt/write_peft_adapters.py

writes those beside this file, which tests read where ``peft`` is not installed. Their
bases are the checkpoints of ``tests/models/transformer``.
"""

from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent / "peft_adapters"
BASES = Path(__file__).parents[1] / "transformer" / "checkpoints"
ROWS = np.random.default_rng(1).integers(0, 11, (3, 6))
MODULES = {
    "gpt2": ["attn.c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"],
    "llama_grouped": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
    "bert_masked": ["query", "value", "attention.output.dense", "transform.dense"],
}
RANKS = {"gpt2": {"c_attn": 3}, "llama_grouped": {"q_proj": 4}, "bert_masked": {}}
"""Ranks of modules that have another one than 2."""


def base_of(kind: str) -> Any:
    """The module of ``transformers``."""
    import transformers

    maker = transformers.AutoModelForMaskedLM
    if kind != "bert_masked":
        maker = transformers.AutoModelForCausalLM
    return maker.from_pretrained(BASES / kind).eval()


def scores(module: Any) -> np.ndarray:
    """What a module computes for ``ROWS``."""
    import torch

    with torch.no_grad():
        return module(torch.as_tensor(ROWS)).logits.numpy()


def write(kind: str, folder: Path) -> np.ndarray:
    """Save an adapter of this kind; returns the scores of its model."""
    import peft
    import torch

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
    (folder / "README.md").unlink(missing_ok=True)
    return scores(module)


if __name__ == "__main__":
    for one in MODULES:
        np.save(HERE / f"{one}.npy", write(one, HERE / one))
