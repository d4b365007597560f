# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""One coding for all texts: posts by user and articles, from files and by hand."""

import lzma

import numpy as np
import pytest

from fedblend.data.dataset import DataError, MissingDataError
from fedblend.data.datasets import DATASETS, load
from fedblend.errors import UserError
from fedblend_reproductions.datasets.characters import (
    CHARACTERS,
    OTHER,
    PADDING,
    spelled,
    written,
)


def text_of(row):
    return "".join(CHARACTERS[number] for number in row)


def whole(inputs, targets):
    """The text that windows were cut from."""
    return text_of(inputs[0, :1]) + text_of(targets[targets != PADDING])


def test_what_cannot_be_written_becomes_the_stand_in():
    assert spelled("na\u00efve \u2014\u00a0\u201c5 \u20ac\u201d\n\t @") == (
        f'naive - "5 {OTHER}" {OTHER}'
    )
    assert spelled(CHARACTERS[1:]) == CHARACTERS[1:]
    assert list(CHARACTERS) == sorted(CHARACTERS)


def test_articles_are_as_they_were_written():
    tokens = (
        " \n = Lobsters = \n \n = = Life cycle = = \n \n"
        " They 're "
        '" red " ( a <unk> ) ; 1 @,@ 000 hard @-@ shelled ones , e.g. ? \n'
    )
    assert spelled(written(tokens)).strip() == (
        'Lobsters Life cycle They\'re "red" (a }); 1,000 hard-shelled ones, e.g.?'
    )


def test_wikitext(needs):
    needs("wikitext-2")
    dataset = load("wikitext-2")
    info = DATASETS["wikitext-2"]
    assert dataset.test_rows is not None
    assert dataset.rows[0].shape == dataset.rows[1].shape == (info.size.rows, 80)
    assert dataset.test_rows[0].shape == (info.size.test_rows, 80)
    assert whole(*dataset.rows).startswith("Homarus gammarus Homarus gammarus, known")
    assert whole(*dataset.test_rows).startswith("Robert } Robert } is an English film")
    assert dataset.kind == "sequence" and dataset.outputs == len(CHARACTERS)
    counts = np.bincount(dataset.rows[1][dataset.rows[1] >= 0], minlength=80)
    assert counts[CHARACTERS.index(OTHER)] / counts.sum() < 0.02
    assert CHARACTERS[counts.argmax()] == " "


def test_a_small_article(tmp_path):
    tokens = b" \n = A = \n \n To be , or not . \n"
    paths = [tmp_path / "one.xz", tmp_path / "two"]
    paths[0].write_bytes(lzma.compress(tokens))
    paths[1].write_bytes(tokens)
    files = {"file": str(paths[0]), "test_file": str(paths[1])}
    dataset = load("wikitext-2", length=7, **files)
    assert dataset.test_rows is not None
    assert whole(*dataset.rows) == whole(*dataset.test_rows) == "A To be, or not."
    for content in (b"", b"\xff\xfe", b" \n"):
        paths[1].write_bytes(content)
        with pytest.raises(DataError, match=f"{paths[1]}: ") as error:
            load("wikitext-2", **files)
        assert "\n" not in str(error.value)
    paths[0].write_bytes(lzma.compress(tokens)[:-5])
    with pytest.raises(DataError, match="is not a text"):
        load("wikitext-2", **files)
    with pytest.raises(UserError, match="length: 0 is not a whole number of at"):
        load("wikitext-2", length=0)


def test_missing_articles_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDBLEND_DATA", str(tmp_path))
    with pytest.raises(MissingDataError, match=r"^wikitext-2: .* is not in ") as error:
        load("wikitext-2")
    assert "\n" not in str(error.value)
    with pytest.raises(MissingDataError, match="nowhere: no such file"):
        load("wikitext-2", file=str(tmp_path / "nowhere"))


def test_posts_as_text(needs):
    needs("stackexchange")
    dataset = load("stackexchange_text")
    info = DATASETS["stackexchange_text"]
    assert dataset.rows[0].shape == dataset.rows[1].shape == (info.size.rows, 80)
    assert dataset.keys is not None
    assert len(np.unique(dataset.keys)) == info.size.clients


def test_a_small_file_of_text(tmp_path):
    path = tmp_path / "Posts.xml"
    body = "&lt;p&gt;Let $x$ be $$y^2$$, or &lt;i&gt;5$&lt;/i&gt;&lt;/p&gt;"
    path.write_text(
        f"""<posts>
        <row Id="1" PostTypeId="1" OwnerUserId="7" Title="A gate?" Body="{body}" />
        <row Id="2" PostTypeId="2" OwnerUserId="7" Body="&lt;pre&gt;1&lt;/pre&gt;No"/>
        <row Id="3" PostTypeId="2" OwnerUserId="8" Body="short" />
        <row Id="4" PostTypeId="5" OwnerUserId="7" Body="a page of the site" />
        </posts>"""
    )
    dataset = load("stackexchange_text", length=6, minimum=10, file=str(path))
    assert dataset.keys is not None
    assert set(dataset.keys) == {"7"}
    assert whole(*dataset.rows) == "A gate? Let } be }, or 5} No"
    with pytest.raises(DataError, match="no user has 99 characters"):
        load("stackexchange_text", minimum=99, file=str(path))
