# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Mixed FL (2022): its claims, in the order of the ledger."""

from fedblend_reproductions.claims import Claim
from fedblend_reproductions.mixed import characters, faces, recommendation
from fedblend_reproductions.mixed.adam import M10
from fedblend_reproductions.mixed.blend import T1
from fedblend_reproductions.mixed.central_batches import M7
from fedblend_reproductions.mixed.characters import M4
from fedblend_reproductions.mixed.clipping import M12
from fedblend_reproductions.mixed.disagreement import M6
from fedblend_reproductions.mixed.divergence import M9
from fedblend_reproductions.mixed.faces import M3
from fedblend_reproductions.mixed.fixed_points import M1
from fedblend_reproductions.mixed.gradient_recovery import M2
from fedblend_reproductions.mixed.recommendation import M5
from fedblend_reproductions.mixed.sequential_training import M11
from fedblend_reproductions.mixed.steps_and_rates import M8

TITLE = "What Mixed FL claims, measured"

CLAIMS: tuple[Claim, ...] = (M1, M2, M3, M4, M5, M6, M7, M8, M9, M10, M11, M12, T1)

PAPER_SIZED: tuple[Claim, ...] = (
    faces.PAPER_SIZED,
    characters.PAPER_SIZED,
    recommendation.PAPER_SIZED,
)
"""Claims on real data with the paper's sizes of a round and of networks, for a GPU."""
