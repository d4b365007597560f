# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A server that dies anywhere goes on from its checkpoint, to the bit."""

import errno
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from trials import ROUNDS, Trial, apart, clock, forged

from fedblend.errors import CheckpointError
from fedblend_federation.server.checkpoint import ServerCheckpoint

_ = clock
_WANTED: dict[str, dict] = {}


def wanted(name: str, tmp_path: Path) -> dict:
    """What an undisturbed federation comes to."""
    if name not in _WANTED:
        trial = Trial(tmp_path / "undisturbed", name)
        _WANTED[name] = trial.outcome(trial.run())
    return _WANTED[name]


@pytest.mark.parametrize(
    "name",
    [
        "apfl",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("fedavg", "scaffold")),
    ],
)
def test_a_server_killed_after_every_step_comes_to_the_same(name, tmp_path):
    trial = Trial(tmp_path / "killed", name)
    steps, done = 0, False
    while not done:
        checkpoint = ServerCheckpoint(trial.folder / "server")
        server = trial.restored(checkpoint)
        done = server.done
        if not done:
            server.step()
            if steps % 2:  # every second one is lost before it is written down
                checkpoint.save(server, {})
        steps += 1
        checkpoint.close()
    assert steps == 2 * (ROUNDS + 3) + 1
    assert trial.outcome(trial.run()) == wanted(name, tmp_path)


class Crash(BaseException):
    """The end of a process, wherever it was."""


_CALLS = ("fsync", "replace", "unlink")


def _dies_at(monkeypatch, moment: int, error: Callable = Crash) -> list[int]:
    """Die before the so many-th call that changes a disk."""
    made = [0]

    def dying(name):
        real = getattr(os, name)

        def wrapped(*arguments, **more):
            made[0] += 1
            if made[0] == moment:
                raise error()
            return real(*arguments, **more)

        return wrapped

    for name in _CALLS:
        monkeypatch.setattr(os, name, dying(name))
    return made


def test_there_are_whole_checkpoints_and_states_at_every_moment(tmp_path, monkeypatch):
    expected, moment, died = wanted("apfl", tmp_path), 0, 0
    begun = Trial(tmp_path / "begun", "apfl")
    begun.run(rounds=1)
    while died == moment:
        moment += 1
        folder = tmp_path / f"crash{moment}"
        shutil.copytree(begun.folder, folder)
        with monkeypatch.context() as patch:
            _dies_at(patch, moment)
            try:
                Trial(folder, "apfl").run(rounds=2)
            except Crash:
                died = moment
        checkpoint = ServerCheckpoint(folder / "server")
        saved = checkpoint.read()
        checkpoint.close()
        assert saved is not None and not saved.damage
        if moment % 6 == 1 or died < moment:
            trial = Trial(folder, "apfl")
            assert trial.outcome(trial.run()) == expected
    # A state of each node is synced, moved, and its folder synced; so is the
    # checkpoint, and then the two generations change places.
    assert died >= 4 * 3 + 3 + 3


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    expected = wanted("scaffold", tmp_path)
    begun = Trial(tmp_path / "begun", "scaffold", quorum=0.5)
    begun.run(rounds=1)
    full = lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # noqa: E731
    for moment in (1, 2, 13, 14, 15, 16):
        folder = tmp_path / f"full{moment}"
        shutil.copytree(begun.folder, folder)
        trial = Trial(folder, "scaffold")
        with monkeypatch.context() as patch:
            made = _dies_at(patch, moment, full)
            try:
                trial.run(rounds=2)
            except (CheckpointError, RuntimeError) as error:
                assert "No space left on device" in str(error)
        assert made[0] >= moment
        assert not list(folder.rglob("*.new"))
        again = Trial(folder, "scaffold")
        assert again.outcome(again.run()) == expected


def test_a_damaged_checkpoint_is_replaced_by_the_previous_one(tmp_path):
    trial = Trial(tmp_path / "begun", "apfl")
    trial.run(rounds=2)
    place = trial.folder / "server"
    data, rng = (place / "checkpoint").read_bytes(), random.Random(0)
    places = sorted({*range(40), *rng.sample(range(len(data)), 60), len(data) - 1})
    for at in places:
        wrong = bytearray(data)
        wrong[at] ^= 1 << rng.randrange(8)
        (place / "checkpoint").write_bytes(wrong)
        checkpoint = ServerCheckpoint(place)
        saved = checkpoint.read()
        checkpoint.close()
        assert saved is not None and saved.path.name == "checkpoint.previous"
        (damage,) = saved.damage
        assert damage.startswith(f"{place / 'checkpoint'}: ") and "\n" not in damage
    # The damaged ones are out of the way: a crash before the next is written is safe.
    assert (
        not (place / "checkpoint").exists() and (place / "checkpoint.damaged").exists()
    )
    again = Trial(trial.folder, "apfl")
    assert again.outcome(again.run()) == wanted("apfl", tmp_path)


@pytest.mark.parametrize("size", [0, 5, 200])
def test_no_whole_checkpoint_is_one_line(size, tmp_path):
    trial = Trial(tmp_path / "run")
    trial.run(rounds=1)
    for name in ("checkpoint", "checkpoint.previous"):
        path = trial.folder / "server" / name
        path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError) as caught:
        trial.run()
    assert "checkpoint: " in str(caught.value)
    assert "checkpoint.previous: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_experiment_method_or_version_is_refused(tmp_path):
    trial = Trial(tmp_path / "run")
    trial.run(rounds=1)
    with pytest.raises(CheckpointError, match="another model, algorithm or version"):
        Trial(trial.folder, "scaffold").run()
    path = trial.folder / "server" / "checkpoint"
    header, metadata, body = apart(path.read_bytes())
    path.write_bytes(forged(header, {**metadata, "experiment": "other"}, body))
    with pytest.raises(CheckpointError, match="other, and the server runs trial"):
        trial.run()
    path.write_bytes(forged(header, {**metadata, "fedblend": "1"}, body))
    (trial.folder / "server" / "checkpoint.previous").unlink()
    with pytest.raises(CheckpointError, match="of version '1', this fedblend reads 5"):
        trial.run()


def test_a_second_server_on_the_same_folder_is_refused(tmp_path):
    checkpoint = ServerCheckpoint(tmp_path / "server")
    with pytest.raises(CheckpointError, match="another server is running there"):
        ServerCheckpoint(tmp_path / "server")
    checkpoint.close()
    ServerCheckpoint(tmp_path / "server").close()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="keep checkpoints here: Not a directory"):
        ServerCheckpoint(tmp_path / "file" / "checkpoint")


def _kill(folder: Path, name: str, seconds: float) -> bool:
    """Whether a process of its own, killed after a while, had come to the end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks; what hangs is killed, too
        child = os.fork()
    if child == 0:
        try:
            Trial(folder, name).run()
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return not os.WIFSIGNALED(os.waitpid(child, 0)[1])


def _killed(kills: int, seed: int, tmp_path: Path) -> None:
    rng, name = random.Random(seed), ("fedavg", "apfl", "scaffold")[seed % 3]
    expected = wanted(name, tmp_path)
    begun = time.perf_counter()
    Trial(tmp_path / "timed", name).run()
    longest = 1.2 * (time.perf_counter() - begun)
    folders = progress = 0
    while kills > 0:
        folder, ended = tmp_path / f"killed{folders}", False
        while kills > 0 and not ended:
            ended = _kill(folder, name, rng.uniform(0, longest))
            kills -= not ended
            progress += (folder / "server" / "checkpoint").exists()
        trial = Trial(folder, name)
        assert trial.outcome(trial.run()) == expected
        folders += 1
    assert progress, "no process came as far as its first checkpoint"


def test_killed_at_any_moment_it_comes_to_the_same(tmp_path):
    _killed(8, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_killed_at_two_hundred_moments_it_comes_to_the_same(seed, tmp_path):
    _killed(20, seed, tmp_path)


def test_a_checkpoint_of_an_earlier_layout_is_refused_in_one_line(tmp_path):
    (tmp_path / "books").write_bytes(b"")
    checkpoint = ServerCheckpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"books: was written by an earlier fedb"):
        checkpoint.read()
    checkpoint.close()
