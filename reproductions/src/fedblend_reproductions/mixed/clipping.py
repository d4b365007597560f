# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""M12: clients' answers clipped at the median of their norms, the server's gradients
at a fixed norm, on the language task under all three algorithms.
"""

from pathlib import Path
from typing import Any

import numpy as np

from fedblend_reproductions.claims import Claim, Finding, Numbers, Verdict
from fedblend_reproductions.mixed import earlier_verdicts, text
from fedblend_reproductions.mixed.clipping_runs import (
    BOUNDS,
    FULL,
    QUICK,
    Clipped,
    found,
)
from fedblend_reproductions.mixed.figures import confident, focus
from fedblend_reproductions.mixed.task import (
    ALGORITHMS,
)
from fedblend_reproductions.plots import legend_above, panels, shades

CRITERION = (
    "under each of the three algorithms clipping as the paper does (clients' answers "
    "at their median, the server's gradients at 0.2) has less test loss than none, and "
    "the median has no more than the best fixed norm of clients' answers, in the mean "
    "over the three algorithms; test loss is that of both sources in the last half of "
    "the rounds, each at its own best rate, and less and more are by two standard "
    "errors over pairs of seeds; partly if some"
)


def check(quick: bool, folder: Path) -> Finding:
    """Unclipped, as in the paper and at fixed norms, each at its own best rate."""
    size = QUICK if quick else FULL
    this = text.task(size.round)
    algorithms = ALGORITHMS[2:] if quick else ALGORITHMS
    ran = found(folder, this, size, algorithms)
    losses = {
        how: {name: float(one.loss.mean()) for name, one in of.items()}
        for how, of in ran.items()
    }
    fixed = {
        how: min((name for name in of if "fixed" in name), key=of.__getitem__)
        for how, of in losses.items()
    }
    gaps = {
        how: _mean_and_error(of["median"].loss - of["none"].loss)
        for how, of in ran.items()
    }
    beyond_fixed = _mean_and_error(
        np.mean([of["median"].loss - of[fixed[how]].loss for how, of in ran.items()], 0)
    )
    holds = {
        **{
            f"{how}: better than without clipping": mean < -2 * error
            for how, (mean, error) in gaps.items()
        },
        "no worse than the best fixed norm": beyond_fixed[0] <= 2 * beyond_fixed[1],
    }
    verdict = Verdict.partly if any(holds.values()) else Verdict.differs
    return Finding(
        verdict=Verdict.reproduced if all(holds.values()) else verdict,
        ours="Clipped as in the paper, test loss beside that without clipping: "
        + ", ".join(
            f"{how} {losses[how]['median']:.4f} beside {losses[how]['none']:.4f} "
            f"({mean:+.4f}, error {error:.4f})"
            for how, (mean, error) in gaps.items()
        )
        + "; beside the best fixed norm, in the mean over the algorithms, "
        f"{beyond_fixed[0]:+.4f} (error {beyond_fixed[1]:.4f}).",
        numbers={
            "rates": {
                how: {name: one.rate for name, one in of.items()}
                for how, of in ran.items()
            },
            "rates_tried": size.round.rates,
            "tried": {
                how: {name: one.tried for name, one in of.items()}
                for how, of in ran.items()
            },
            "rounds": ran[algorithms[0]]["none"].curves.rounds,
            "curves": {
                how: {name: one.curves.values for name, one in of.items()}
                for how, of in ran.items()
            },
            "losses": losses,
            "median_beyond_none": gaps,
            "best_fixed": fixed,
            "median_beyond_best_fixed": beyond_fixed,
            "holds": holds,
        },
        figures={"clipping": _figure(ran)},
        why=f"Criterion: {CRITERION}: "
        + "; ".join(f"{name}: {'yes' if so else 'no'}" for name, so in holds.items())
        + ". The paper says in one sentence that clipping helped, and gives no "
        "figures. Its 0.2 is taken to be of gradients with their weight w_c. Every "
        "bound tries the paper's rates "
        + ", ".join(f"{rate / text.WEIGHTS[0]:g}" for rate in size.round.rates)
        + f" for {size.trial_rounds} rounds with {size.tries} seeds on validation rows "
        f"of both sides; {size.round.seeds} other seeds, {size.round.rounds} rounds. "
        f"{_largest(fixed)}Under two_way clients send their mean gradient, as it "
        "cannot be recovered. "
        + text.described(this, size.round).replace("; nothing is clipped", "")
        + text.far_apart(
            {
                f"{how}, {name}": one.loss
                for how, of in ran.items()
                for name, one in of.items()
            },
            most=0.3,
        ),
        table=_table(ran),
        before={} if quick else earlier_verdicts.M12,
    )


def _largest(fixed: dict[str, str]) -> str:
    """Under which algorithms the best fixed norm is the largest that was tried."""
    last = list(BOUNDS)[-1]
    algorithms = [how for how, name in fixed.items() if name == last]
    if not algorithms:
        return ""
    return f"The best fixed norm is the largest tried under {', '.join(algorithms)}. "


def _mean_and_error(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def _table(ran: dict[str, dict[str, Clipped]]) -> list[list[str]]:
    head = ["test loss (rate of the paper)", *ran]
    return [
        head,
        *(
            [
                name,
                *(
                    f"{of[name].loss.mean():.4f} ({of[name].rate / text.WEIGHTS[0]:g})"
                    for of in ran.values()
                ),
            ]
            for name in BOUNDS
        ),
    ]


def _figure(ran: dict[str, dict[str, Clipped]]) -> Any:
    colors = dict(zip(BOUNDS, ["0.5", "C3", *shades(len(BOUNDS) - 2)], strict=True))
    with panels(1, len(ran), width=3.6, height=3.0) as (figure, axes):
        for column, (how, of) in enumerate(ran.items()):
            here = axes[0, column]
            here.set_title(how)
            here.set_xlabel("rounds")
            for name, one in of.items():
                losses = text.measured_on("both", one.curves.values, "loss")
                style = {"color": colors[name], "label": name}
                confident(here, one.curves.rounds[1:], losses[:, 1:], **style)
            focus(
                here,
                [
                    text.measured_on("both", one.curves.values, "loss")
                    for one in of.values()
                ],
            )
        axes[0, 0].set_ylabel("loss, posts and articles, test rows")
        legend_above(figure, axes[0, 0], 6)
    return figure


def headline(numbers: Numbers) -> str:
    """Under how many algorithms clipping helps by two standard errors."""
    found = numbers["median_beyond_none"].values()
    helped = sum(mean < -2 * error for mean, error in found)
    return f"Clipping helps {helped} of {len(found)} algorithms by two standard errors"


M12 = Claim(
    "M12",
    "Clipping at a quantile",
    "Clipping is beneficial for all three algorithms on the language task: adaptive "
    "for the clients' answers, by the method of Andrew et al. (2021) without noise, "
    "and fixed for the server's gradients (appendix B.3). Those authors find that the "
    "median does as well as the best fixed norm, which nobody knows beforehand.",
    check,
    headline,
    "3 of 3",
    resumable=True,
)
