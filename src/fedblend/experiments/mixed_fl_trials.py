# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The choice among the ways of Mixed FL, from how each did.

A way is as good as the best one if it ends above it by no more than two standard errors
over seeds and a twentieth of what training gained, or by nothing worth mentioning; of
those the cheapest is taken: parallel training sends least, one-way transfer computes
least at the server.
"""

from typing import NamedTuple

import numpy as np

from fedblend.config.schema.table import ConfigError
from fedblend.theory.mixed_fl import Noise

WAYS = ("parallel", "one_way", "two_way")
"""The ways, the cheapest first."""
DOUBT = 0.05
"""The part of what training gained that chance may hide."""
NOTHING = 1e-4
"""The part of what training gained that is not worth mentioning."""


class Trial(NamedTuple):
    """How a way did: the mixture's loss of each seed, its parts, and its price."""

    start: np.ndarray
    loss: np.ndarray
    federated: float
    central: float
    bits_down: float
    factor: float = 1.0
    """Of the rate, the best one tried."""
    failed: str = ""
    """Why there is no loss."""


def choice(
    trials: dict[str, Trial], worst: list[float], noise: Noise
) -> tuple[str, str]:
    """The way to use, and why in a sentence.

    Args:
        trials: by way.
        worst: G^2 and B^2, the largest on the way.
        noise: of the gradients.
    """
    known = {how: one for how, one in trials.items() if not one.failed}
    if not known:
        why = "; ".join(f"{how}: {one.failed}" for how, one in trials.items())
        raise ConfigError(f"central: no way works; {why}")
    best = min(known, key=lambda how: known[how].loss.mean())
    gained = float((known[best].start - known[best].loss).mean())

    def alike(how: str) -> bool:
        gap = known[how].loss - known[best].loss
        doubt = 2 * gap.std(ddof=1) / np.sqrt(len(gap))
        allowed = max(min(doubt, DOUBT * gained), NOTHING * gained)
        return bool(gap.mean() <= allowed)

    how = next(way for way in WAYS if way in known and alike(way))
    said = {way: f"{way} ({one.loss.mean():.4g})" for way, one in known.items()}
    same = [said[way] for way in known if way != how and alike(way)]
    worse = [said[way] for way in known if not alike(way)]
    parts = [f"{said[how]} has the least mixed loss"]
    if same:
        parts = [
            f"{said[how]} cannot be told apart from {', '.join(same)} and is cheaper"
        ]
    if worse:
        parts.append(f"{', '.join(worse)} end{'s' if len(worse) == 1 else ''} higher")
    out = [way for way in trials if way not in known]
    if out:
        parts.append(f"{' and '.join(out)} {'is' if len(out) == 1 else 'are'} out")
    if "parallel" in known and not alike("parallel"):
        parts.append(
            f"the losses disagree (G^2 up to {worst[0]:.3g}, B^2 up to {worst[1]:.3g})"
        )
    if "one_way" in known and not alike("one_way") and noise.central > 0:
        parts.append(
            f"the server's gradients are noisy (sigma_c^2 {float(noise.central):.3g}, "
            f"sigma^2 {float(noise.clients):.3g}): try a larger central.batch_size"
        )
    return how, "; ".join(parts)
