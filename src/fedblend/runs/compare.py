# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Run configurations on the same clients and splits, and compare them.

Every configuration becomes an ordinary run in ``OUT/runs/NAME``; what lies between them
is in ``OUT``, see ``comparison``. Training alone is computed once for all runs that
share it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedblend.config.config import Config, load, tables_differ
from fedblend.errors import ConfigError, RunError
from fedblend.runs import local_baseline, run_folder
from fedblend.runs.comparison import Comparison, write
from fedblend.runs.paired import data_keys
from fedblend.runs.result_tables import Target
from fedblend.runs.run import Step, run_config
from fedblend.runs.run_folder import Folder

Entry = str | Path | Config
"""A configuration, its file, or the folder of a finished run."""
OnStep = Callable[[str, Step], None]
"""Called with the name of a run and its progress."""


def compare(
    entries: Sequence[Entry],
    out: str | Path = "runs/comparison",
    *,
    seeds: int | None = None,
    resume: bool = False,
    metrics: Sequence[str] | None = None,
    target: str | None = None,
    figures: bool = False,
    sets: Iterable[str] = (),
    on_step: OnStep = lambda name, step: None,
    on_warning: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Run configurations on the same clients and splits, and compare them.

    Args:
        entries: configurations, TOML files, or folders of finished runs.
        out: the folder of the comparison; it must not hold one yet, unless ``resume``.
        seeds: how many seeds to run, from the configuration's own on.
        resume: continue a comparison that was interrupted.
        metrics: what to test differences of; the main metric if None.
        target: such as "accuracy=0.9": how many rounds and bits it takes to get there.
        figures: draw figures for a paper, as PDF.
        sets: settings ``key=value`` for every configuration.
        on_step: called after every block of rounds of a run.
        on_warning: called with each warning, one line.

    Raises:
        InputError: one line: the configurations do not go together, or cannot run.
    """
    out = Path(out)
    wanted = None if target is None else Target.parse(target)
    configs, finished = read_entries(entries, seeds, tuple(sets))
    check_comparable(configs)
    if (out / "runs").exists() and not resume:
        raise RunError(
            f"{out}: holds a comparison already; --resume continues it, --out names "
            "another folder"
        )
    folders = dict(finished)
    for name, config in configs.items():
        folders[name] = out / "runs" / name
        share_alone(config, folders[name], configs, out)
        run_config(
            config,
            folders[name],
            resume=True,
            on_step=lambda step, name=name: on_step(name, step),
            on_warning=lambda line, name=name: on_warning(f"{name}: {line}"),
        )
    out.mkdir(parents=True, exist_ok=True)
    return write(folders, out, metrics=metrics, target=wanted, figures=figures)


def share_alone(
    config: Config, place: Path, configs: Mapping[str, Config], out: Path
) -> None:
    """Take training alone from a finished run, if its work is the same."""
    mine = local_baseline.work_alone(config)
    for name, other in configs.items():
        done = Folder(out / "runs" / name)
        same = mine is not None and local_baseline.work_alone(other) == mine
        finished = done.path != place and done.summary.exists()
        if same and finished and local_baseline.share(done, config, Folder(place)):
            return


def read_entries(
    entries: Sequence[Entry], seeds: int | None, sets: Sequence[str] = ()
) -> tuple[dict[str, Config], dict[str, Path]]:
    """The configurations to run and the folders of finished runs, by name."""
    configs: dict[str, Config] = {}
    finished: dict[str, Path] = {}
    if not entries:
        raise RunError(
            "compare: nothing to compare; name configurations or run folders"
        )
    for entry in entries:
        if not isinstance(entry, Config) and Path(entry).is_dir():
            path = Path(entry)
            name = path.resolve().name
            run_folder.read_summary(Folder(path))
            _unused(name, path, configs, finished)
            finished[name] = path
            continue
        config = entry if isinstance(entry, Config) else load(Path(entry), sets)
        config = with_seeds(config, seeds)
        name = safe_name(config.name)
        if name in configs and not isinstance(entry, Config):
            name = safe_name(Path(entry).stem)
        _unused(name, entry, configs, finished)
        configs[name] = config
    return configs, finished


def _unused(name: str, entry: Any, *known: Mapping[str, Any]) -> None:
    if any(name in of for of in known):
        where = "a configuration" if isinstance(entry, Config) else str(entry)
        raise ConfigError(
            f"{where}: name: {name!r} is the name of another run of this comparison"
        )


def safe_name(name: str) -> str:
    """The name of a folder.

    >>> safe_name("my run: 1")
    'my-run-1'
    """
    kept = [sign if sign.isalnum() or sign in "._=-" else " " for sign in name]
    return "-".join("".join(kept).split()).strip(".") or "run"


def with_seeds(config: Config, seeds: int | None) -> Config:
    """The configuration with so many seeds, from its own (the first) on."""
    if seeds is None:
        return config
    if seeds < 1:
        raise ConfigError(f"--seeds: {seeds} is not 1 or more")
    first = run_folder.seeds_of(config)[0]
    chosen: Any = first if seeds == 1 else list(range(first, first + seeds))
    run = config.run.model_copy(update={"seed": chosen})
    return config.model_copy(update={"run": run})


def check_comparable(configs: Mapping[str, Config]) -> None:
    """Refuse configurations on other data, clients or splits than the first.

    Raises:
        ConfigError: one line with the key and both values.
    """
    if not configs:
        return
    (first, config), *others = configs.items()
    for name, other in others:
        wrong = tables_differ(data_keys(config), data_keys(other))
        if wrong:
            raise ConfigError(
                f"{name}: has other data than {first}, so they cannot be compared: "
                f"{wrong}"
            )
