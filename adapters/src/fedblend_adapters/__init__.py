# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Personal adapters and language models for fedblend.

``fb.adapt`` is this package. Its models and methods are registered by entry points:
they are ``fb.models.NAME`` and ``fb.algorithms.NAME``, and configurations name them.
"""

from fedblend_adapters.adapt import adapt as adapt
from fedblend_adapters.adapt import two_adapters as two_adapters
from fedblend_adapters.char_rnn import char_rnn as char_rnn
from fedblend_adapters.kinds import add_frozen as add_frozen
from fedblend_adapters.kinds import bias as bias
from fedblend_adapters.kinds import full as full
from fedblend_adapters.kinds import gated_lora as gated_lora
from fedblend_adapters.kinds import ia3 as ia3
from fedblend_adapters.kinds import lora as lora
from fedblend_adapters.kinds import prefix as prefix
from fedblend_adapters.peft import export_peft as export_peft
from fedblend_adapters.peft import import_peft as import_peft
from fedblend_adapters.tokenizer import Tokenizer as Tokenizer
from fedblend_adapters.tokenizer import load_tokenizer as load_tokenizer
from fedblend_adapters.tokenizer import read_texts as read_texts
from fedblend_adapters.tokenizer import train_tokenizer as train_tokenizer
from fedblend_adapters.transformer import text_classifier as text_classifier
from fedblend_adapters.transformer import transformer as transformer
from fedblend_adapters.transformer_layers import Prefixed as Prefixed
