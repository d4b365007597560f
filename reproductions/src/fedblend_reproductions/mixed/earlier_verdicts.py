# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What was found of claims when they had another criterion or another setting.

Pages show it beside what is found now; its numbers are in the history of
``docs/results``, up to commit f401a11.
"""

from fedblend_reproductions.claims import Verdict

ONE_SIDED = "all three algorithms at most 1 point below the oracle's accuracy"
"""What took the place of M4's criterion when claims were first run at the paper's
sizes."""
M4 = {
    "verdict": Verdict.partly,
    "ours": "After 600 rounds of 5 steps, 5 seeds, beyond the oracle on posts / "
    "articles, in points: parallel -1.3 / -0.7, one_way -1.0 / -0.5, two_way -0.5 / "
    "-0.5, clients alone -1.6 / -4.9. Parallel is not near, the others are, by the "
    "one-sided criterion as well.",
    "criterion": "within 1 point of the oracle, as now, but after 600 rounds, when "
    "nobody had come to the end.",
}
M4_PAPER_SIZED = {
    "verdict": Verdict.reproduced,
    "ours": "After 100 rounds of 16 steps with a GRU of 256, one seed, beyond the "
    "oracle on posts / articles, in points: parallel -0.7 / +1.3, one_way +0.3 / +1.4, "
    "two_way +0.5 / +2.2, clients alone +1.5 / -3.7. By the criterion of now, within 1 "
    "point, that run is partly reproduced: no algorithm is near, clients alone are "
    "below.",
    "criterion": f"{ONE_SIDED} on either source, where it had been within 1 point; it "
    "was changed in the commit that added this run, and the oracle was not trained to "
    "the end.",
}
M6 = {
    "verdict": Verdict.partly,
    "ours": "Faces alone: G^2 34.83, B^2 51.92 at most in rounds 10 to 100 of 5 runs.",
    "criterion": "as now, of faces alone, and without the order of the tasks.",
}
M8 = {
    "verdict": Verdict.partly,
    "ours": "Faces alone, at three times the paper's rate times steps, 5 seeds: of 9 "
    "times that steps are doubled and the rate halved, 8 help and 1 hurts by more than "
    "two standard errors (parallel, from 1 step to 2). Test loss in the mean over 150 "
    "rounds with 1, 2, 4, 8 steps: parallel 0.582, 0.602, 0.566, 0.519; one_way 0.572, "
    "0.546, 0.521, 0.507; two_way 0.584, 0.516, 0.503, 0.496.",
    "criterion": "as now, of faces alone, at rate times steps 0.06 by the paper's "
    "count.",
}
M9 = {
    "verdict": Verdict.differs,
    "ours": "Faces, 2 steps, weights 1/2, 5 seeds: largest rates, by the paper's "
    "count, up to which most seeds end with less loss than a guess: parallel 0.23, "
    "two_way, summed 0.23, one_way 0.45, two_way, averaged 0.45. Neither merge of "
    "two_way is the first to diverge.",
    "criterion": "two_way has a smaller limit than either other algorithm with both "
    "merges; partly if with one.",
}
M12 = {
    "verdict": Verdict.partly,
    "ours": "Faces, one_way alone, each bound at its own best rate, test loss in the "
    "mean over rounds: none 0.4790, the median 0.4608, fixed norms 0.6510 (0.01), "
    "0.5701 (0.03), 0.4607 (0.1), 0.4503 (0.3), 0.4790 (1). The median is better than "
    "none by 0.0182 (error 0.0048) and worse than the best fixed norm by 0.0105 (error "
    "0.0037); bounds that begin at 0.01 and at 10 end at 0.128 and 0.13.",
    "criterion": "the bound forgets where it began, the median is no worse than the "
    "best fixed norm, better than the worst and better than without clipping, by two "
    "standard errors; partly if some.",
}
