"""Files that are whole or not there, folders that one command at a time writes to, and what a disk that fails is
called."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from sparsekv.foundation.errors import SparseKVError

FAILS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOENT, errno.ENOTDIR,
         errno.EISDIR, errno.EFBIG, errno.ESTALE, errno.ENAMETOOLONG, errno.ELOOP, errno.EXDEV, errno.ENODEV)
"""Errors of a place, which another place, or room in it, would not have."""
UNLOCKABLE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


def disk_error(error: Exception, path: str | Path, verb: str = "write") -> SparseKVError:
    """One sentence with the path, the reason and the free space there."""
    place = Path(path)
    reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
    return SparseKVError(f"could not {verb} {str(place)!r} ({reason}; {free_space(place)}); choose a place that "
                         "exists, is yours to write to and has room")


def free_bytes(path: Path) -> int:
    """Of the nearest folder that there is."""
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def free_space(path: Path) -> str:
    """The same in words."""
    try:
        return f"{free_bytes(path) / 1e9:.2f} GB free"
    except OSError:
        return "free space unknown"


@contextlib.contextmanager
def placed(path: Path) -> Iterator[Path]:
    """A name beside the path, `.NAME.tmp`, renamed to it when the block has written it whole; of a link, beside what
    it points to; a device is written to as it is. Raises SparseKVError where the disk fails."""
    path = path.resolve() if path.is_symlink() else path
    device = path.exists() and not path.is_file() and not path.is_dir()
    temporary = path if device else path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if not device:
            os.replace(temporary, path)
    except OSError as error:
        raise disk_error(error, path) from error
    finally:
        if not device:
            with contextlib.suppress(OSError):
                temporary.unlink()


def check_place(path: str | Path) -> None:
    """Raises SparseKVError where a file cannot be written: a folder stands there, or its own folder takes no file."""
    path = Path(path).absolute()
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    reason = (errno.EISDIR if path.is_dir() else errno.ENOTDIR if not folder.is_dir() else
              0 if os.access(path if path.exists() else folder, os.W_OK) else errno.EACCES)
    if reason:
        raise disk_error(OSError(reason, os.strerror(reason)), path)


def write_text(path: Path, text: str) -> None:
    """A file in UTF-8, whole or not at all. Raises SparseKVError."""
    with placed(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def only_writer(output: str | Path) -> Iterator[None]:
    """Hold the lock of an output folder: a file beside it, `.NAME.lock`, with host, process and time, that the kernel
    releases when its holder dies; where nothing can be written beside the folder, the folder itself.

    Raises SparseKVError, with that host and process, where another command, or another thread, holds it."""
    path = Path(output).resolve()
    file = path.with_name(f".{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _locked(file, path)
    except OSError as error:
        raise disk_error(error, path) from error
    try:
        yield
    finally:
        if handle is not None:
            with contextlib.suppress(OSError):
                if os.fstat(handle).st_ino == file.stat().st_ino:
                    file.unlink()
            os.close(handle)


def _locked(file: Path, folder: Path) -> int | None:
    """An open file that is locked; None where the file system has no locks."""
    while True:
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or not folder.is_dir():
                raise
            handle = os.open(folder, os.O_RDONLY)
            file = folder
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _holder(file)
            os.close(handle)
            raise SparseKVError(f"the output {str(folder)!r} is being written by {holder}; wait for it, or choose "
                                "another --output") from error
        except OSError as error:
            os.close(handle)
            if error.errno in UNLOCKABLE:
                return None
            raise
        try:
            if os.fstat(handle).st_ino == file.stat().st_ino:  # else its holder removed it just before it let go
                break
        except FileNotFoundError:
            pass
        os.close(handle)
    if file != folder:
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since":
                                      datetime.datetime.now().isoformat(" ", "seconds")}).encode(), 0)
    return handle


def _holder(file: Path) -> str:
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        return f"process {said['pid']} on {said['host']} since {said['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another command"
