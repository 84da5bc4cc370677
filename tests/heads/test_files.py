"""A disk that cannot take a file is explained, whichever exception the writer made of it."""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import BPE

from headstart.heads import files
from headstart.heads.errors import DataError, DiskFullError, StorageError
from headstart.heads.files import (
    atomic_write,
    explain_disk,
    open_regular,
    read_bounded,
    read_json,
    remove_leftovers,
    require_disk,
    sha256_file,
    write_json,
    write_safetensors,
)


def wrapped(number: int) -> SafetensorError:
    """As safetensors 0.8.0 words it."""
    return SafetensorError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("make", [lambda n: OSError(n, os.strerror(n)), wrapped], ids=["OSError", "SafetensorError"])
def test_no_space_left_is_a_full_disk(tmp_path: Path, number: int, make) -> None:
    with pytest.raises(DiskFullError, match=rf"^{tmp_path}: the disk is full; .*run_dir=…") as caught:
        with explain_disk(tmp_path / "run"), explain_disk(tmp_path):  # the innermost place is the one that is named
            raise make(number)
    assert str(number) in str(caught.value.__cause__)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG])
@pytest.mark.parametrize("make", [lambda n: OSError(n, os.strerror(n)), wrapped], ids=["OSError", "SafetensorError"])
def test_a_file_that_may_not_be_written_is_no_full_disk(tmp_path: Path, number: int, make) -> None:
    with pytest.raises(StorageError) as caught, explain_disk(tmp_path):
        raise make(number)
    assert type(caught.value) is StorageError
    assert str(caught.value).startswith(f"{tmp_path}: cannot be written ({os.strerror(number)}). ")


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O"), wrapped(errno.EIO), SafetensorError("header too large")])
def test_any_other_error_stays_what_it_is(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explain_disk(tmp_path):
        raise error
    assert caught.value is error


def test_a_tensor_file_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "head.safetensors"
    write_safetensors(path, {"w": torch.ones(2)})

    def full(*_, **__) -> None:
        raise wrapped(errno.ENOSPC)

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(DiskFullError, match=f"{path}: the disk is full"):
        write_safetensors(path, {"w": torch.zeros(2)})
    assert load_file(path)["w"].tolist() == [1.0, 1.0] and os.listdir(tmp_path) == [path.name]


def test_a_tensor_file_beyond_the_limit_on_file_sizes(tmp_path: Path) -> None:
    """What the installed safetensors raises of a failed write, not what it was seen to raise once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(StorageError, match=r"head\.safetensors: cannot be written \(File too large\)"):
            write_safetensors(tmp_path / "head.safetensors", {"w": torch.ones(1 << 20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


def test_a_tokenizer_on_a_full_disk(tmp_path: Path) -> None:
    """tokenizers writes in place, so that its own error of a full device can be had."""
    full = Path("/dev/full")
    if not full.exists() or not stat.S_ISCHR(full.stat().st_mode):
        pytest.skip("no /dev/full here")
    with pytest.raises(DiskFullError, match="the disk is full"), explain_disk(tmp_path):
        Tokenizer(BPE()).save(str(full))


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def torn(place: Path) -> None:
        place.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskFullError):
        atomic_write(tmp_path / "state.json", torn)
    assert os.listdir(tmp_path) == []


def test_room_is_asked_of_the_directory_that_will_hold_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(files.shutil, "disk_usage", lambda place: asked.append(place) or SimpleNamespace(free=100))
    require_disk(tmp_path / "not" / "yet", 100, "the run")
    assert asked == [tmp_path]
    with pytest.raises(StorageError, match="the run needs about .* GiB free"):
        require_disk(tmp_path / "not" / "yet", 101, "the run")


@pytest.mark.parametrize("below", ["", "run", "a/run"])
def test_no_room_is_asked_of_a_file(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="a file stands where a directory is expected.*run_dir="):
        require_disk(tmp_path / "file" / below, 0, "the run")
    assert (tmp_path / "file").is_file()


def make_special(path: Path, kind: str) -> None:
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a directory":
        path.mkdir()
    elif kind == "a socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["a pipe", "a directory", "a socket", "a device"])
@pytest.mark.parametrize("read", [lambda p: read_bounded(p, 10), sha256_file])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str, read) -> None:
    """A pipe that nobody writes to would be waited for, /dev/zero would never end."""
    path = tmp_path / "config.json"
    make_special(path, kind)
    with pytest.raises(OSError, match=f"it is {kind}, expected a regular file"):
        read(path)
    with pytest.raises(DataError, match=f"{path}: cannot be read .it is {kind}, expected a regular file"):
        read_json(path)


def test_a_file_is_read_up_to_its_bound_and_through_links(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"0123456789")
    (tmp_path / "link").symlink_to("real")
    assert read_bounded(tmp_path / "link", 10) == b"0123456789"
    with pytest.raises(OSError, match="it holds more than 9 bytes"):
        read_bounded(tmp_path / "link", 9)
    with open_regular(tmp_path / "link") as file:
        assert file.read(4) == b"0123"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b"9" * 5000, "not valid JSON"),
        (b"\xff", "not UTF-8"),
        (b"{", ":1: not valid"),
    ],
)
def test_json_that_cannot_be_parsed_is_told(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077, 0o002])
def test_files_get_the_permissions_that_the_umask_leaves(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        assert files.umask() == mask
        files.write_json(tmp_path / "new" / "a.json", {})
        write_safetensors(tmp_path / "new" / "w.safetensors", {"w": torch.ones(2)})
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()} == {0o666 & ~mask}
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) & 0o777 == 0o777 & ~mask


def test_a_name_that_is_too_long_is_told_before_work_starts(tmp_path: Path) -> None:
    for check in (lambda path: require_disk(path, 0, "the run"), lambda path: write_json(path, {})):
        with pytest.raises(StorageError, match=r"\(5\d+ characters\): cannot be a path here") as caught:
            check(tmp_path / ("x" * 5000))
        assert len(str(caught.value)) < 500


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    gone = 2**22 + 1  # beyond the kernel's largest process id
    for name in (f".model.safetensors.{gone}.tmp", f".config.json.{os.getpid()}.tmp", "model.safetensors", ".a.tmp"):
        (tmp_path / name).write_text("x")
    (tmp_path / f".step-00000002.{gone}.tmp").mkdir()
    (tmp_path / f".step-00000002.{gone}.tmp/head").write_text("x")
    remove_leftovers(tmp_path)
    kept = [".a.tmp", f".config.json.{os.getpid()}.tmp", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
