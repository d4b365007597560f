# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Both claims at small sizes: every method runs, the page says what they reached."""

import json

import numpy as np
import pytest

from fedblend_reproductions import page
from fedblend_reproductions.adapters import CLAIMS, TITLE
from fedblend_reproductions.adapters.summary import PERSONAL
from fedblend_reproductions.claims import reproduce


@pytest.mark.slow
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_a_claim_at_small_sizes(claim, tmp_path, data_home):
    if claim.name == "L1":
        pytest.importorskip("tokenizers")
    (entry,) = reproduce([claim], tmp_path, quick=True)
    numbers = entry["numbers"]
    methods = {"base", "all weights", "shared adapter", "alone", *PERSONAL}
    assert set(numbers["score"]) == set(numbers["by_client"]) == methods
    assert np.isfinite(list(numbers["score"].values())).all()
    bits = numbers["bits"]
    assert bits["alone"] == [0, 0]
    # The factors alone travel, whatever else a client has.
    assert {tuple(bits[name]) for name in PERSONAL} == {tuple(bits["shared adapter"])}
    assert bits["shared adapter"][0] < bits["all weights"][0] / 4
    assert bits["all weights"][0] == 32 * numbers["weights"]
    text = page.page(TITLE, "made by", page.Part([claim], [entry], "adapters"))
    assert claim.headline(numbers) in text
    assert (tmp_path / entry["figures"][0]).exists()
    again = reproduce([claim], tmp_path, quick=True)[0]
    assert json.dumps(again["numbers"]) == json.dumps(numbers)
