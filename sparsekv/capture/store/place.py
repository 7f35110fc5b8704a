"""Where a store lies: a local folder, or a folder behind any fsspec URL."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from sparsekv.artifacts.checks import parse_object
from sparsekv.capture.store.shard import HASH_BLOCK, LocalShard, RemoteShard, checksum, digest_all
from sparsekv.util.disk import free_bytes, nearest, write_text
from sparsekv.util.errors import SparseKVError
from sparsekv.util.records import as_json


def place(path: str | Path) -> Place:
    """Raises SparseKVError for a URL whose protocol is unknown."""
    text = str(path)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    return RemotePlace(text) if "://" in text else Place(Path(text))


class Place:
    """A local folder. What is renamed into it is whole; JSON files change in one step."""

    root: Any

    def __init__(self, root: Path):
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def make(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        """Entries of the folder; empty where there is none. Raises SparseKVError where a file is in the way."""
        if self.root.exists() and not self.root.is_dir():
            raise SparseKVError(f"{str(self)!r} is a file; expected a folder")
        return sorted(os.listdir(self.root)) if self.root.is_dir() else []

    def remove(self, name: str) -> None:
        """Remove an entry, a file or a folder; nothing where there is none."""
        entry = self.root / name
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """None where there is no such file; SparseKVError where it is damaged."""
        file = self.root / name
        return parse_object(file.read_bytes(), repr(str(file))) if file.is_file() else None

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        write_text(self.root / name, encode(content))

    def scratch(self, document: str) -> Path:
        """An empty local folder in which a document is put together."""
        folder: Path = self.root / f".{document}.tmp"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()  # where the store itself has gone, nothing is made again
        return folder

    def commit(self, folder: Path, document: str) -> None:
        """Make a finished document visible, all at once."""
        self.remove(document)
        os.replace(folder, self.root / document)

    def size(self, name: str) -> int | None:
        file = self.root / name
        return file.stat().st_size if file.is_file() else None

    def checksum(self, name: str) -> str:
        return checksum(self.root / name)

    def open_shard(self, name: str) -> LocalShard | RemoteShard:
        """For reading slices; raises OSError, SafetensorError or ValueError for what is no shard."""
        return LocalShard(self.root / name)

    def writable(self) -> bool:
        """False where it is certain that nothing can be written."""
        return os.access(nearest(self.root), os.W_OK)

    def free(self) -> int | None:
        """Free bytes, or None where that is unknown."""
        return free_bytes(self.root)


class RemotePlace(Place):
    """A folder behind an fsspec URL. A document is put together locally, then uploaded; `document.json` goes last, so
    that a document without it is not there yet."""

    def __init__(self, url: str):
        import fsspec

        try:
            self.fs, self.folder = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError, OSError) as error:
            raise SparseKVError(f"the store {url!r} cannot be reached: {error}") from error
        self.url = url
        self.root = None

    def __str__(self) -> str:
        return self.url

    def _at(self, name: str) -> str:
        return f"{self.folder.rstrip('/')}/{name}"

    def make(self) -> None:
        self.fs.makedirs(self.folder, exist_ok=True)

    def names(self) -> list[str]:
        self.fs.invalidate_cache()
        if not self.fs.exists(self.folder):
            return []
        return sorted(str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in self.fs.ls(self.folder, detail=False))

    def remove(self, name: str) -> None:
        if self.fs.exists(self._at(name)):
            self.fs.rm(self._at(name), recursive=True)

    def read_json(self, name: str) -> dict[str, Any] | None:
        found = self.fs.cat_file(self._at(name)) if self.fs.exists(self._at(name)) else None
        return None if found is None else parse_object(found, repr(f"{self.url.rstrip('/')}/{name}"))

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        self.fs.pipe_file(self._at(name), encode(content).encode())

    def scratch(self, document: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"sparsekv-{document}-"))

    def commit(self, folder: Path, document: str) -> None:
        self.remove(document)
        self.fs.makedirs(self._at(document), exist_ok=True)
        for file in sorted(folder.iterdir(), key=lambda f: (f.suffix == ".json", f.name)):
            self.fs.put_file(str(file), self._at(f"{document}/{file.name}"))
        shutil.rmtree(folder)

    def size(self, name: str) -> int | None:
        return int(self.fs.size(self._at(name))) if self.fs.exists(self._at(name)) else None

    def checksum(self, name: str) -> str:
        blocks = []
        with self.fs.open(self._at(name), "rb") as handle:
            while block := handle.read(HASH_BLOCK):
                blocks.append(hashlib.sha256(block).digest())
        return digest_all(blocks)

    def open_shard(self, name: str) -> LocalShard | RemoteShard:
        return RemoteShard(self.fs.open(self._at(name), "rb"))

    def writable(self) -> bool:
        return True

    def free(self) -> int | None:
        return None


def encode(content: dict[str, Any]) -> str:
    return as_json(content, sort_keys=True)
