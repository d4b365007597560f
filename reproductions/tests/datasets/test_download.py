# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Downloads against a server on this machine that can misbehave."""

import bz2
import gzip
import hashlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedblend.data.dataset import DataError, MissingDataError
from fedblend_reproductions.datasets import download
from fedblend_reproductions.datasets.download import (
    PUBLIC_SETS,
    PublicFile,
    PublicSet,
    is_intact,
)

BODY = np.random.default_rng(0).bytes(700_000)
TEXT = b"1 1:1\n-1 2:0.5\n" * 100


def server(log, *, ranges=True, cut=None, files=None):
    """Serve ``files``, or BODY under any name; ``cut`` ends a response early."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = BODY if files is None else files.get(self.path)
            wanted = self.headers.get("Range")
            log.append((self.path, wanted))
            if body is None:
                self.send_error(404)
                return
            start = int(wanted.split("=")[1].rstrip("-")) if wanted and ranges else 0
            if start >= len(body):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            self.wfile.write(body[start:][:cut])
            self.close_connection = True

        def log_message(self, format, *args):
            del format, args

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def serve():
    running = []

    def start(log=None, **options):
        running.append(server([] if log is None else log, **options))
        threading.Thread(target=running[-1].serve_forever, args=(0.01,)).start()
        return f"http://127.0.0.1:{running[-1].server_port}"

    yield start
    for one in running:
        one.shutdown()
        one.server_close()


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """A public set of one file, of which the server has the right content."""
    file = PublicFile("toy.bin", hashlib.sha256(BODY).hexdigest(), len(BODY))
    return replace(monkeypatch, tmp_path, file)


def replace(monkeypatch, tmp_path, *files, **fields):
    toy = PublicSet("toy", "toy", files, **fields)
    monkeypatch.setitem(PUBLIC_SETS, "toy", toy)
    monkeypatch.setenv("FEDBLEND_DATA", str(tmp_path))
    return tmp_path / "toy" / files[0].name


def test_a_fresh_download(toy, serve):
    log, steps = [], []
    base = serve(log)
    paths = PUBLIC_SETS["toy"].get(base=base, progress=lambda *now: steps.append(now))
    assert paths == [toy]
    assert toy.read_bytes() == BODY
    assert [file.name for file in toy.parent.iterdir()] == ["toy.bin"]
    assert steps[0] == (0, len(BODY))
    assert steps[-1] == (len(BODY), len(BODY))
    assert sorted(steps) == steps
    assert log == [("/toy.bin", None)]
    assert PUBLIC_SETS["toy"].get(base=base) == [toy]  # verified and left alone
    assert len(log) == 1


def test_a_broken_download_goes_on(toy, serve):
    with pytest.raises(DataError, match="broke off after 300000 of 700000 bytes; run"):
        PUBLIC_SETS["toy"].get(base=serve(cut=300_000))
    assert not toy.exists()
    log = []
    PUBLIC_SETS["toy"].get(base=serve(log))
    assert log == [("/toy.bin", "bytes=300000-")]
    assert toy.read_bytes() == BODY


def test_a_server_that_ignores_ranges(toy, serve):
    toy.parent.mkdir()
    part = toy.with_name("toy.bin.part")
    part.write_bytes(b"x" * 1000)
    PUBLIC_SETS["toy"].get(base=serve(ranges=False))
    assert toy.read_bytes() == BODY
    assert not part.exists()


def test_a_wrong_checksum_is_deleted(toy, serve):
    with pytest.raises(DataError, match=r"toy: toy\.bin .* checksum is wrong, deleted"):
        PUBLIC_SETS["toy"].get(base=serve(files={"/toy.bin": BODY[::-1]}))
    assert list(toy.parent.iterdir()) == []


def test_an_unfinished_file_that_was_whole(toy, serve):
    toy.parent.mkdir()
    toy.with_name("toy.bin.part").write_bytes(BODY)
    log = []
    PUBLIC_SETS["toy"].get(base=serve(log))
    assert log == []
    assert toy.read_bytes() == BODY


@pytest.mark.parametrize("extra", [b"", b"more"])
def test_an_unfinished_file_of_unknown_size(monkeypatch, tmp_path, serve, extra):
    file = PublicFile("toy.bin", hashlib.md5(BODY).hexdigest())
    path = replace(monkeypatch, tmp_path, file)
    path.parent.mkdir()
    path.with_name("toy.bin.part").write_bytes(BODY + extra)
    if extra:
        with pytest.raises(DataError, match="checksum is wrong, deleted"):
            PUBLIC_SETS["toy"].get(base=serve())
    PUBLIC_SETS["toy"].get(base=serve())
    assert path.read_bytes() == BODY


def test_a_damaged_file_is_replaced(toy, serve):
    toy.parent.mkdir()
    toy.write_bytes(BODY[:-1])
    (file,) = PUBLIC_SETS["toy"].files
    assert PUBLIC_SETS["toy"].usable and not is_intact(file, toy)
    PUBLIC_SETS["toy"].get(base=serve())
    assert toy.read_bytes() == BODY
    assert is_intact(file, toy)


def test_the_next_address_is_tried(monkeypatch, tmp_path, serve):
    here = serve()
    nowhere = serve(files={})
    addresses = (f"{nowhere}/a.bin", f"{here}/b.bin")
    checksum = hashlib.sha256(BODY).hexdigest()
    path = replace(
        monkeypatch, tmp_path, PublicFile("toy.bin", checksum, None, addresses)
    )
    assert PUBLIC_SETS["toy"].get() == [path]


def test_the_content_of_bz2_is_what_is_checked(monkeypatch, tmp_path, serve):
    checksum = hashlib.sha256(TEXT).hexdigest()
    file = PublicFile("toy.bz2", checksum, also=("toy",), unpacked=True)
    path = replace(monkeypatch, tmp_path, file)
    packed = {"/toy.bz2": bz2.compress(TEXT, 1)}
    assert PUBLIC_SETS["toy"].get(base=serve(files=packed)) == [path]
    path.unlink()
    path.with_name("toy").write_bytes(TEXT)  # the plain text does as well
    log = []
    assert PUBLIC_SETS["toy"].get(base=serve(log)) == [path.with_name("toy")]
    assert log == []
    assert download.find("toy", "toy.bz2") == path.with_name("toy")


def test_errors_are_one_clear_line(toy, serve, tmp_path):
    cases = [
        (
            serve(files={}),
            r"toy\.bin could not be downloaded: http://\S+: HTTP 404 Not Found",
        ),
        ("http://127.0.0.1:1", "Connection refused"),
        ("nonsense", "unknown url type"),
    ]
    for base, message in cases:
        with pytest.raises(DataError, match=message) as error:
            PUBLIC_SETS["toy"].get(base=base)
        assert "\n" not in str(error.value)
    toy.parent.rmdir()
    toy.parent.write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"toy: cannot write .* File exists"):
        PUBLIC_SETS["toy"].get(base="http://127.0.0.1:1")


def test_a_silent_server(toy, monkeypatch):
    monkeypatch.setattr(download, "_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        base = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(
            DataError, match=r"toy\.bin could not be downloaded: .* timed out"
        ):
            PUBLIC_SETS["toy"].get(base=base)


def test_finding_files(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDBLEND_DATA", str(tmp_path))
    name = "train-images-idx3-ubyte.gz"
    message = f"mnist: {name} is not in {tmp_path}/mnist; get it with: fedblend data"
    with pytest.raises(MissingDataError, match=message):
        download.find("mnist", name)
    with pytest.raises(FileNotFoundError, match="build one with LEAF"):
        download.find("femnist", "femnist_leaf_300writers.npz")
    with pytest.raises(DataError, match="celeba_smile: cannot be downloaded: CelebA"):
        PUBLIC_SETS["celeba_smile"].get()
    (tmp_path / "libsvm").mkdir()
    (tmp_path / "libsvm" / "a6a.bz2").write_bytes(b"")
    assert download.find("a6a", "a6a").name == "a6a.bz2"
    assert PUBLIC_SETS["a6a"].usable
    assert not PUBLIC_SETS["w6a"].usable


def test_files_of_a_package_are_found_after_those_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDBLEND_DATA", str(tmp_path / "home"))
    installed, own = tmp_path / "installed", tmp_path / "home" / "toy"
    checksum = hashlib.sha256(TEXT).hexdigest()
    file = PublicFile("toy.gz", checksum, unpacked=True)
    entry = PublicSet("toy", "toy", (file,), installed=str(installed))
    assert not entry.usable
    for folder, level in ((installed, 1), (own, 9)):  # packed in different ways
        folder.mkdir(parents=True)
        (folder / "toy.gz").write_bytes(gzip.compress(TEXT, level, mtime=level))
        assert entry.path(file) == folder / "toy.gz"
        assert is_intact(file, folder / "toy.gz")
    (own / "toy.gz").write_bytes(gzip.compress(TEXT + b"."))
    assert not is_intact(file, own / "toy.gz")


def test_the_home(monkeypatch):
    monkeypatch.delenv("FEDBLEND_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert download.data_home() == Path("/cache/fedblend/data")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert download.data_home() == Path("/home/me/.cache/fedblend/data")
    monkeypatch.setenv("FEDBLEND_DATA", "~/mine")
    assert download.data_home() == Path("/home/me/mine")


@pytest.mark.parametrize("name", sorted(PUBLIC_SETS))
def test_the_list_is_well_formed(name):
    entry = PUBLIC_SETS[name]
    for file in (*entry.files, *entry.copies):
        assert len(file.checksum) in (32, 64)
        int(file.checksum, 16)
        assert all(address.endswith("/" + file.name) for address in file.addresses)
    assert entry.instruction or all(file.addresses for file in entry.files)


@pytest.mark.parametrize("name", sorted(PUBLIC_SETS))
def test_the_files_here_are_the_listed_ones(name, needs):
    needs(name)
    public = PUBLIC_SETS[name]
    for file in (*public.files, *public.copies):
        path = public.path(file)
        assert path is None or is_intact(file, path), path
