"""Files that are whole or not there, folders that one command at a time writes to, and what a disk that fails is
called."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from sparsekv.util.errors import SparseKVError

FAILS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOENT, errno.ENOTDIR,
         errno.EISDIR, errno.EFBIG, errno.ESTALE, errno.ENAMETOOLONG, errno.ELOOP, errno.EXDEV, errno.ENODEV)
"""Errors of a place, which another place, or room in it, would not have."""
DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
UNLOCKABLE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
NAMELESS_SECONDS = 1.0
"""How long a lock that is held may have no holder's name in it [s]."""
LOCK_BYTES, LONGEST_LOCK, LONGEST_NAME = 512, 4096, 200
"""Of a lock file, what is read of one, and what is kept of a file's name in that of its temporary file [bytes]."""


def disk_error(error: Exception, path: str | Path, verb: str = "write") -> SparseKVError:
    """One sentence with the path, the reason and the free space there."""
    place = Path(path)
    reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
    return SparseKVError(f"could not {verb} {str(place)!r} ({reason}; {free_space(place)}); choose a place that "
                         "exists, is yours to write to and has room")


def nearest(path: str | Path) -> Path:
    """The path, or where nothing is there yet the nearest one above."""
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    return place


def free_bytes(path: Path) -> int:
    """Count the free bytes of the nearest folder that there is."""
    return shutil.disk_usage(nearest(path)).free


def free_space(path: Path) -> str:
    """Say in words how much is free there."""
    try:
        return f"{free_bytes(path) / 1e9:.2f} GB free"
    except OSError:
        return "free space unknown"


@contextlib.contextmanager
def placed(path: Path) -> Iterator[Path]:
    """A new file beside the path, `.NAME.sparsekv-….tmp`, renamed to it when the block has written it whole; of a link,
    beside what it points to; a device is written to as it is. What a writer that was killed left there is removed, and
    nothing else is followed or touched. Raises SparseKVError where the disk fails."""
    path = path.resolve() if path.is_symlink() else path
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            yield path
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        temporary, handle = _new_file(path)
    except OSError as error:
        raise disk_error(error, path) from error
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise disk_error(error, path) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
        os.close(handle)


def temporary_of(name: str) -> str:
    """The pattern of the temporary names of files of this name, itself a pattern."""
    return f".{name}.sparsekv-*.tmp"


TEMPORARIES = temporary_of("*")


def _ends(name: str) -> tuple[str, str]:
    """How the temporary names of files of this name begin and end."""
    if len(os.fsencode(name)) > LONGEST_NAME:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return f".{name}.sparsekv-", ".tmp"


def _new_file(path: Path) -> tuple[Path, int]:
    """A file that was not there before, open and locked for as long as its writer lives."""
    while True:
        temporary = path.with_name(secrets.token_hex(6).join(_ends(path.name)))
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        swept = False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            swept = not os.path.samestat(os.fstat(handle), temporary.lstat())
        except (BlockingIOError, FileNotFoundError):
            swept = True
        except OSError:  # no locks here: nobody sweeps
            pass
        if not swept:
            return temporary, handle
        os.close(handle)


def _sweep(path: Path) -> None:
    """Remove temporary files of this path whose writer is dead."""
    first, last = _ends(path.name)
    left: list[str] = []
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        left += [e.path for e in entries if e.name.startswith(first) and e.name.endswith(last)]
    for file in left:
        with contextlib.suppress(OSError):
            handle = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if stat.S_ISREG(os.fstat(handle).st_mode):
                    os.unlink(file)
            finally:
                os.close(handle)


def check_place(path: str | Path) -> None:
    """Raises SparseKVError where a file cannot be written: a folder stands there, or its own folder takes no file."""
    path = Path(path).absolute()
    folder = nearest(path.parent)
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
    """Hold the locks of an output folder: a file beside it, `.NAME.lock`, with host, process and time, and the folder
    itself where it is there already. The kernel releases both when their holder dies. One of them is enough where the
    other cannot be had: where nothing can be written beside the folder, and in another user's lock file.

    Raises SparseKVError, with that host and process, where another command, another thread or another user holds one
    of them, and where something else has the lock file's name, which is left as it is."""
    path = Path(output).resolve()
    if len(os.fsencode(path.name)) > LONGEST_NAME:
        raise SparseKVError(f"the output's name has {len(os.fsencode(path.name))} bytes, and with what is put beside "
                            f"it it may have {LONGEST_NAME}; choose a shorter one")
    file = path.with_name(f".{path.name}.lock")
    with contextlib.ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not held.enter_context(_lock_file(file, path)):
                held.enter_context(_read_only_lock(file, path, _holder(file)))
            held.enter_context(_read_only_lock(path, path, None))
        except OSError as error:
            raise disk_error(error, path) from error
        yield


@contextlib.contextmanager
def _lock_file(file: Path, folder: Path) -> Iterator[bool]:
    """Hold the lock file, with this process's name in it, and remove it when the block ends; yields False where it
    cannot be had. A lock that is held without a name is asked again for a second: its maker is about to write it."""
    made: list[os.stat_result] = []
    ends = time.monotonic() + NAMELESS_SECONDS

    def sign(handle: int) -> None:
        _record(handle, file)
        made[:] = [os.fstat(handle)]
        with contextlib.suppress(OSError):  # a full disk: who comes next is told less
            os.pwrite(handle, _who(), 0)

    while True:
        holder, lock = _holder(file), FileLock(file, timeout=0, mode=0o644, thread_local=False, on_acquired=sign)
        try:
            lock.acquire()
            break
        except Timeout as error:
            if not holder and time.monotonic() > ends and not os.path.lexists(file):  # it cannot be made
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT)) from error
            if holder or time.monotonic() > ends:
                raise _busy(folder, holder) from error
        except OSError as error:
            if error.errno not in (*DENIED, *UNLOCKABLE) or not (os.path.lexists(file) or folder.is_dir()):
                raise
            yield False
            return
        time.sleep(0.01)
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):
            if os.path.samestat(made[0], file.lstat()):
                file.unlink()
        lock.release()


@contextlib.contextmanager
def _read_only_lock(path: Path, folder: Path, holder: str | None) -> Iterator[None]:
    """Lock what cannot be written to, where it is there, can be opened and its file system has locks. holder: its name,
    if it is known."""
    handle = None
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if handle is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise _busy(folder, holder) from error
            except OSError as error:
                if error.errno not in UNLOCKABLE:
                    raise
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _who() -> bytes:
    """Host, process and time, always as many bytes: what is written over one another is never half of each."""
    since = datetime.datetime.now().isoformat(" ", "seconds")
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode().ljust(LOCK_BYTES)


def _holder(file: Path) -> str | None:
    """Name the writer of a lock file; None where it is not there or has no name yet. Raises SparseKVError for what is
    no lock of ours."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise SparseKVError(f"the output may be being written by another user, whose lock {str(file)!r} cannot be "
                            "read; choose another --output") from error
    except OSError as error:
        raise _foreign(file) from error
    try:
        record = _record(handle, file)
    finally:
        os.close(handle)
    return record and f"process {record['pid']} on {record['host']} since {record['since']}"


def _record(handle: int, file: Path) -> Any:
    """Read a lock file's record; None where it is empty. Raises SparseKVError for what is no lock of ours."""
    try:
        text = os.pread(handle, LONGEST_LOCK, 0) if stat.S_ISREG(os.fstat(handle).st_mode) else b"no file"
        record = json.loads(text) if text else None
        if record is None or {"host", "pid", "since"} == set(record):
            return record
    except (ValueError, TypeError, RecursionError):
        pass
    raise _foreign(file)


def _foreign(file: Path) -> SparseKVError:
    return SparseKVError(f"{str(file)!r}, which the output's lock would be, is something that sparsekv did not make; "
                         "move it away, or choose another --output")


def _busy(folder: Path, holder: str | None) -> SparseKVError:
    return SparseKVError(f"the output {str(folder)!r} is being written by {holder or 'another command'}; wait for it, "
                         "or choose another --output")
