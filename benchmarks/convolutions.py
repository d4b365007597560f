# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of one SGD step of many clients, each with convolutions of its own.

Networks: large_cnn on CIFAR-10's images (1,626,442 weights), the board's (5x5 to 32 and
64, hidden 512), LeNet (6-16-120-84), ResNet-18 with group normalization. Ways:
"patches" is ``fedblend.models.convolution``; "direct" is XLA's; "columns" makes copies
shifted across only, and sums a product for each row of the kernel, with a part of the
memory; "again" is "patches" whose copies are made once more in the backward pass and
not kept. ``chunk`` is the number of clients at once, the chunks in sequence; all if
None. 0 stands for the outputs of one model for many images.

Products: float32, tf32, default (JAX's; tf32 on a GPU that has it), bfloat16 (weights
and activations are rounded in the network; weights and steps stay float32). Images are
random.

The most important lines come first; no line begins after ``--seconds``. What does not
fit into memory is noted.

    PYTHONPATH=src python benchmarks/convolutions.py --seconds 170 --out found.json
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.models import convolution as convolutions
from fedblend.models import feedforward
from fedblend.models.feedforward import flatten, linear, pool
from fedblend.models.model import Model, join_halves
from fedblend_reproductions import resnet18 as resnet

PRODUCTS = {"float32": "highest", "tf32": "tensorfloat32"}


class Case(NamedTuple):
    """What is timed; ``chunk`` of 0 is the shared model, on ``batch`` images."""

    network: str
    way: str = "patches"
    products: str = "tf32"
    clients: int = 50
    batch: int = 10
    chunk: int | None = None


WAYS = ("patches", "direct", "columns", "again")
CASES = (
    *(Case("large_cnn", way) for way in WAYS),
    *(Case("large_cnn", products=kind) for kind in ("bfloat16", "float32", "default")),
    Case("large_cnn", "direct", chunk=1),
    Case("large_cnn", chunk=10),
    *(Case("board", way, clients=60) for way in WAYS),
    *(Case("board", products=kind, clients=60) for kind in ("bfloat16", "float32")),
    Case("board", "direct", clients=60, chunk=1),
    Case("board", clients=60, chunk=20),
    *(Case("lenet", way, clients=100, batch=50) for way in WAYS),
    Case("lenet", products="bfloat16", clients=100, batch=50),
    *(
        Case(name, way, batch=1000, chunk=0)
        for name in ("large_cnn", "board")
        for way in WAYS[:2]
    ),
    *(
        Case("resnet18", way, clients=10, batch=50)
        for way in ("again", "direct", "columns")
    ),
    *(
        Case("resnet18", way, "bfloat16", clients=10, batch=50)
        for way in ("again", "direct")
    ),
    Case("resnet18", "direct", clients=10, batch=50, chunk=1),
    Case("resnet18", "direct", "bfloat16", clients=10, batch=50, chunk=1),
    *(Case("large_cnn", way, "bfloat16") for way in ("columns", "direct", "again")),
)
"""In order of importance."""


def lenet(shape: tuple[int, int, int]) -> Model:
    """5x5 to 6, pool, 5x5 to 16, pool, 120, 84, 10."""
    draw = jax.nn.initializers.he_normal()

    def init(key):
        keys = jax.random.split(key, 5)
        sizes = (16 * ((shape[0] - 12) // 4) ** 2, 120, 84, 10)
        return (
            feedforward.kernel(draw, keys[0], (5, 5, shape[2], 6), jnp.float32),
            feedforward.kernel(draw, keys[1], (5, 5, 6, 16), jnp.float32),
            *(
                feedforward.affine(draw, key, before, after, jnp.float32)
                for key, before, after in zip(keys[2:], sizes, sizes[1:], strict=False)
            ),
        )

    def features(params, here):
        for layer in params[:2]:
            here = jax.nn.relu(pool(feedforward.convolve(layer, here)))
        here = flatten(here, here.dtype)
        for layer in params[2:4]:
            here = jax.nn.relu(linear(layer, here))
        return here

    return join_halves(init, features, lambda params, rows: linear(params[4], rows))


def board() -> Model:
    """5x5 to 32, pool, 5x5 to 64, pool, 512, 10, for 28x28."""
    plan = feedforward._Plan("board", 5, (32, 64), (True, True), 512)
    return feedforward._network(plan, (28, 28, 1), 10, False, 0.0, jnp.float32)


NETWORKS = {
    "large_cnn": ((32, 32, 3), lambda: feedforward.large_cnn((32, 32, 3), 10)),
    "board": ((28, 28, 1), board),
    "lenet": ((32, 32, 3), lambda: lenet((32, 32, 3))),
    "resnet18": ((32, 32, 3), lambda: resnet.resnet18((32, 32, 3), 10)),
}


original = convolutions.convolution


def direct(images, weight, *, stride=1, padding="VALID"):
    """XLA's convolution."""
    axes = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        images, weight, (stride, stride), padding, dimension_numbers=axes
    )


def columns(images, weight, *, stride=1, padding: convolutions.Padding = "VALID"):
    """Copies shifted across, and a product for each row of the kernel."""
    high, wide, channels, outputs = weight.shape
    edges = [
        convolutions._edges(*one, stride, padding)
        for one in zip(images.shape[1:3], (high, wide), strict=True)
    ]
    images = jnp.pad(images, ((0, 0), *edges, (0, 0)))
    windows = convolutions._windows(images.shape[2], wide, stride)
    joined = jnp.concatenate([images[:, :, across] for across in windows], axis=-1)
    flat = weight.reshape(high, wide * channels, outputs)
    rows = convolutions._windows(images.shape[1], high, stride)
    products = (joined[:, down] @ part for down, part in zip(rows, flat, strict=True))
    return sum(products, jnp.zeros(()))


def again(images, weight, **settings):
    """Copies that are made once more in the backward pass."""
    return jax.checkpoint(partial(original, **settings))(images, weight)


WRITTEN = {"patches": original, "direct": direct, "columns": columns, "again": again}


def measure(case: Case, repeats: int) -> dict:
    """The least time of a step, after compiling."""
    feedforward.convolution = WRITTEN[case.way]
    resnet.same = partial(WRITTEN[case.way], padding="SAME")
    shape, make = NETWORKS[case.network]
    model = make()
    draws = np.random.default_rng(0)
    start = model.init(jax.random.key(0))
    low = case.products == "bfloat16"

    def apply(params, images):
        if low:
            params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        return model.apply(params, images).astype(jnp.float32)

    def loss(params, images, labels):
        rows = jax.nn.log_softmax(apply(params, images))
        return -jnp.take_along_axis(rows, labels[:, None], 1).mean()

    def step(params, images, labels):
        slopes = jax.grad(loss)(params, images, labels)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, slopes)

    clients = 1 if case.chunk == 0 else case.clients
    images = jnp.asarray(draws.random((clients, case.batch, *shape), np.float32))
    labels = jnp.asarray(draws.integers(0, 10, (clients, case.batch)))
    params = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (clients, *leaf.shape)) + 0, start
    )
    chunk, steps = case.chunk or clients, 5 if case.chunk != 0 else 1
    every = step if chunk == 1 else jax.vmap(step)

    def all_clients(params, images, labels):
        if chunk == clients:
            return every(params, images, labels)
        lead = (-1,) if chunk == 1 else (clients // chunk, chunk)
        apart = jax.tree.map(
            lambda leaf: leaf.reshape(*lead, *leaf.shape[1:]),
            (params, images, labels),
        )
        moved = jax.lax.map(lambda group: every(*group), apart)
        return jax.tree.map(lambda a, b: a.reshape(b.shape), moved, params)

    def one_turn(params, images, labels):
        if case.chunk == 0:
            return apply(jax.tree.map(lambda leaf: leaf[0], params), images[0])
        return jax.lax.fori_loop(
            0, steps, lambda _, here: all_clients(here, images, labels), params
        )

    begun = time.perf_counter()
    with jax.default_matmul_precision(PRODUCTS.get(case.products, "default")):
        compiled = jax.jit(one_turn).lower(params, images, labels).compile()
    compile_s = time.perf_counter() - begun
    seconds = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        jax.block_until_ready(compiled(params, images, labels))
        seconds.append(time.perf_counter() - begun)
    least = min(seconds[1:]) / steps
    memory = compiled.memory_analysis()
    return {
        "ms": round(1e3 * least, 4),
        "us_per_image": round(1e6 * least / (clients * case.batch), 3),
        "temporary_MB": round(getattr(memory, "temp_size_in_bytes", 0) / 1e6),
        "compile_s": round(compile_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=170)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--clients", type=int, help="in place of each line's own")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    begun, lines = time.perf_counter(), []
    head = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    print(json.dumps(head))
    for case in CASES:
        if case.network not in given.networks.split(","):
            continue
        if time.perf_counter() - begun > given.seconds:
            break
        if given.clients and (case.chunk or 1) <= given.clients:
            case = case._replace(clients=given.clients)
        try:
            found = measure(case, given.repeats)
        except Exception as error:  # most likely memory; the next line may fit
            found = {"failed": str(error).split("\n")[0][:200]}
        lines.append({**case._asdict(), **found})
        print(json.dumps(lines[-1]), flush=True)
        if given.out:
            given.out.write_text(json.dumps({**head, "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
