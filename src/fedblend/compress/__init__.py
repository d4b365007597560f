# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Compressors of messages, each with what theory knows of it."""

from fedblend.compress.compressor import Compressor as Compressor
from fedblend.compress.compressor import Encoded as Encoded
from fedblend.compress.compressor import decode as decode
from fedblend.compress.compressor import encode as encode
from fedblend.compress.quantize import dithering as dithering
from fedblend.compress.quantize import int8 as int8
from fedblend.compress.quantize import natural as natural
from fedblend.compress.quantize import sign as sign
from fedblend.compress.sparse import identity as identity
from fedblend.compress.sparse import perm_k as perm_k
from fedblend.compress.sparse import rand_k as rand_k
from fedblend.compress.sparse import top_k as top_k
