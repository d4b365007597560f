# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Byte pairs: every text comes back; rows of tokens say the same as rows of letters."""

import numpy as np
import pytest

from fedblend.data.dataset import DataError
from fedblend.errors import UserError
from fedblend_adapters.tokenizer import (
    PADDING,
    cut,
    load_tokenizer,
    read_texts,
    train_tokenizer,
)

pytest.importorskip("tokenizers")
TEXTS = ["the cat sat on the mat", "the dog ate the cat's hat", "that is that"] * 3


def test_every_text_comes_back():
    tokenizer = train_tokenizer(TEXTS, 280)
    assert 256 < tokenizer.size <= 280
    for text in (*TEXTS, "na\u00efve \u4f60\u597d\n\t", "}{ <unk>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0])  # pairs are used


def test_the_most_frequent_pair_is_the_first_token():
    """By hand: of the neighbors inside of words, t-h stands 13 times, a-t 12 times."""
    texts = ["that"] * 12 + ["th"]
    first = train_tokenizer(texts, 257)
    assert first.decode([256]) == "th"
    again = train_tokenizer(texts, 258)
    assert again.decode([256]) == "th" and again.size == 258


def test_the_same_texts_have_the_same_tokens(tmp_path):
    one, other = (train_tokenizer(TEXTS, 270) for _ in range(2))
    one.save(tmp_path / "tokenizer.json")
    kept = load_tokenizer(tmp_path / "tokenizer.json")
    numbers = one.encode("the mat that sat")
    assert numbers.dtype == np.int32
    for tokenizer in (other, kept):
        np.testing.assert_array_equal(tokenizer.encode("the mat that sat"), numbers)


def test_windows_follow_each_other():
    numbers = np.arange(10, 47)
    for length in (1, 5, 36, 37, 50):
        inputs, targets = cut(numbers, length)
        known = targets != PADDING
        np.testing.assert_array_equal(inputs[known], numbers[:-1])
        np.testing.assert_array_equal(targets[known], numbers[1:])
        assert known[:, 0].all()  # no window is all padding
    assert cut(np.array([3]), 4)[0].shape == (0, 4)


def test_texts_of_writers_are_rows_of_theirs():
    tokenizer = train_tokenizer(TEXTS, 270)
    texts = {"a": TEXTS[0], "nobody": "", "b": TEXTS[1]}
    found = read_texts(texts, tokenizer, length=4)
    assert found.keys is not None and set(found.keys) == {"a", "b"}
    inputs, targets = (part[found.keys == "b"] for part in found.rows)
    np.testing.assert_array_equal(
        [inputs[0, 0], *targets[targets != PADDING]], tokenizer.encode(TEXTS[1])
    )
    with pytest.raises(DataError, match="text: no text has two tokens"):
        read_texts({"nobody": ""}, tokenizer, length=4)


def test_errors_are_one_line(tmp_path):
    with pytest.raises(UserError, match="train_tokenizer: size: 255 is not a whole"):
        train_tokenizer(TEXTS, 255)
    with pytest.raises(DataError, match="no such file"):
        load_tokenizer(tmp_path / "tokenizer.json")
    for damaged in (b"", b"{}", b'{"model": 3}', b"\x80\x04."):
        (tmp_path / "tokenizer.json").write_bytes(damaged)
        with pytest.raises(DataError, match=r"is not a tokenizer\.json") as caught:
            load_tokenizer(tmp_path / "tokenizer.json")
        assert "\n" not in str(caught.value)
