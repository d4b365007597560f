# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The base: what it never sees, what it reaches on a tiny text, and its files."""

import json

import numpy as np
import pytest

import fedblend as fb
from fedblend_reproductions.text.base import (
    FIGURES,
    TOKENIZER,
    Size,
    load_base,
    quality,
)
from fedblend_reproductions.text.base import save_base as save
from fedblend_reproductions.text.base import train_base as train
from fedblend_reproductions.text.corpus import Corpus, clients_of, read_corpus
from fedblend_reproductions.text.corpus import windows_of as windows

TINY = Size(264, 8, 8, 1, 2, 1, batch=8, steps=60, rate=0.02)


def test_held_out_clients_are_spread_over_their_names():
    texts = {f"{n:02}": "x" * n for n in range(20)}
    found = clients_of(texts, 3, 10)
    assert list(found) == ["10", "14", "19"]
    assert all(found[name] == texts[name] for name in found)
    assert list(clients_of(texts, 99, 18)) == ["18", "19"]


def test_a_base_learns_and_comes_back(tmp_path):
    pytest.importorskip("tokenizers")
    said = "to be or not to be. "
    corpus = Corpus([said * 40], {"user": said * 3}, {"role": said * 2}, said * 4)
    base = train(TINY, corpus, lambda line: None)
    held_out = base.figures["held_out"]
    assert set(held_out) == {"articles", "users", "roles"}
    # A text that repeats itself is soon known; at the start it is one of 264 tokens.
    assert held_out["users"]["perplexity"] < 20
    save(tmp_path / "base", base)
    assert json.loads((tmp_path / "base" / FIGURES).read_text()) == base.figures
    model, params = load_base(tmp_path / "base")
    tokenizer = fb.data.load_tokenizer(tmp_path / "base" / TOKENIZER)
    again = quality(model, params, windows([said * 3], tokenizer, TINY.length))
    assert np.isclose(again["perplexity"], held_out["users"]["perplexity"])


def test_the_base_sees_nothing_of_its_clients(data_home):
    corpus = read_corpus(number=5, least=4000)
    assert len(corpus.users) == len(corpus.roles) == 5
    seen = set(corpus.base)
    held = [*corpus.users.values(), *corpus.roles.values(), corpus.articles]
    assert not seen & set(held)
    assert all(len(text) >= 4000 for text in held)
