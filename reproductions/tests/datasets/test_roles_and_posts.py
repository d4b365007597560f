# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Text by role and by user, against published counts and small files by hand."""

import json
import lzma

import numpy as np
import pytest

from fedblend.data.dataset import DataError, MissingDataError
from fedblend.data.datasets import load
from fedblend.data.partition import by_key, federate_dataset
from fedblend.errors import UserError
from fedblend_adapters.tokenizer import train_tokenizer
from fedblend_reproductions.datasets.characters import CHARACTERS, PADDING, windows
from fedblend_reproductions.datasets.stackexchange import plain


def text_of(row):
    return "".join(CHARACTERS[number] for number in row)


def test_shakespeare_has_leafs_counts(needs):
    """LEAF's paper: 1129 users, and a sample at all but 80 places of each text."""
    needs("shakespeare")
    dataset = load("shakespeare")
    inputs, targets = dataset.rows
    assert inputs.shape == targets.shape == (54500, 80)
    assert dataset.keys is not None
    partition = by_key(dataset.keys)
    assert len(partition) == 1129
    characters = (targets >= 0).sum() + 1129  # the first of a text is no target
    assert characters - 80 * 1129 == 4_226_158
    assert len(np.unique(targets[targets >= 0])) == 79
    assert dataset.outputs == len(CHARACTERS) == len(set(CHARACTERS)) == 80
    federated_data = federate_dataset(dataset, partition, test=0.2)
    assert federated_data.test is not None
    assert federated_data.train.total + federated_data.test.total == 54500


def test_windows_follow_each_other():
    text = "The quality of mercy is not strained."
    for length in (1, 5, 36, 37, 50):
        inputs, targets = windows(text, length, "Portia")
        known = targets != PADDING
        assert inputs.shape[1] == length
        assert text_of(inputs[known]) == text[:-1]
        assert text_of(targets[known]) == text[1:]
        assert not known.ravel()[len(text) - 1 :].any()
        assert known[:, 0].all()  # no window is all padding


@pytest.fixture
def roles(tmp_path):
    """Three roles: two lines with many blanks, one short line, one word."""
    path = tmp_path / "roles.json.xz"
    text = {
        "A_FOOL": {"play": "A", "lines": ["O,  well   said!", "Go on."]},
        "A_KING": {"play": "A", "lines": ["Peace, fool."]},
        "B_PAGE": {"play": "B", "lines": ["Ay"]},
    }
    path.write_bytes(lzma.compress(json.dumps(text).encode()))
    return path


def test_a_small_file_of_roles(roles):
    dataset = load("shakespeare", length=6, minimum=4, file=str(roles))
    inputs, targets = dataset.rows
    assert dataset.keys is not None
    assert dataset.keys.tolist() == ["A_FOOL"] * 4 + ["A_KING"] * 2
    whole = "O, well said! Go on. "
    assert text_of(inputs[:4].ravel()[: len(whole) - 1]) == whole[:-1]
    assert text_of(targets[0]) == whole[1:7]
    assert targets[3].tolist() == [CHARACTERS.index("."), CHARACTERS.index(" ")] + 4 * [
        PADDING
    ]
    with pytest.raises(DataError, match="no role has 99 characters"):
        load("shakespeare", minimum=99, file=str(roles))
    for wrong in ({"length": 0}, {"minimum": 1}):
        with pytest.raises(UserError, match="is not a whole number of at least"):
            load("shakespeare", file=str(roles), **wrong)


def test_a_dataset_in_tokens_says_what_it_says_in_characters(tmp_path):
    texts = ["the cat sat on the mat", "that is that"]
    roles = {"A": {"lines": ["Ho, the cat!", "The hat."]}, "B": {"lines": texts}}
    file, tokens = tmp_path / "roles.json.xz", tmp_path / "tokenizer.json"
    file.write_bytes(lzma.compress(json.dumps(roles).encode()))
    tokenizer = train_tokenizer(texts, 270)
    tokenizer.save(tokens)
    options = {"length": 6, "minimum": 2, "file": str(file)}
    plain = load("shakespeare", **options)
    found = load("shakespeare", **options, tokenizer=str(tokens))
    assert found.outputs == tokenizer.size and found.keys is not None
    assert plain.keys is not None

    def said(dataset, role, text_of):
        inputs, targets = (part[dataset.keys == role] for part in dataset.rows)
        return text_of([inputs[0, 0], *targets[targets != PADDING]])

    for role in "AB":
        letters = said(plain, role, lambda row: "".join(CHARACTERS[i] for i in row))
        assert said(found, role, tokenizer.decode) == letters


def test_broken_roles_are_one_line(tmp_path):
    path = tmp_path / "roles.json.xz"
    whole = lzma.compress(b'{"A": {"lines": ["one"]}}')
    broken = (b"", b"nonsense", whole[:-9], *map(lzma.compress, (b"[1]", b'{"A": 3}')))
    for content in broken:
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"is not an \.xz of roles") as error:
            load("shakespeare", file=str(path))
        assert "\n" not in str(error.value)
    path.write_bytes(lzma.compress('{"A": {"lines": ["caf\u00e9 au lait"]}}'.encode()))
    with pytest.raises(DataError, match="A: '\u00e9' is not in the vocabulary"):
        load("shakespeare", minimum=2, file=str(path))


def test_stackexchange(needs):
    needs("stackexchange")
    dataset = load("stackexchange")
    bags, tags = dataset.rows
    assert bags.shape == (1664, 2000)
    assert tags.shape == (1664, 100)
    assert dataset.keys is not None
    assert len(np.unique(dataset.keys)) == 331 and dataset.keys.min() > 0
    assert dataset.label_names[:2] == ("quantum-computer", "quantum-algorithms")
    assert (tags.sum(axis=1) >= 1).all() and tags.sum(axis=1).max() <= 5
    assert 0.85 < bags.sum(axis=1).mean() < 1 and bags.sum(axis=1).max() <= 1 + 1e-5
    questions = load("stackexchange", answers=False, tags=154)
    assert len(questions.rows[0]) == 611  # of 612; one has no user
    active = load("stackexchange", minimum=5)
    assert active.keys is not None
    assert len(by_key(active.keys)) == 58
    with pytest.raises(DataError, match=r"tags: 155 is more than the 154 that"):
        load("stackexchange", tags=155)


POSTS = """<?xml version="1.0" encoding="utf-8"?>
<posts>
  <row Id="1" PostTypeId="1" OwnerUserId="7" Title="A gate?"
    Tags="&lt;gate&gt;&lt;q#&gt;"
    Body="&lt;p&gt;Which &lt;b&gt;Gate&lt;/b&gt;&lt;/p&gt;&lt;pre&gt;x=1&lt;/pre&gt;" />
  <row Id="2" PostTypeId="2" ParentId="1" OwnerUserId="8"
    Body="&lt;p&gt;gate&lt;/p&gt;" />
  <row Id="3" PostTypeId="2" ParentId="1" Body="by somebody who is gone" />
  <row Id="4" PostTypeId="5" OwnerUserId="-1" Body="a tag's own page" />
  <row Id="5" PostTypeId="1" OwnerUserId="8" Title="rare" Tags="|rare|" Body="" />
  <row Id="6" PostTypeId="1" OwnerUserId="9" Tags="&lt;gate&gt;" Body="a gate" />
</posts>
"""


@pytest.fixture
def posts(tmp_path):
    path = tmp_path / "Posts.xml"
    path.write_text(POSTS)
    return path


def test_a_small_file_of_posts(posts):
    dataset = load("stackexchange", words=3, tags=2, file=str(posts))
    assert dataset.columns == ("gate", "a", "rare")
    assert dataset.label_names == ("gate", "q#")
    assert dataset.keys is not None
    assert dataset.keys.tolist() == [7, 8, 9]
    # "a gate which gate": half of it is "gate"; the answer is nothing else.
    np.testing.assert_allclose(
        dataset.rows[0], [[0.5, 0.25, 0], [1, 0, 0], [0.5, 0.5, 0]]
    )
    assert dataset.rows[1].tolist() == [[1, 1], [1, 1], [1, 0]]
    asked = load("stackexchange", words=1, tags=3, answers=False, file=str(posts))
    assert asked.rows[1].tolist() == [[1, 1, 0], [0, 0, 1], [1, 0, 0]]
    packed = posts.with_name("Posts.xml.xz")
    packed.write_bytes(lzma.compress(POSTS.encode()))
    again = load("stackexchange", words=3, tags=2, file=str(packed))
    np.testing.assert_array_equal(again.rows[0], dataset.rows[0])


def test_broken_posts_are_one_line(posts):
    for content in ("", POSTS[:300], POSTS.replace("<posts>", "")):
        posts.write_text(content)
        with pytest.raises(DataError, match=r"is not a complete Posts\.xml") as error:
            load("stackexchange", file=str(posts))
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="words: 0 is not a whole number of at"):
        load("stackexchange", words=0, file=str(posts))


def test_entities_outside_of_the_file_are_not_read(posts, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    entity = f'<!DOCTYPE posts [<!ENTITY x SYSTEM "{secret.as_uri()}">]>\n<posts>&x;'
    posts.write_text(POSTS.replace("<posts>", entity))
    with pytest.raises(DataError, match="is not a complete"):
        load("stackexchange", file=str(posts))


def test_html_is_stripped():
    html = "<p>One<br>two</p><p>three &lt;4 <a href='x'>fi</a>ve</p><pre>code</pre>six"
    assert plain(html).split() == ["One", "two", "three", "<4", "five", "six"]
    assert plain("open <pre> to the end") == "open "
    assert plain("a </pre> b") == "a   b"


@pytest.mark.parametrize("name", ["shakespeare", "stackexchange"])
def test_missing_files_are_one_line(name, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDBLEND_DATA", str(tmp_path))
    with pytest.raises(MissingDataError, match=f"^{name}: .* is not in ") as error:
        load(name)
    assert "\n" not in str(error.value)
    with pytest.raises(MissingDataError, match="nowhere: no such file"):
        load(name, file=str(tmp_path / "nowhere"))
