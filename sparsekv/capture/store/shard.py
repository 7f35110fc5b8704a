"""One safetensors file, written in pieces from several threads and read in slices from anywhere."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int32: "I32", torch.int64: "I64"}
HASH_BLOCK = 1 << 24
DTYPES = {name: dtype for dtype, name in NAMES.items()}
LONGEST_HEADER = 100_000_000
"""What safetensors allows [bytes]."""


@functools.cache
def hashers() -> ThreadPoolExecutor:
    """The threads that hash."""
    return ThreadPoolExecutor(min(16, os.cpu_count() or 1), "sparsekv-hash")


os.register_at_fork(after_in_child=hashers.cache_clear)  # threads stay behind in the parent


class ShardWriter:
    """A safetensors file of tensors whose shapes are known before their contents, in the order they are given in.

    Pieces may come in any order and from any thread. Only a file all of whose pieces were written means anything; its
    bytes depend on the tensors and `says`, the file's metadata, alone.
    """

    def __init__(self, file: Path, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]],
                 says: dict[str, str] | None = None):
        self.file = file
        self._layout: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        header: dict[str, Any] = {"__metadata__": says} if says else {}
        at = 0
        for name, (dtype, shape) in tensors.items():
            size = math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
            self._layout[name] = (at, dtype, shape)
            at += size
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        self._start = 8 + len(encoded)
        self._handle = os.open(file, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_NOFOLLOW, 0o644)
        _write_all(self._handle, memoryview(len(encoded).to_bytes(8, "little") + encoded), 0)
        os.ftruncate(self._handle, self._start + at)

    def write(self, name: str, piece: Tensor, at: int = 0, *, axis: int = 0) -> None:
        """Write rows `at .. at + n` of tensor `name` along `axis` (0, or 1 for `[heads, tokens, ...]`); on the CPU."""
        offset, dtype, shape = self._layout[name]
        piece = piece.contiguous()
        if piece.dtype != dtype or piece.shape[axis + 1:] != shape[axis + 1:] or piece.shape[:axis] != shape[:axis]:
            raise ValueError(f"{name}: {piece.dtype} {tuple(piece.shape)} does not fit into {dtype} {shape}")
        row = math.prod(shape[axis + 1:]) * dtype.itemsize
        data = memoryview(piece.reshape(-1).view(torch.uint8).numpy().data)
        span = piece.shape[axis] * row
        for outer in range(math.prod(shape[:axis])):
            start = self._start + offset + outer * shape[axis] * row + at * row
            _write_all(self._handle, data[outer * span:(outer + 1) * span], start)

    def write_side_by_side(self, names: list[str], stacked: Tensor) -> None:
        """Write tensors that follow each other in the file in one piece: stacked `[len(names), *shape]`, on the CPU,
        with the tensors' bytes."""
        at, _, shape = self._layout[names[0]]
        for row, name in enumerate(names):
            place, dtype, its = self._layout[name]
            size = math.prod(shape) * stacked.element_size()
            if (place, its, dtype.itemsize) != (at + row * size, shape, stacked.element_size()):
                raise ValueError(f"{name} does not follow {names[0]} in {self.file.name}")
        if stacked.shape != (len(names), *shape):
            raise ValueError(f"{tuple(stacked.shape)} is not {len(names)} times {shape}")
        data = memoryview(stacked.contiguous().view(-1).view(torch.uint8).numpy().data)
        _write_all(self._handle, data, self._start + at)

    def close(self) -> dict[str, Any]:
        """Size and SHA-256 of the whole file."""
        os.close(self._handle)
        return {"bytes": self.file.stat().st_size, "sha256": checksum(self.file)}


def _write_all(handle: int, data: memoryview, at: int) -> None:
    while len(data):
        written = os.pwrite(handle, data, at)
        data, at = data[written:], at + written


def checksum(file: Path) -> str:
    """SHA-256 over the SHA-256 digests of the file's blocks of 16 MiB, which several cores hash at once."""
    handle = os.open(file, os.O_RDONLY)
    try:
        starts = range(0, os.fstat(handle).st_size, HASH_BLOCK)
        return digest_all(hashers().map(lambda at: hashlib.sha256(os.pread(handle, HASH_BLOCK, at)).digest(), starts))
    finally:
        os.close(handle)


def digest_all(blocks: Iterable[bytes]) -> str:
    """The checksum of a file from the digests of its blocks, in order."""
    return hashlib.sha256(b"".join(blocks)).hexdigest()


class LocalShard:
    """The tensors of a file as views of its mapping: no byte is read before it is looked at. says: its metadata."""

    def __init__(self, file: Path):
        shard = safe_open(str(file), framework="pt")
        self.says: dict[str, str] = shard.metadata() or {}
        self._tensors = {name: shard.get_tensor(name) for name in shard.keys()}

    def layout(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """dtype and shape of a tensor; KeyError where there is none."""
        return self._tensors[name].dtype, tuple(self._tensors[name].shape)

    def read(self, name: str, span: slice) -> Tensor:
        """A slice of a tensor's first axis."""
        return self._tensors[name][span]


class RemoteShard:
    """Reads slices of a safetensors file through an fsspec file object, by byte ranges. Raises ValueError for a header
    that is none."""

    def __init__(self, handle: Any):
        self._handle = handle
        length = int.from_bytes(handle.read(8), "little")
        if length > LONGEST_HEADER:
            raise ValueError(f"its header is {length} bytes long")
        self._header = json.loads(handle.read(length))
        if not isinstance(self._header, dict):
            raise ValueError("its header is no JSON object")
        self.says: dict[str, str] = self._header.pop("__metadata__", {})
        self._start = 8 + length

    def layout(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """dtype and shape of a tensor; KeyError where there is none."""
        return DTYPES[self._header[name]["dtype"]], tuple(self._header[name]["shape"])

    def read(self, name: str, span: slice) -> Tensor:
        """A slice of a tensor's first axis; only its bytes are fetched."""
        about = self._header[name]
        dtype, shape, (begin, end) = DTYPES[about["dtype"]], about["shape"], about["data_offsets"]
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} has {end - begin} bytes for {shape}")
        first, last, _ = span.indices(shape[0])
        row = math.prod(shape[1:]) * dtype.itemsize
        self._handle.seek(self._start + begin + first * row)
        data = bytearray(self._handle.read((last - first) * row))
        return torch.frombuffer(data, dtype=dtype).reshape(last - first, *shape[1:])
