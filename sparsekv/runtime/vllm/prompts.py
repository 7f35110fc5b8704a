"""Pieces of prompts that are read sparsely, by the blocks of `core/prefill.py`. vLLM's own attention sees no token of
their requests. A step's metadata do not say where a prompt ends, so that every piece may be its last."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsekv.core.prefill import SparsePrompts
from sparsekv.kernels import slots_at
from sparsekv.kernels.block_attention import BLOCK
from sparsekv.runtime.vllm.index import LayerIndex

WARM = (32, 33)
"""Blocks of a prompt that is read before the first request."""


class Piece(NamedTuple):
    """A request's part of a step, row `row` of the batch: queries `first` to `last` of the step's, and slots `[N]` of
    the request's tokens, those of the queries last."""

    row: int
    first: int
    last: int
    slots: Tensor


def pieces_of(common: Any, reads: SparsePrompts, page: int) -> list[Piece]:
    """Find the pieces of a step whose requests are long enough by now, where a block or more of queries is read
    sparsely. Not those with spans that see themselves both ways, nor any of a step that is not causal."""
    if common.max_query_len <= 1 or getattr(common, "causal", True) is not True:
        return []
    spans = getattr(common, "mm_req_doc_ranges", None) or {}
    edges = common.query_start_loc_cpu[:common.num_reqs + 1].tolist()
    known = getattr(common, "seq_lens_cpu_upper_bound", None)
    lengths = (common.seq_lens if known is None else known)[:common.num_reqs].tolist()
    pieces = []
    for row, length in enumerate(lengths):
        first, last = edges[row:row + 2]
        if last - first < 2 or length < reads.shortest or spans.get(row):
            continue
        begin, end = reads.sparse_part(length, last - first)
        if begin < end:
            positions = torch.arange(length, device=common.seq_lens.device)
            pieces.append(Piece(row, first, last, slots_at(common.block_table_tensor[row:row + 1], positions[None],
                                                          page)[0]))
    return pieces


def without(lengths: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """A step's lengths `[R]` for vLLM's own attention: 0 for the requests of the pieces."""
    if not pieces:
        return lengths
    rows = torch.tensor([piece.row for piece in pieces])
    return lengths.index_fill(0, rows.to(lengths.device, non_blocking=True), 0)


def warm_blocks(index: LayerIndex, heads: int, reads: SparsePrompts) -> None:
    """Run once on a CUDA device what a sparse prompt launches in a layer of so many query heads, with numbers of blocks
    that 16 divides and others, which kernels are compiled for, and then with ends that read all, whose kernels are
    tried at their first call, for which the host waits. What the pages hold does not matter."""
    device = index.pages.keys.device
    for blocks in WARM if device.type == "cuda" else ():
        slots = torch.arange(BLOCK * blocks, device=device) % index.pages.slots
        q = torch.zeros(BLOCK * blocks, heads, index.pages.keys.shape[2], dtype=index.pages.kind, device=device)
        index.read(q, slots, replace(reads, least=0, exact=0))
        part = BLOCK // 4
        index.read(q[2 * part:], slots[:-part], replace(reads, least=0, exact=min(reads.exact, BLOCK * blocks // 2)))


def hold(size: int, device: torch.device) -> None:
    """Let a CUDA device's allocator keep one block of `size` bytes, which what a prompt needs is cut from: it keeps
    freed blocks, of which none is large enough for the next piece, that has more tokens before it."""
    if device.type == "cuda":
        with suppress(torch.OutOfMemoryError):
            torch.empty(size, dtype=torch.uint8, device=device)


def prompt_bytes(heads: tuple[int, int], dim: int, longest: int, size: int, *, rounded: bool = False) -> int:
    """Bytes that a layer needs while it reads a piece of a prompt of `longest` tokens, with so many query and KV heads
    and numbers of `size` bytes: keys and values side by side, and what `SparsePrompts.read` needs after that. rounded:
    of a float8 cache, whose values are there as bytes before they are of that size."""
    side = heads[1] * dim * longest
    return 2 * side * size + max(SparsePrompts.bytes_beside(heads[0], longest), side if rounded else 0)
