# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fb.judge``: gains, intervals and corrections, next to SciPy's tests by hand."""

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import fedblend as fb
from fedblend.cli import main
from fedblend.errors import RunError


def table(gains: dict[str, np.ndarray], base: np.ndarray) -> dict[str, list]:
    """Columns of methods that are better than the baseline by [seeds, clients]."""
    found: dict[str, list] = {"method": [], "client": [], "seed": [], "score": []}
    for name, gaps in {"base": 0 * base, **gains}.items():
        for (seed, client), score in np.ndenumerate(base + gaps):
            row = {"method": name, "client": f"c{client}", "seed": seed}
            for key, value in {**row, "score": score}.items():
                found[key].append(value)
    return found


@pytest.fixture(scope="module")
def made():
    draw = np.random.default_rng(0)
    base = draw.normal(size=(5, 12))
    far = 1.0 + draw.normal(size=(5, 12))
    near = 0.1 + draw.normal(size=(5, 12))
    return table({"far": far, "near": near}, base), {"far": far, "near": near}


def test_one_seed_is_the_paired_t_test():
    draw = np.random.default_rng(1)
    base, gaps = draw.normal(size=(1, 9)), 0.5 + draw.normal(size=(1, 9))
    (one,) = fb.judge(
        table({"own": gaps}, base), baseline="base", higher_is_better=True
    ).candidates
    exact = stats.ttest_rel((base + gaps)[0], base[0])
    ends = exact.confidence_interval()
    assert one.p == one.corrected == pytest.approx(exact.pvalue)
    assert (one.low, one.high) == pytest.approx((ends.low, ends.high))
    assert one.helped == one.harmed == []


def test_seeds_widen_the_interval_by_their_own_student(made):
    columns, gains = made
    found = fb.judge(columns, baseline="base", higher_is_better=True)
    for one in found.candidates:
        gaps = gains[one.method]
        of_clients = stats.t.ppf(0.975, 11) * stats.sem(gaps.mean(0))
        of_seeds = stats.t.ppf(0.975, 4) * stats.sem(gaps.mean(1))
        half = np.hypot(of_clients, of_seeds)
        assert one.high - one.gain == pytest.approx(half)
        assert one.gain == pytest.approx(gaps.mean())
    assert [one.method for one in found.candidates] == ["far", "near"]


def test_lower_is_better_turns_every_sign(made):
    columns, _ = made
    up = fb.judge(columns, baseline="base", higher_is_better=True).candidates
    down = fb.judge(columns, baseline="base", higher_is_better=False).candidates
    assert [one.method for one in down] == ["near", "far"]
    assert [one.gain for one in down[::-1]] == pytest.approx([-one.gain for one in up])


def test_searched_candidates_are_paid_for(made):
    columns, gains = made
    alone = fb.judge(columns, baseline="base", higher_is_better=True)
    many = fb.judge(columns, baseline="base", higher_is_better=True, searched=40)
    for one, other in zip(alone.candidates, many.candidates, strict=True):
        assert (one.p, one.low) == (other.p, other.low)
    first, second = many.candidates
    assert first.corrected == pytest.approx(min(40 * first.p, 1))
    assert second.corrected == pytest.approx(min(39 * second.p, 1))
    gaps = gains["far"]
    of_clients = stats.t.ppf(1 - 0.025 / 40, 11) * stats.sem(gaps.mean(0))
    of_seeds = stats.t.ppf(1 - 0.025 / 40, 4) * stats.sem(gaps.mean(1))
    half = np.hypot(of_clients, of_seeds)
    assert first.searched_high - first.gain == pytest.approx(half)
    error = np.hypot(stats.sem(gaps.mean(0)), stats.sem(gaps.mean(1)))
    largest = np.random.default_rng(2).normal(size=(20_000, 40)).max(1).mean()
    assert first.luck == pytest.approx(error * largest, rel=0.02)


def test_harmed_clients_are_named():
    draw = np.random.default_rng(3)
    gaps = 0.1 * draw.normal(size=(6, 8)) + 1.0
    gaps[:, 2] -= 3.0
    found = fb.judge(
        table({"own": gaps}, draw.normal(size=(6, 8))),
        baseline="base",
        higher_is_better=True,
    )
    (one,) = found.candidates
    assert one.harmed == ["c2"] and len(one.helped) == 7
    assert "own clearly harms c2." in found.verdict


def test_splits_that_overlap_are_not_independent():
    gaps = np.random.default_rng(4).normal(size=(10, 1)) + 1.0
    columns = table({"own": gaps}, np.zeros((10, 1)))
    ask = {"baseline": "base", "higher_is_better": True}
    (plain,) = fb.judge(columns, **ask).candidates
    (split,) = fb.judge(columns, **ask, overlap=0.25).candidates
    exact: Any = stats.ttest_1samp(gaps[:, 0], 0)
    assert plain.p == pytest.approx(exact.pvalue)
    wider = (split.high - split.gain) / (plain.high - plain.gain)
    assert wider == pytest.approx(np.sqrt(1 + 10 * 0.25))


def test_no_candidate_of_nothing_is_called_better():
    """Ten worthless candidates, a hundred times: a false claim in about 5 of 100."""
    draw, wrong = np.random.default_rng(5), 0
    for _ in range(100):
        base = np.zeros((3, 6))
        gains = {f"m{n}": draw.normal(size=(3, 6)) for n in range(10)}
        found = fb.judge(table(gains, base), baseline="base", higher_is_better=True)
        wrong += any(one.clear for one in found.candidates)
    assert wrong <= 9  # 95 % of Binomial(100, .05)


def test_diverged_clients_are_left_out_and_said():
    base, gaps = np.zeros((2, 4)), np.full((2, 4), 0.5)
    gaps[1, 3], gaps[0, 0] = np.nan, 0.4
    found = fb.judge(table({"own": gaps}, base), baseline="base", higher_is_better=True)
    assert found.candidates[0].broken == ["c3"]
    assert found.candidates[0].clients == 3
    assert any("no finite score for c3" in line for line in found.verdict)


def test_ledger_of_nvflare_counts_crashes_and_cannot_tell(tmp_path):
    heads = "commit score runtime_seconds budget status target description artifacts"
    rows = [
        ("a", "0.69", "keep", "plain"),
        ("b", "0.74", "keep", "epochs 8"),
        ("c", "", "crash", "large rate"),
        ("d", "0.70", "discard", "proximal"),
    ]
    lines = [heads.split()]
    lines += [[a, b, "1", "20", c, "all", d, "x"] for a, b, c, d in rows]
    path = tmp_path / "results.tsv"
    path.write_text("\n".join("\t".join(line) for line in lines))
    found = fb.judge(path, higher_is_better=True)
    assert (found.baseline, found.searched) == ("plain", 3)
    assert found.candidates[0].method == "epochs 8"
    assert "cannot be told" in found.verdict[0]
    path.write_text(path.read_text() + "\n" + "\t".join(lines[1]))
    again = fb.judge(path, higher_is_better=True).candidates
    assert again[0].seeds == 1  # a second run of the baseline alone pairs with nothing


@pytest.mark.parametrize("form", ["history", "result"])
def test_histories_of_flower(tmp_path, form):
    draw = np.random.default_rng(6)
    paths = []
    for method, shift in (("fedavg", 0.0), ("ours", 0.3)):
        for seed in range(3):
            last = {f"site {n}": float(draw.normal() + shift) for n in range(4)}
            content = {"metrics_distributed": {"accuracy": [[2, last], [1, {}]]}}
            if form == "result":
                of = {"1": {"accuracy": {}}, "10": {"accuracy": last}}
                content = {"evaluate_metrics_clientapp": of}
            paths.append(tmp_path / f"{method}-seed{seed}.json")
            paths[-1].write_text(json.dumps(content))
    found = fb.judge(paths, baseline="fedavg", score="accuracy")
    (one,) = found.candidates
    assert (one.method, one.seeds, one.clients) == ("ours", 3, 4)
    assert found.higher_is_better


def test_results_of_pfllib(tmp_path):
    """Names and series as its ``save_results`` writes them."""
    h5py = pytest.importorskip("h5py")
    last = {"FedAvg": [0.7, 0.71, 0.69], "Ditto": [0.8, 0.79, 0.78]}
    for method, scores in last.items():
        for seed, score in enumerate(scores):
            path = tmp_path / f"Tiny_ImageNet_{method}_test_{seed}.h5"
            with h5py.File(path, "w") as file:
                file.create_dataset("rs_test_acc", data=[0.9, score])
                file.create_dataset("rs_test_auc", data=[])
    found = fb.judge([*tmp_path.iterdir()], baseline="FedAvg", score="accuracy")
    (one,) = found.candidates
    assert (one.method, one.seeds, found.higher_is_better) == ("Ditto", 3, True)
    assert one.gain == pytest.approx(0.09)
    for score, line in (("auc", "with rs_test_auc"), ("acc", "did you mean")):
        with pytest.raises(RunError, match=line):
            fb.judge([*tmp_path.iterdir()], baseline="FedAvg", score=score)


def test_the_command_prints_a_table_or_json(tmp_path, capsys, monkeypatch, made):
    monkeypatch.setenv("COLUMNS", "120")
    path = tmp_path / "scores.csv"
    pd.DataFrame(made[0]).to_csv(path, index=False)
    asked = ["judge", str(path), "--baseline", "base", "--higher-is-better"]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert "corrected" in said and "far is the best of 2 candidates" in said
    assert main([*asked, "--format", "json", "--searched", "9"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["searched"] == 9 and plain["candidates"][0]["clear"]


@pytest.mark.parametrize(
    ("text", "options", "line"),
    [
        ("method,score\na,1\n", {}, "score: say whether more of it is better"),
        ("method,value\na,1\n", {}, "has no column 'score'; there are method, value"),
        ("method,score\na,x\n", {}, "score: 'x' is not a number"),
        ("method,score\na,1,2\n", {}, "rows differ in length"),
        ("", {}, "is not a table"),
        ("method,score\na,1\nb,2\n", {"higher_is_better": True}, "known are a, b"),
        ("method,score\na,1\n", {"higher_is_better": True, "baseline": "a"}, "no m"),
        (
            "method,client,seed,score\na,1,1,2\na,1,1,3\n",
            {"higher_is_better": True, "baseline": "a"},
            "two scores for method 'a', client '1', seed '1'",
        ),
        (
            "method,client,score\na,1,2\nb,2,3\n",
            {"higher_is_better": True, "baseline": "a"},
            "no client with finite scores in the same seeds",
        ),
        (
            "method,score\na,1\nb,2\nc,2\n",
            {"higher_is_better": True, "baseline": "a", "searched": 1},
            "1 is less than the 2 candidates",
        ),
        ("method,score\na,1\n", {"seed": "run"}, "has no column 'run'"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, text, options, line):
    path = tmp_path / "scores.csv"
    path.write_text(text)
    with pytest.raises(RunError) as refused:
        fb.judge(path, **options)
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_other_files_are_refused(tmp_path, capsys):
    (tmp_path / "run.json").write_text(
        '{"metrics_centralized": {"accuracy": [[1, 0.5]]}}'
    )
    (tmp_path / "run.h5").write_bytes(b"\x89HDF")
    assert main(["judge", str(tmp_path / "run.h5")]) == 2
    assert "known are accuracy, auc" in capsys.readouterr().err
    assert main(["judge", str(tmp_path / "run.h5"), "--score", "auc"]) == 2
    assert "is no file of PFLlib's" in capsys.readouterr().err
    assert main(["judge", str(tmp_path / "run.txt")]) == 2
    assert "is neither a table (.csv, .tsv)" in capsys.readouterr().err
    assert main(["judge", str(tmp_path / "run.json")]) == 2
    assert "known are accuracy" in capsys.readouterr().err
    assert main(["judge", str(tmp_path / "none.csv")]) == 2
    assert "No such file" in capsys.readouterr().err
