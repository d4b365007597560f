# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints with their scores, written by ``transformers`` itself.

    python tests/models/transformer/write_checkpoints.py

writes those beside this file, which tests read where ``transformers`` is not installed.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent / "checkpoints"
ROWS = np.random.default_rng(0).integers(0, 11, (3, 6))
KINDS = (
    "gpt2",
    "gpt2_untied",
    "llama_grouped",
    "llama_tied_biased",
    "llama_sharded",
    "bert_masked",
    "bert_masked_untied",
    "bert_classes",
)


def built(kind: str) -> Any:
    """The module of this kind, with weights that are far from zero."""
    import torch
    import transformers

    def gpt2(**options):
        config = transformers.GPT2Config(
            vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2, **options
        )
        return transformers.GPT2LMHeadModel(config)

    def llama(**options):
        config = transformers.LlamaConfig(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=16,
            **options,
        )
        return transformers.LlamaForCausalLM(config)

    def bert(maker, **options):
        config = transformers.BertConfig(
            vocab_size=11,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=12,
            max_position_embeddings=8,
            **options,
        )
        return maker(config)

    masked = transformers.BertForMaskedLM
    makers = {
        "gpt2": gpt2,
        "gpt2_untied": lambda: gpt2(
            tie_word_embeddings=False, n_inner=20, activation_function="gelu"
        ),
        "llama_grouped": lambda: llama(
            num_key_value_heads=2, head_dim=4, rope_theta=500.0, rms_norm_eps=1e-3
        ),
        "llama_tied_biased": lambda: llama(
            tie_word_embeddings=True, attention_bias=True, mlp_bias=True
        ),
        "llama_sharded": lambda: llama(num_key_value_heads=1),
        "bert_masked": lambda: bert(masked),
        "bert_masked_untied": lambda: bert(masked, tie_word_embeddings=False),
        "bert_classes": lambda: bert(
            transformers.BertForSequenceClassification, num_labels=3
        ),
    }
    torch.manual_seed(KINDS.index(kind))
    module = makers[kind]().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            factor = name.endswith("weight") and parameter.ndim == 1
            parameter.normal_(float(factor), 0.3 if factor else 0.7)
    return module


def write(kind: str, folder: Path) -> np.ndarray:
    """Save the checkpoint of this kind; returns its scores of ``ROWS``."""
    import torch

    module = built(kind)
    # No warnings about the folder, and several files where that is the point.
    shard = "2KB" if kind == "llama_sharded" else "5GB"
    module.save_pretrained(folder, max_shard_size=shard)
    with torch.no_grad():
        return module(torch.as_tensor(ROWS)).logits.numpy()


if __name__ == "__main__":
    for name in sys.argv[1:] or KINDS:
        np.save(HERE / name / "scores.npy", write(name, HERE / name))
