"""Locks and temporary files: nothing that somebody else put in their place is followed, written or removed; and the
lock holds between users."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsekv.util.disk import only_writer, placed, write_text
from sparsekv.util.errors import SparseKVError
from sparsekv.util.output import OutputKind

NOBODY = 65534
MINE = "precious\n"


def link(place: Path, target: Path) -> None:
    place.symlink_to(target)


def hard_link(place: Path, target: Path) -> None:
    os.link(target, place)


def own_file(place: Path, _: Path) -> None:
    place.write_text(MINE)


def own_json(place: Path, _: Path) -> None:
    place.write_text('{"pid": 1}')


def folder(place: Path, _: Path) -> None:
    place.mkdir()


def pipe(place: Path, _: Path) -> None:
    os.mkfifo(place)


@pytest.mark.parametrize("plant", [link, hard_link, own_file, own_json, folder, pipe])
def test_what_lies_where_the_lock_would_be_stays(plant: Callable[[Path, Path], None], tmp_path) -> None:
    thesis, lock = tmp_path / "thesis.tex", tmp_path / ".out.lock"
    thesis.write_text(MINE)
    plant(lock, thesis)
    before = lock.lstat()
    with pytest.raises(SparseKVError, match=r"is something that sparsekv did not make; move it away"):
        with only_writer(tmp_path / "out"):
            pass
    assert thesis.read_text() == MINE and os.path.samestat(before, lock.lstat())
    assert before.st_size == lock.lstat().st_size


def test_a_dangling_link_in_the_locks_place_is_not_filled(tmp_path) -> None:
    (tmp_path / ".out.lock").symlink_to(tmp_path / "new")
    with pytest.raises(SparseKVError, match="sparsekv did not make"), only_writer(tmp_path / "out"):
        pass
    assert not (tmp_path / "new").exists()


def test_a_lock_whose_holder_is_dead_is_taken_over(tmp_path) -> None:
    lock = tmp_path / ".out.lock"
    lock.write_text(json.dumps({"host": "h", "pid": 1, "since": "then"}))
    with only_writer(tmp_path / "out"):
        assert json.loads(lock.read_text())["pid"] == os.getpid()
        with pytest.raises(SparseKVError, match=f"being written by process {os.getpid()} on"):
            with only_writer(tmp_path / "out"):
                pass
    assert not lock.exists()


def test_a_lock_without_a_name_is_of_a_holder_that_died(tmp_path) -> None:
    (tmp_path / ".out.lock").touch()
    with only_writer(tmp_path / "out"):
        assert json.loads((tmp_path / ".out.lock").read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_planted_temporary_names_are_not_followed(tmp_path) -> None:
    thesis = tmp_path / "thesis.tex"
    thesis.write_text(MINE)
    for name in (".a.json.tmp", ".a.json.sparsekv-0.tmp"):
        (tmp_path / name).symlink_to(thesis)
    own = tmp_path / ".a.json.mine.tmp"
    own.write_text(MINE)
    write_text(tmp_path / "a.json", "{}")
    assert thesis.read_text() == own.read_text() == MINE and (tmp_path / "a.json").read_text() == "{}"
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        ".a.json.mine.tmp", ".a.json.sparsekv-0.tmp", ".a.json.tmp", "a.json", "thesis.tex"]


def test_what_a_killed_writer_left_goes_and_a_living_ones_file_stays(tmp_path) -> None:
    path = tmp_path / "a.json"
    if (child := os.fork()) == 0:
        with placed(path) as temporary:
            temporary.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(list(tmp_path.glob(".a.json.sparsekv-*.tmp"))) == 1
    with placed(path) as first:
        first.write_text("first")
        write_text(path, "second")
        assert first.read_text() == "first"
    assert path.read_text() == "first" and [f.name for f in tmp_path.iterdir()] == ["a.json"]


def test_names_as_long_as_can_be_and_of_any_letters(tmp_path) -> None:
    for name in ("a" * 255, "é" * 127, "*[?].json", "\udcff"):
        write_text(tmp_path / name, "x")
        assert (tmp_path / name).read_text() == "x"
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("plant", [link, own_file, folder])
def test_what_lies_where_the_old_output_would_be_kept_stays(plant: Callable[[Path, Path], None], tmp_path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    for made in (out, other):
        made.mkdir()
        (made / "mark").touch()
    plant(tmp_path / ".out.old", other)
    kind = OutputKind("a test's output", ("mark",), lambda folder: (folder / "mark").is_file())
    with pytest.raises(SparseKVError, match=r"is something else than a test's output; move it away"):
        kind.prepare(out, True)
    assert (out / "mark").is_file() and (other / "mark").is_file() and os.path.lexists(tmp_path / ".out.old")


def as_nobody(work: Callable[[], None]) -> str:
    """What a process of another user says of this work: `done`, or the sentence that it is refused with."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.umask(0o077)
            work()
            os.write(write, b"done")
        except SparseKVError as error:
            os.write(write, str(error).encode())
        except BaseException as error:
            os.write(write, repr(error).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        found = said.read()
    os.waitpid(child, 0)
    return found


@pytest.mark.skipif(os.getuid() != 0, reason="takes another user's name")
@pytest.mark.parametrize("sticky", [0o777, 0o1777])
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_two_users_do_not_write_to_one_output(umask: int, sticky: int, tmp_path) -> None:
    place, out = tmp_path / "shared", tmp_path / "shared" / "out"
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == 0 and str(above).startswith("/tmp/"):
            above.chmod(0o755)
    place.mkdir()
    out.mkdir()
    place.chmod(sticky)
    out.chmod(0o777)

    def enter() -> None:
        with only_writer(out):
            pass

    before = os.umask(umask)
    try:
        with only_writer(out):
            assert f"being written by process {os.getpid()} on" in as_nobody(enter)
        assert as_nobody(enter) == "done" and not list(place.glob(".*"))
        place.chmod(0o755)  # nothing can be written beside the folder
        with only_writer(out):
            assert "being written by process" in as_nobody(enter)
        ready, go = os.pipe(), os.pipe()

        def hold() -> None:
            with only_writer(out):
                os.write(ready[1], b"x")
                os.read(go[0], 1)

        if (child := os.fork()) == 0:
            os.setuid(NOBODY)
            hold()
            os._exit(0)
        os.read(ready[0], 1)
        with pytest.raises(SparseKVError, match="being written by another command"):
            enter()
        os.write(go[1], b"x")
        os.waitpid(child, 0)
        enter()
        lock = place / ".out.lock"  # a dead holder's, of another user
        lock.write_text(json.dumps({"host": "h", "pid": 1, "since": "then"}))
        lock.chmod(0o644)
        assert as_nobody(enter) == "done" and lock.exists()
        lock.chmod(0o600)
        assert "whose lock" in as_nobody(enter)
    finally:
        os.umask(before)


def test_many_take_one_lock_and_one_has_it(tmp_path) -> None:
    """Processes that enter and leave at once: never two inside, and no sentence but that of a holder."""
    inside, children = tmp_path / "inside", []
    for _ in range(6):
        if (child := os.fork()) == 0:
            status, ends = 0, time.monotonic() + 1.0
            while time.monotonic() < ends:
                try:
                    with only_writer(tmp_path / "out"):
                        os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
                        inside.unlink()
                except SparseKVError as error:
                    status |= "being written by" not in str(error)
                except BaseException:
                    status |= 2
            os._exit(status)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 6
    assert list(tmp_path.iterdir()) == []


def test_a_holder_killed_at_any_moment_leaves_no_lock_that_blocks(tmp_path) -> None:
    for _ in range(40):
        if (child := os.fork()) == 0:
            while True:
                with only_writer(tmp_path / "out"):
                    pass
        time.sleep(random.random() / 50)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with only_writer(tmp_path / "out"):
            pass
        assert list(tmp_path.iterdir()) == []
