"""Reading and writing files: atomic writes, JSON, safetensors, checks of free space, clear errors."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from safetensors.torch import save_file
from torch import Tensor

from headstart.heads.errors import DataError, DiskFullError, HeadstartError, StorageError

#: most bytes of a JSON file; the manifest of a store of millions of samples is far smaller
MAX_JSON_BYTES = 1 << 30
#: test of `stat` → what a path is, other than a regular file
KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading bytes. Anything else is refused: reading from a pipe or a device may never end.

    Raises: OSError whose `strerror` says what the path is, if it is no regular file (or a link to one).
    """
    require_regular(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        _refuse_special(path, os.fstat(descriptor).st_mode)  # another file may have taken its place
        yield file


def require_regular(path: Path) -> None:
    """The check of `open_regular`, for files that a library opens by name. Raises: OSError as it does."""
    _refuse_special(path, os.stat(path).st_mode)


def _refuse_special(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for test, name in KINDS if test(mode)), "no file")
        raise OSError(errno.EINVAL, f"it is {kind}, expected a regular file", str(path))


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a regular file. Raises: OSError as `open_regular` does, or for more than `limit` bytes."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EINVAL, f"it holds more than {limit} bytes", str(path))
    return content


def short_path(path: Path | str, most: int = 300) -> str:
    """A path for an error message, cut if it is long."""
    name = str(path)
    return name if len(name) <= most else f"{name[: most // 3]}… ({len(name)} characters)"


@contextmanager
def explain_read(path: Path | str, kind: type[HeadstartError] = DataError) -> Iterator[None]:
    """Turn errors of reading `path` into one of this kind that names the path and the cause."""
    try:
        yield
    except FileNotFoundError:
        raise kind(f"{short_path(path)}: no such file") from None
    except OSError as error:
        raise kind(f"{short_path(path)}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:  # a null character in the name
        if "null" not in str(error):
            raise
        raise kind(f"{short_path(path)!r}: no name that a file can have ({error})") from error


def is_file(path: Path | str) -> bool:
    """Whether `path` is a regular file. False also if no file can have that name, or we may not look there."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def parse_json(text: str, where: str, expected: str = "", lines: bool = False) -> Any:
    """The JSON value of `text`.

    Args:
        expected: added to the message after the cause, e.g. ", expected one object per line".
        lines: name the line in the message.
    Raises: DataError naming `where`: no JSON, nested too deeply, or an integer with thousands of digits.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f":{error.lineno}" if lines else ""
        raise DataError(f"{where}{line}: not valid JSON ({error.msg} at column {error.colno}){expected}") from error
    except RecursionError:
        raise DataError(f"{where}: JSON nested too deeply{expected}") from None
    except ValueError as error:  # Python converts no integer of more than 4,300 digits
        raise DataError(f"{where}: not valid JSON ({str(error).split(':')[0]}){expected}") from error


def _error_number(error: Exception) -> int | None:
    """The errno of a failed system call, None for other errors.

    Libraries in Rust (safetensors, tokenizers) raise exceptions of their own, which hold it in their text only.
    """
    if isinstance(error, OSError):
        return error.errno
    match = None if isinstance(error, HeadstartError) else re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None


@contextmanager
def explain_disk(path: Path, another: str = "run_dir=…") -> Iterator[None]:
    """Turn errors of writing to `path` into a StorageError that names the path and the remedy.

    A full disk is a DiskFullError. No permission, too large a file, or a name or kind that a path cannot have is a
    plain StorageError. It does not matter which library reports the failed system call.

    Args: another: option that names another place, for the message.
    """
    try:
        yield
    except Exception as error:
        number = _error_number(error)
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                f"{path}: the disk is full; nothing already written was lost. Free space, or point the run "
                f"elsewhere with {another}, then run the same command again: it continues."
            ) from error
        # EFBIG is a limit on the size of one file: unlike with a full disk, waiting for room does not help
        if number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG):
            raise StorageError(
                f"{path}: cannot be written ({os.strerror(number)}). Choose another place with {another}"
            ) from error
        if number in (errno.ENAMETOOLONG, errno.ELOOP):
            raise StorageError(
                f"{short_path(path)}: cannot be a path here ({os.strerror(number)}). "
                f"Choose another place with {another}"
            ) from error
        if number in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST):
            raise StorageError(
                f"{path}: a file stands where a directory is expected, or the other way round ({error}). Move it away, "
                f"or choose another place with {another}"
            ) from error
        raise


def umask() -> int:
    """Permissions that new files of this process do not get."""
    try:  # `os.umask` can only be read by setting it, for a moment also for other threads
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))
    except (OSError, StopIteration, ValueError, IndexError):
        mask = os.umask(0o077)
        os.umask(mask)
        return mask


def usual_permissions(path: Path) -> None:
    """Give a file the permissions of any new file: safetensors and tempfile make files that only the owner can read."""
    path.chmod(0o666 & ~umask())


def atomic_write(path: Path, write: Callable[[Path], None]) -> None:
    """Call `write(temporary_path)`, then rename it to `path`: readers see the old file or the new one, never a part."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(temporary)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            usual_permissions(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text, atomically. Characters that UTF-8 cannot hold (half a surrogate pair) are escaped."""

    def write(place: Path) -> None:
        place.write_text(text, encoding="utf-8", errors="backslashreplace")

    atomic_write(path, write)


def json_text(value: Any) -> str:
    """The text that `write_json` writes, with JSON escapes for characters that UTF-8 cannot hold."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json_text(value))


def read_json(path: Path) -> Any:
    """The value of a JSON file. Raises DataError naming file and line if it is missing, unreadable or malformed."""
    with explain_read(path):
        content = read_bounded(Path(path), MAX_JSON_BYTES)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    return parse_json(text, str(path), lines=True)


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Save copies of the tensors, atomically: safetensors refuses tensors that share memory."""
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    atomic_write(path, lambda p: save_file(copies, p, metadata={"format": "pt"}))


def require_disk(path: Path, needed_bytes: int, what: str) -> None:
    """Raise StorageError if the disk of `path` has less than `needed_bytes` free, or `path` cannot be a directory.

    Ask before work starts. `what` says in the message what needs the space.
    """
    place = Path(path).absolute()
    with explain_disk(path), suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(place)  # a name that is too long
    while not os.path.lexists(place):
        place = place.parent
    with explain_disk(path):
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise StorageError(
            f"{path}: {what} needs about {needed_bytes / 2**30:.2f} GiB and the disk has {free / 2**30:.2f} GiB free. "
            "Free space, or point the run elsewhere with run_dir=…"
        )


def delete(path: Path) -> None:
    """Remove a file or a directory, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(directory: Path) -> None:
    """Delete temporary files of `atomic_write` whose process is gone.

    They can be large, and a head's directory is uploaded with all that is in it.
    """
    for path in directory.glob(".*.tmp"):
        match = re.fullmatch(r"\..+\.(\d+)\.tmp", path.name)
        if match and not _runs(int(match[1])):
            delete(path)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return True


def unused(path: Path) -> Path:
    """`path`, or the first of `path-2`, `path-3`, … that does not exist."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def set_aside(run_dir: Path, step: str, made: Sequence[Path]) -> Path | None:
    """Move what a step has made to `run_dir/previous/N-STEP` (N = 1, 2, …), so that no work is lost.

    Returns: that directory, None if nothing of `made` exists.
    """
    there = [path for path in made if path.exists()]
    if not there:
        return None
    with explain_disk(run_dir):
        number = 1
        while (place := run_dir / "previous" / f"{number}-{step}").exists():
            number += 1
        place.mkdir(parents=True)
        for path in there:
            shutil.move(path, place / path.name)
    return place


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
