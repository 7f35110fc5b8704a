"""What a command may write over: a folder that this kind of command made, with nothing else in it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sparsekv.util.disk import disk_error, placed
from sparsekv.util.errors import SparseKVError

SHOWN = 4


def read_marker(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none or something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def files_below(folder: Path) -> list[str]:
    """Files and links anywhere below a folder, relative to it; links are not followed."""
    found = []
    for where, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(where) / name).is_symlink()]
        found += [(Path(where) / name).relative_to(folder).as_posix() for name in (*files, *links)]
    return sorted(found)


def strangers(names: Sequence[str], own: Sequence[str], made: bool) -> list[str]:
    """The names that match none of the patterns `own`; all, where another kind of command made the folder."""
    return [n for n in names if not any(fnmatchcase(n, pattern) for pattern in own)] or ([] if made else list(names))


def refuse_others(where: str, what: str, others: Sequence[str]) -> None:
    """Raises SparseKVError, with the first names, where there are any."""
    if others:
        more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        raise SparseKVError(f"{where!r} holds something else than {what}: {', '.join(others[:SHOWN])}{more}; choose "
                            "another --output")


@dataclass(frozen=True)
class OutputKind:
    """What one kind of command writes. what: in words; own: patterns of its files; made: whether a folder's marker
    says that this kind of command wrote it."""

    what: str
    own: tuple[str, ...]
    made: Callable[[Path], bool]

    def check(self, folder: Path) -> None:
        """Raises SparseKVError unless all in the folder was written by this kind of command."""
        refuse_others(str(folder), self.what, self.others(folder))

    def others(self, folder: Path) -> list[str]:
        """Files in the folder that this kind of command did not write."""
        return strangers(files_below(folder), self.own, self.made(folder))

    def found(self, path: Path, overwrite: bool, otherwise: str = "") -> bool:
        """Return whether there is an old output at `path` that may be replaced. Raises SparseKVError for a file, for a
        folder with anything else, and for an existing one without `overwrite`; `otherwise` says what else helps."""
        if path.exists() and not path.is_dir():
            raise SparseKVError(f"the output {str(path)!r} is a file; expected a new folder")
        if not path.is_dir() or not any(path.iterdir()):
            return False
        if not overwrite:
            raise SparseKVError(f"the output {str(path)!r} already exists; add --overwrite to replace it{otherwise}")
        self.check(path)
        return True

    def prepare(self, output: str | Path, overwrite: bool, keep: Sequence[str] = ()) -> Path:
        """An empty folder at `output`, but for the files `keep`. What this kind of command wrote there before is set
        aside, as `.NAME.old` beside it, until `done`. Raises SparseKVError for a folder with anything else, and for an
        existing one without `overwrite`."""
        path = Path(output)
        if path.is_symlink():
            path = path.resolve()
            print(f"the output {str(output)!r} is a link to {str(path)!r}", file=sys.stderr)
        try:
            there = self.found(path, overwrite)
            held = {name: (path / name).read_bytes() for name in keep} if there else {}
            if there:
                self._set_aside(path)
            path.mkdir(parents=True, exist_ok=True)
            for name, data in held.items():
                with placed(path / name) as temporary:
                    temporary.write_bytes(data)
        except OSError as error:
            raise disk_error(error, path) from error
        return path

    def done(self, output: str | Path) -> None:
        """The new output is whole: the old one goes."""
        old = _aside(Path(output))
        if old.is_dir() and not old.is_symlink() and self.made(old) and not self.others(old):
            shutil.rmtree(old, ignore_errors=True)

    def _set_aside(self, path: Path) -> None:
        here, old = Path.cwd(), _aside(path)
        if os.path.lexists(old) and (old.is_symlink() or not old.is_dir() or not self.made(old)):
            raise SparseKVError(f"{str(old)!r}, where the old output would be kept, is something else than "
                                f"{self.what}; move it away, or choose another --output")
        if path.resolve() in (here, *here.parents):
            raise SparseKVError(f"the output {str(path)!r} is the current folder, which cannot be replaced; run the "
                                "command from another folder")
        if old.exists():  # an earlier replacing never came to its end: what it set aside is the whole one
            self.check(old)
            shutil.rmtree(path)
        else:
            os.replace(path, old)
            print(f"the old output is kept as {str(old)!r} until the new one is whole", file=sys.stderr)


def _aside(output: Path) -> Path:
    path = output.resolve()
    return path.with_name(f".{path.name}.old")
