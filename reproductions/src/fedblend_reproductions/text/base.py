# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
r"""Train a base from scratch: the frozen half of personal adapters.

    python -m fedblend_reproductions.text.base base            1 M weights, minutes
    python -m fedblend_reproductions.text.base base --small    seconds, to try it
    python -m fedblend_reproductions.text.base large --vocabulary 8192 --width 512 \
        --layers 8 --heads 8 --batch 128 --steps 3000          27 M weights, for a GPU

Plain training in one place: AdamW, a rate that warms up and falls as a cosine. The
folder then has the weights (``load_base``), the tokenizer
(``fb.data.load_tokenizer``), and ``base.json``: perplexity by token and bits
by character on texts that the base has not seen, and who the held-out clients are.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedblend as fb
from fedblend import keys
from fedblend.simulation.serialize import build_tree, pack, unpack
from fedblend_adapters.transformer_layers import Transformer
from fedblend_reproductions.text.corpus import (
    Corpus,
    Rows,
    read_corpus,
    windows_of,
)

FIGURES = "base.json"
WEIGHTS = "base.safetensors"
TOKENIZER = "tokenizer.json"


@dataclasses.dataclass(frozen=True)
class Size:
    """How large a base is, and how long it is trained; see ``transformer``."""

    vocabulary: int = 2048
    length: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    batch: int = 32
    steps: int = 500
    rate: float = 3e-3
    clients: int = 25
    least: int = 4000
    seed: int = 0


SMALL = Size(vocabulary=300, length=32, width=16, layers=2, batch=8, steps=20)
WARM_UP, DECAY, LONGEST = 0.1, 0.1, 1.0
"""Part of the steps in which the rate grows; weight decay; norm of a gradient."""


class Base(NamedTuple):
    """A trained base."""

    params: Transformer
    tokenizer: fb.data.Tokenizer
    figures: dict[str, Any]


def model_of(size: Size) -> fb.Model:
    """The model of a base."""
    return fb.models.transformer(
        size.vocabulary,
        size.length,
        width=size.width,
        layers=size.layers,
        heads=size.heads,
        kv_heads=size.kv_heads,
    )


def train_base(size: Size, corpus: Corpus, say: Callable[[str], None] = print) -> Base:
    """Train a tokenizer and a base on a corpus, and measure it on what it has not seen.

    Args:
        size: of the base, and of its training.
        corpus: the texts.
        say: gets a line of progress ten times.
    """
    began = time.perf_counter()
    tokenizer = fb.data.train_tokenizer(corpus.base, size.vocabulary)
    size = dataclasses.replace(size, vocabulary=tokenizer.size)
    model = model_of(size)
    rows = windows_of(corpus.base, tokenizer, size.length)
    root = jax.random.key(size.seed)
    params = model.init(keys.derive(root, "init"))
    params = _trained(model, params, rows, size, say)
    seconds = time.perf_counter() - began
    held_out = {
        source: quality(model, params, windows_of(texts, tokenizer, size.length))
        for source, texts in corpus.held_out.items()
    }
    figures = {
        "size": dataclasses.asdict(size),
        "weights": fb.trees.size(params),
        "tokens": rows.tokens,
        "seconds": round(seconds, 1),
        "device": jax.devices()[0].device_kind,
        "held_out": held_out,
        "users": list(corpus.users),
        "roles": list(corpus.roles),
    }
    return Base(params, tokenizer, figures)


def _trained(
    model: fb.Model, params: Any, rows: Rows, size: Size, say: Callable[[str], None]
) -> Transformer:
    """The parameters after all steps; batches are drawn by key, without replacement."""
    warm = max(1, int(WARM_UP * size.steps))
    rate = optax.warmup_cosine_decay_schedule(0.0, size.rate, warm, size.steps)
    optimizer = optax.chain(
        optax.clip_by_global_norm(LONGEST),
        optax.adamw(rate, b2=0.95, weight_decay=DECAY, mask=_is_matrix),
    )
    loss = fb.losses.sequence_cross_entropy(model.apply)

    @jax.jit
    def step(state, batch):
        params, moments = state
        value, slope = jax.value_and_grad(lambda own: loss(own, batch).mean())(params)
        change, moments = optimizer.update(slope, moments, params)
        return (optax.apply_updates(params, change), moments), value

    draws = np.random.default_rng(size.seed)
    state, values = (params, optimizer.init(params)), []
    order = np.empty(0, int)
    for number in range(size.steps):
        if len(order) < size.batch:
            order = np.concatenate([order, draws.permutation(len(rows.inputs))])
        chosen, order = order[: size.batch], order[size.batch :]
        state, value = step(state, (rows.inputs[chosen], rows.targets[chosen]))
        values.append(value)
        if (number + 1) % max(1, size.steps // 10) == 0:
            recent = float(jnp.stack(values[-50:]).mean())
            say(f"step {number + 1} of {size.steps}: loss {recent:.3f}")
    return state[0]


def _is_matrix(params: Transformer) -> Any:
    """Weights decay; biases and factors of normalizations do not."""

    def decays(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return leaf.ndim > 1 and "norm" not in name and not name.endswith("bias")

    return jax.tree_util.tree_map_with_path(decays, params)


def quality(
    model: fb.Model, params: Any, rows: Rows, batch: int = 64
) -> dict[str, float]:
    """The perplexity by token, and the bits by character, of windows of texts."""

    @jax.jit
    def total(params, inputs, targets):
        scores = model.apply(params, inputs)
        known = targets >= 0
        each = optax.softmax_cross_entropy_with_integer_labels(
            scores, jnp.where(known, targets, 0)
        )
        return jnp.where(known, each, 0).sum()

    fill = -len(rows.inputs) % batch
    inputs = np.pad(rows.inputs, ((0, fill), (0, 0)))
    targets = np.pad(rows.targets, ((0, fill), (0, 0)), constant_values=-1)
    sums = [
        float(total(params, inputs[at : at + batch], targets[at : at + batch]))
        for at in range(0, len(inputs), batch)
    ]
    return {
        "perplexity": float(np.exp(sum(sums) / rows.tokens)),
        "bits_by_character": float(sum(sums) / np.log(2) / rows.characters),
    }


def save_base(folder: Path, base: Base) -> None:
    """Write weights, tokenizer and figures."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS).write_bytes(pack(base.params))
    base.tokenizer.save(folder / TOKENIZER)
    (folder / FIGURES).write_text(json.dumps(base.figures, indent=2) + "\n")


def load_base(folder: Path) -> tuple[fb.Model, Transformer]:
    """The model and the weights that ``save_base`` wrote."""
    figures = json.loads((folder / FIGURES).read_text())
    model = model_of(Size(**figures["size"]))
    arrays, _ = unpack((folder / WEIGHTS).read_bytes())
    return model, build_tree(arrays, jax.eval_shape(model.init, jax.random.key(0)))


def main(arguments: list[str] | None = None) -> int:
    """Train the base that the command line asks for, and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true", help="a tiny one, in seconds")
    for field in dataclasses.fields(Size):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=type(field.default))
    given = vars(parser.parse_args(arguments))
    folder, start = given.pop("folder"), SMALL if given.pop("small") else Size()
    chosen = {name: value for name, value in given.items() if value is not None}
    size = dataclasses.replace(start, **chosen)
    base = train_base(size, read_corpus(size.clients, size.least))
    save_base(folder, base)
    shown = {key: base.figures[key] for key in ("weights", "seconds", "held_out")}
    print(json.dumps(shown))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
