# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, where, and the exit codes."""

import contextlib
import copy
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from fedblend.cli import main, run, screen
from fedblend.config import toml
from fedblend.data.datasets import DATASETS

TINY = {
    "version": 1,
    "name": "tiny",
    "data": {"source": "digits", "partition": "iid", "clients": 4},
    "model": {"name": "softmax"},
    "algorithm": {"name": "fedavg", "rate": 0.1, "steps": 1, "batch_size": 4},
    "run": {"rounds": 2, "every": 1},
    "measure": {"local": False},
}
HEADER = "x,y,who,label\n"
ROWS = "".join(f"{i},{-i},{'ab'[i % 2]},{i // 2 % 2}\n" for i in range(20))


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch, compiled):
    """An empty folder to stand in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(screen, "compile_cache", lambda: None)
    return tmp_path


def write(name="tiny.toml", **tables):
    content = copy.deepcopy(TINY)
    for table, values in tables.items():
        content[table] = values
    Path(name).write_text(toml.write(content))
    return name


def own(**options):
    return {"file": "own.csv", "target": "label", "client": "who", **options}


def fails(capsys, *arguments) -> str:
    """The line of complaint of a command that must fail."""
    assert main(list(arguments)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    assert said.err.startswith("error: ")
    return said.err.removeprefix("error: ").strip()


@pytest.fixture(scope="module")
def finished(tmp_path_factory, compiled):
    """The folder of a finished run."""
    home = tmp_path_factory.mktemp("finished")
    path = home / "tiny.toml"
    path.write_text(toml.write({**TINY, "measure": {"local": 1}}))
    asked = ["--out", str(home / "out"), "--seed", "1", "2"]
    assert main(["run", str(path), *asked]) == 0
    return home


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["run.round=1"], "tiny.toml: run.round: unknown key; did you mean 'rounds'?"),
        (["run.rounds='1'"], 'tiny.toml: run.rounds: "1" is not a whole number'),
        (["algorithm.alpha=1.2"], "tiny.toml: algorithm.alpha: 1.2 is not in [0, 1]"),
        (["run.cohort=5"],
         "tiny.toml: run.cohort: 5 is not between 1 and the 4 clients there are"),
        (["version=9"],
         "tiny.toml: version: 9 is newer than this fedblend, which reads up to 1; "
         "update fedblend"),
        (["data.source=digitz"],
         "dataset: 'digitz' is unknown; did you mean 'digits'?"),
        (["data.clients=5000"],
         "clients: 5000 with at least 1 rows each are too many for 1797 rows"),
        (["data.source=synthetic", "data.options={gamma=nan, beta=0.0}"],
         "synthetic: gamma: nan is not a number of at least 0"),
        (["data.source=synthetic", "data.options={gamma=0.0, beta=0.0, dim=2.5}"],
         "synthetic: dim: 2.5 is not a whole number of at least 1"),
        (["algorithm.steps=[1, 2]"],
         "tiny.toml: algorithm.steps: 2 numbers for 4 clients; give one for each, or a "
         "single one"),
    ],
)  # fmt: skip
def test_bad_settings(settings, line, capsys):
    name = write()
    changes = [part for setting in settings for part in ("--set", setting)]
    assert fails(capsys, "run", name, *changes) == line


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (HEADER + ROWS + "nan,1,a,0\n",
         "row 20 (counted from 0), column 'x' is nan; only finite numbers are usable"),
        (HEADER + "1,2,a,0\n2,3,b,0\n",
         "all 2 targets are 0; at least 2 classes are needed"),
        (None, "own.csv: no such file"),
        ("\0" * 50, "own.csv: "),
        ("", "own.csv: "),
    ],
    ids=["nan", "one class", "missing", "zeros", "empty"],
)  # fmt: skip
def test_bad_tables(content, line, capsys):
    if content is not None:
        Path("own.csv").write_text(content)
    data = own(partition="by_key", preprocess="none")
    name = write(data=data, model={"name": "logistic"})
    assert line in fails(capsys, "run", name)
    assert not Path("runs").exists()


def test_an_empty_client(capsys):
    data = {"source": "digits", "partition": "dirichlet", "clients": 400}
    data |= {"concentration": 1e-3, "minimum": 0}
    said = fails(capsys, "run", write(data=data))
    assert "has no training rows" in said and "clients are empty" in said


@pytest.mark.parametrize("damage", ["corrupt", "foreign", "cut"])
def test_bad_checkpoints(damage, capsys, finished):
    folder = finished / damage
    subprocess.run(["cp", "-r", finished / "out", folder], check=True)
    (folder / "summary.json").unlink()
    path = folder / "checkpoint"
    whole = path.read_bytes()
    path.write_bytes(
        {
            "corrupt": whole[:-3] + b"\x01\x02\x03",
            "foreign": (folder / "model-seed1.safetensors").read_bytes(),
            "cut": whole[:100],
        }[damage]
    )
    config = str(finished / "tiny.toml")
    arguments = ["--seed", "1,2", "--out", str(folder), "--resume"]
    said = fails(capsys, "run", config, *arguments)
    assert said.startswith(f"checkpoint {path}: ")


def test_bad_command_lines(capsys, finished):
    assert fails(capsys, "frob").startswith("No such command 'frob'")
    assert fails(capsys, "run").startswith("Missing argument")
    assert "nothing.toml: No such file" in fails(capsys, "run", "nothing.toml")
    assert "--seed: 'x' is not" in fails(capsys, "run", write(), "--seed", "x")
    assert "not a setting" in fails(capsys, "run", write(), "--set", "x")
    assert "not the folder of a run" in fails(capsys, "show", "nothing")
    assert "'datasetz' is not one of" in fails(capsys, "list", "datasetz")
    assert "is unknown; known are" in fails(capsys, "data", "info", "frob")
    assert "not a public dataset" in fails(capsys, "data", "get", "frob")
    out = str(finished / "out")
    assert "holds a run already" in fails(capsys, "run", write(), "--out", out)
    Path("file").write_text("")
    assert fails(capsys, "run", write(), "--out", "file/x") == "file/x: Not a directory"


def test_a_damaged_folder(capsys, finished, tmp_path):
    subprocess.run(["cp", "-r", finished / "out", "damaged"], check=True)
    Path("damaged/summary.json").write_text("[1")
    assert "damaged" in fails(capsys, "show", "damaged")
    Path("damaged/summary.json").unlink()
    assert main(["show", "damaged"]) == 0
    assert "not finished" in capsys.readouterr().out
    Path("damaged/metrics.jsonl").write_text('{"round": 1}\n')
    said = fails(capsys, "show", "damaged")
    assert said == "damaged/metrics.jsonl: is damaged; run the experiment again"


def test_a_full_disk(capsys, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    line = fails(capsys, "run", write())
    assert line == "results cannot be written: No space left on device"


def test_a_run_says_what_it_chose(capsys):
    Path("four.toml").write_text("data.source = 'digits'\nalgorithm.name = 'fedavg'\n")
    quick = ["--set", "run.rounds=1", "--set", "measure.local=false"]
    assert main(["run", "four.toml", *quick]) == 0
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "chosen" in one]
    assert 'model.name = "softmax"' in line and "runs/four/config.toml" in line
    written = tomllib.loads(Path("runs/four/config.toml").read_text())
    assert written["algorithm"]["batch_size"] == 32 and written["name"] == "four"


def test_init_then_run(capsys):
    assert main(["init", "mine.toml"]) == 0
    assert "fedblend run mine.toml" in capsys.readouterr().out
    assert "exists already" in fails(capsys, "init", "mine.toml")
    short = ["--set", "run.rounds=1", "--set", "measure.local=false"]
    assert main(["run", "mine.toml", "--format", "json", *short]) == 0
    said, page = capsys.readouterr(), Path("runs/mine/report.html")
    summary = json.loads(said.out)
    assert said.err == ""
    assert summary["name"] == "mine"
    assert summary["runs"][0]["round"] == 1
    assert Path("runs/mine/summary.json").exists()
    page.unlink()
    assert main(["run", "mine.toml", *short, "--resume"]) == 0
    said = capsys.readouterr()
    assert "results: runs/mine" in said.out and f"report: {page}" in said.out
    assert page.is_file()


def test_warnings_do_not_stop_a_run(capsys):
    data = TINY["data"] | {"partition": "classes_per_client", "classes": 1}
    name = write(data=data, run={"rounds": 1})
    assert main(["run", name]) == 0
    assert "warning: 4 of 4 clients have training rows of one class only" in (
        capsys.readouterr().err
    )


def test_show_says_again_what_was_odd(capsys, finished):
    shutil.copytree(finished / "out", "odd")
    path = Path("odd") / "summary.json"
    summary = json.loads(path.read_text())
    path.write_text(json.dumps(summary | {"warnings": ["the loss is odd"]}))
    capsys.readouterr()
    assert main(["show", "odd"]) == 0
    assert capsys.readouterr().err == "warning: the loss is odd\n"
    path.write_text(json.dumps(summary | {"warnings": 3}))
    assert fails(capsys, "show", "odd").endswith("is damaged: warnings are no list")


def test_show_and_lists(capsys, finished):
    assert main(["show", str(finished / "out")]) == 0
    assert "mean of 2 seeds" in capsys.readouterr().out
    for kind, word in (
        ("algorithms", "scaffold"),
        ("models", "large_cnn"),
        ("datasets", "femnist"),
    ):
        assert main(["list", kind]) == 0
        assert word in capsys.readouterr().out
    assert main(["data", "list"]) == 0
    assert main(["data", "info", "femnist"]) == 0
    said = capsys.readouterr().out
    assert "terms: NIST SD 19" in said and "digits_only: default false" in said
    assert main(["data", "get", "digits"]) == 0
    assert main(["--version"]) == 0


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_the_terms_of_every_dataset_are_printed(capsys, name):
    assert main(["data", "info", name]) == 0
    assert f"terms: {DATASETS[name].license}\n" in capsys.readouterr().out
    assert len(DATASETS[name].license) > 4


def test_seeds_in_all_spellings():
    assert run.join_seeds(["run", "x", "--seed", "1", "2", "3", "--resume"]) == [
        "run",
        "x",
        "--seed",
        "1,2,3",
        "--resume",
    ]
    assert run.join_seeds(["--seed", "1", "--seed", "2", "x", "3"]) == [
        "--seed",
        "1",
        "--seed",
        "2",
        "x",
        "3",
    ]
    assert run.join_seeds(["--seed=1", "2", "x", "3"]) == ["--seed=1,2", "x", "3"]
    assert run.join_seeds(["--seed"]) == ["--seed"]
    assert run.join_seeds(["--set", "a", "1", "2"]) == ["--set", "a", "1", "2"]


def command(*arguments, **options):
    """The command line in a process of its own."""
    words = [sys.executable, "-m", "fedblend", *map(str, arguments)]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def test_python_m_is_the_command():
    """With its exit code, and its own name in the help."""
    words = [sys.executable, "-m", "fedblend"]
    done = subprocess.run([*words, "list", "x"], capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "'x' is not one of" in line
    done = subprocess.run([*words, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: fedblend " in done.stdout


@pytest.mark.parametrize("package", ["typer", "rich", "pydantic"])
def test_without_the_extra_it_names_the_extra(package):
    hide = f"import sys; sys.modules[{package!r}] = None; sys.argv = ['x', '--help']; "
    code = hide + "from fedblend.cli import entry; entry()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    wanted = f"error: the command line needs {package}: pip install 'fedblend[cli]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", wanted)


def test_help_describes_arguments(capsys):
    """Versions of click differ in what typer can show."""
    assert main(["auto", "--help"]) == 0
    assert "A .csv, .tsv or .parquet" in capsys.readouterr().out


def test_help_does_not_load_jax():
    code = "import sys; from fedblend.cli import main; c = main(['--help']); "
    code += "sys.exit(c or 'jax' in sys.modules or 'pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_an_interrupt_that_is_swallowed_comes_again():
    with screen.lasting_interrupt() as stop:
        stop()
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        with pytest.raises(KeyboardInterrupt):
            stop()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupting(tmp_path):
    name = write(run={"rounds": 100_000, "every": 10})
    # A cache that the environment names would be used instead of the user's.
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    process = command("run", name, env=env | {"XDG_CACHE_HOME": str(tmp_path)})
    while not Path("runs/tiny/metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    line = "interrupted; the same command with --out runs/tiny --resume continues\n"
    # Where the signal comes while Python collects garbage, it says so before.
    assert err.endswith(line)
    assert list((tmp_path / "fedblend" / "jax").iterdir())
