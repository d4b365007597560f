# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Compressors of messages, each with what theory knows of it."""

from fedblend.compress.compressor import Compressor, Encoded, decode, encode
from fedblend.compress.quantize import dithering, int8, natural, sign
from fedblend.compress.sparse import identity, perm_k, rand_k, top_k

__all__ = [
    "Compressor",
    "Encoded",
    "decode",
    "dithering",
    "encode",
    "identity",
    "int8",
    "natural",
    "perm_k",
    "rand_k",
    "sign",
    "top_k",
]
