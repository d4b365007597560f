# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""From texts to numbers of tokens, and from these to rows of a sequence task.

``train_tokenizer`` learns byte pairs with the library ``tokenizers``: bytes at first,
then the pair of neighbors that is most frequent becomes a token, again and again. Every
text has tokens, as every text has bytes. Its file, ``tokenizer.json``, is the one that
``transformers`` and hubs use: ``load_tokenizer`` reads that of GPT-2 or Llama as well.

Reference:
    Sennrich, Haddow, Birch. Neural machine translation of rare words with subword
    units. ACL 2016. https://arxiv.org/abs/1508.07909
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.checks import COUNT, Instance, Number, gate
from fedblend.data.dataset import DataError, Dataset, Rows

PADDING = -1
"""The target at places behind the end of a text, which the loss leaves out."""
BYTES = 256


class Tokenizer:
    """Tokens of the library ``tokenizers``; see ``train_tokenizer``."""

    def __init__(self, inner: Any):
        self._inner = inner

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self._inner.get_vocab_size()

    def encode(self, text: str) -> np.ndarray:
        """The numbers of a text's tokens, int32; marks of begin and end are not set."""
        found = self._inner.encode(text, add_special_tokens=False)
        return np.asarray(found.ids, np.int32)

    def decode(self, numbers: Sequence[int] | np.ndarray) -> str:
        """The text of these tokens."""
        return self._inner.decode([int(number) for number in numbers])

    def save(self, file: str | Path) -> None:
        """Write ``tokenizer.json``."""
        Path(file).write_text(self._inner.to_str(pretty=True), encoding="utf-8")


@gate(size=Number(least=BYTES, whole=True))
def train_tokenizer(texts: Iterable[str], size: int = 2048) -> Tokenizer:
    """Learn byte pairs from texts.

    Args:
        texts: from which pairs are counted. Train it on public texts: the tokens tell
            which words are frequent.
        size: number of tokens, at least 256; fewer where the texts have no more pairs.
    """
    import tokenizers

    pieces = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer, inner.decoder = pieces, tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pieces.alphabet(), show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    return Tokenizer(inner)


def load_tokenizer(file: str | Path) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json``."""
    import tokenizers

    path = Path(file)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(str(path)))
    except Exception:  # the library raises nothing narrower
        raise DataError(f"{path}: is not a tokenizer.json") from None


@gate(tokenizer=Instance(Tokenizer, "a Tokenizer"), length=COUNT)
def read_texts(
    texts: Mapping[str, str], tokenizer: Tokenizer, *, length: int, name: str = "text"
) -> Dataset:
    """The windows of several writers' texts; keys are writers.

    Args:
        texts: one by writer; texts of fewer than two tokens have no window.
        tokenizer: whose tokens the rows have.
        length: number of tokens of a window.
        name: of the dataset.
    """
    pieces = {
        writer: cut(tokenizer.encode(text), length) for writer, text in texts.items()
    }
    counts = [len(inputs) for inputs, _ in pieces.values()]
    if not sum(counts):
        raise DataError(f"{name}: no text has two tokens")
    inputs, targets = map(np.concatenate, zip(*pieces.values(), strict=True))
    keys = np.repeat(list(pieces), counts)
    return Dataset((inputs, targets), "sequence", tokenizer.size, keys=keys, name=name)


def cut(numbers: np.ndarray, length: int) -> Rows:
    """The tokens of a text as inputs and targets, both [windows, length].

    The targets are the inputs shifted by one place. Windows do not overlap; token 0
    fills the last one, with ``PADDING`` as its targets.

    >>> inputs, targets = cut(np.arange(5), 3)
    >>> inputs.tolist(), targets.tolist()
    ([[0, 1, 2], [3, 0, 0]], [[1, 2, 3], [4, -1, -1]])
    """
    known = max(len(numbers) - 1, 0)
    rows = -(-known // length)
    inputs = np.zeros(rows * length, np.int32)
    targets = np.full(rows * length, PADDING, np.int32)
    inputs[:known], targets[:known] = numbers[:known], numbers[1:]
    return inputs.reshape(rows, length), targets.reshape(rows, length)
