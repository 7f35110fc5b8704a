"""Pieces of prompts that a served layer reads sparsely: which these are, and that they read what the core reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paged import DIM, GROUP, HEADS, PAGE, SCALE, router, selector
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sparsekv.core import prefill
from sparsekv.core.layer import LayerView
from sparsekv.core.prefill import SparsePrompts
from sparsekv.core.regions import Regions
from sparsekv.kernels import slots_at
from sparsekv.kernels.block_attention import BLOCK, score_bytes
from sparsekv.runtime.vllm.index import LayerIndex, Room
from sparsekv.runtime.vllm.paged import Scales, UncodedSlots
from sparsekv.runtime.vllm.pages import write
from sparsekv.runtime.vllm.prompts import hold, pieces_of, prompt_bytes, without

FEW = SparsePrompts(share=0.1, least=128, exact=100, shortest=600)
LONG = 1000


def step_of(rows: list[tuple[int, int]], *, known: bool = True) -> Any:
    """A step of requests of some length, so many tokens of them new, in pages that run backwards."""
    lengths = torch.tensor([n for n, _ in rows], dtype=torch.int32)
    starts = torch.tensor([0, *[n for _, n in rows]]).cumsum(0).int()
    blocks = -(-LONG // PAGE)
    table = torch.arange(len(rows) * blocks).flip(0).reshape(len(rows), blocks).int()
    return SimpleNamespace(num_reqs=len(rows), max_query_len=max(n for _, n in rows), seq_lens=lengths,
                           query_start_loc_cpu=starts, block_table_tensor=table,
                           seq_lens_cpu_upper_bound=lengths if known else None)


@pytest.mark.parametrize("known", [True, False])
def test_pieces_are_of_long_prompts_with_blocks_to_read(known: bool) -> None:
    """Not a row that decodes, a short prompt, or a piece that the last tokens and the border of a block leave
    nothing."""
    step = step_of([(900, 1), (599, 599), (640, 300), (700, 230), (1000, 1000), (900, 2)], known=known)
    found = pieces_of(step, FEW, PAGE)
    assert [(p.row, p.first, p.last) for p in found] == [(2, 600, 900), (4, 1130, 2130)]
    for piece, length in zip(found, (640, 1000), strict=True):
        expected = slots_at(step.block_table_tensor[piece.row:piece.row + 1], torch.arange(length)[None], PAGE)[0]
        assert torch.equal(piece.slots, expected)
    assert without(step.seq_lens, found).tolist() == [900, 599, 0, 700, 0, 900]
    assert without(step.seq_lens, []) is step.seq_lens
    assert pieces_of(step_of([(900, 1), (1000, 1)]), FEW, PAGE) == []


def test_what_is_not_plainly_causal_is_left_to_vllm() -> None:
    """A request with spans that see themselves both ways (images of a prefix model), and steps that are not causal."""
    step = step_of([(1000, 1000), (1000, 1000)])
    step.causal, step.mm_req_doc_ranges = True, {0: [(3, 90)], 1: []}
    assert [piece.row for piece in pieces_of(step, FEW, PAGE)] == [1]
    for causal in (False, torch.ones(2, dtype=torch.bool)):
        step.causal = causal
        assert pieces_of(step, FEW, PAGE) == []


@pytest.mark.parametrize("scales", [None, Scales(0.3, 0.07)])
@pytest.mark.parametrize("count", [1000, 300])
def test_a_piece_reads_what_the_core_reads(count: int, scales: Scales | None) -> None:
    """Of a float8 cache its keys and values, as they are there, by its scales."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(LONG, h, DIM, generator=generator) for h in (HEADS * GROUP, HEADS, HEADS))
    step = step_of([(LONG, count)])
    pool = torch.full((63, PAGE, HEADS, 2 * DIM), float("nan")).transpose(1, 2)
    if scales is not None:
        pool = pool.transpose(1, 2).to(torch.float8_e4m3fn).transpose(1, 2)
        k, v = ((x / s).to(pool.dtype).float() * s for x, s in zip((k, v), scales, strict=True))
    index = LayerIndex(selector(router(), 8, 0.5), pool, Room(1, LONG), UncodedSlots(63 * PAGE, torch.device("cpu")),
                       scale=SCALE, kind=torch.float32, scales=scales)
    piece, = pieces_of(step, FEW, PAGE)
    write(pool, k / index.pages.scales.key, v / index.pages.scales.value, piece.slots)
    keys, values, query = (x.transpose(0, 1)[None] for x in (k, v, q[-count:]))
    regions = Regions.at_prefill_end(torch.zeros(1, dtype=torch.long), LONG, 0, 0)
    view = LayerView(keys, values, regions=regions, scale=SCALE, num_query_heads=HEADS * GROUP)
    expected = FEW.read(view, query)
    found = index.read(q[-count:], piece.slots, FEW)
    torch.testing.assert_close(found, expected[0].transpose(0, 1), rtol=1e-4, atol=1e-5)
    dense = prefill.dense(view, query, LONG)
    apart = (found - dense[0].transpose(0, 1)).abs().amax((1, 2))
    assert apart[:-FEW.exact].max() > 0.01 and apart[-FEW.exact:].max() < 1e-5, "the last tokens alone read all"


@pytest.mark.parametrize(("heads", "length"), [(8, 60_000), (32, 131_072), (64, 4_000_000)])
def test_the_scores_of_a_prompt_fit_what_is_counted(heads: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are most: at the last blocks of a prompt."""
    seen = []
    monkeypatch.setattr(prefill, "block_scores", lambda q, k, **_: seen.append(score_bytes(1, q.shape[1], k.shape[2])
                                                                               * q.shape[2] // BLOCK))
    monkeypatch.setattr(prefill, "block_lists", lambda *_: None)
    monkeypatch.setattr(prefill, "block_attention", lambda q, *_, **__: (q, q[..., 0]))
    monkeypatch.setattr(prefill, "dense", lambda view, q, *_: q)
    whole, empty = length // BLOCK * BLOCK, torch.zeros(1)
    regions = Regions.of_equal_rows(torch.zeros(1, dtype=torch.long), whole, 0, 0)
    keys = empty.expand(1, 1, whole, 1)
    view = LayerView(keys, keys, regions=regions, scale=1.0, num_query_heads=heads)
    SparsePrompts(exact=0).read(view, empty.expand(1, heads, BLOCK * 400, 1))
    counted = prompt_bytes((heads, 2), 8, length, 2) - 2 * 2 * 8 * 2 * length
    assert max(seen) * 18 // 16 <= counted < 3 * max(seen)


@pytest.mark.gpu
def test_pieces_of_growing_prompts_leave_no_blocks_behind() -> None:
    """The allocator's memory is what was counted, however many lengths there were."""
    def read_pieces() -> int:
        for mib in range(64, 257, 16):
            for _ in range(2):
                pair = [torch.empty(mib << 20, dtype=torch.uint8, device="cuda") for _ in range(2)]
                del pair
        return torch.cuda.memory_reserved() - before

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    assert read_pieces() > 2 << 30, "without it all lengths are kept"
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    hold(512 << 20, torch.device("cuda"))
    assert read_pieces() <= 514 << 20


class Held(TorchDispatchMode):
    """most: bytes of the tensors that operations made, of those that are there at once; not those of `before`."""

    def __init__(self, before: torch.Tensor) -> None:
        super().__init__()
        self.before = before.untyped_storage().data_ptr()
        self.made: dict[StorageWeakRef, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != self.before:
            self.made[StorageWeakRef(out.untyped_storage())] = out.untyped_storage().nbytes()
        self.most = max(self.most, sum(size for storage, size in self.made.items() if not storage.expired()))
        return out


class NothingMore(SparsePrompts):
    """Prompts of which keys and values alone are made."""

    def read(self, view: LayerView, query: torch.Tensor, *, after: int = 0) -> torch.Tensor:
        return query


@pytest.mark.parametrize("rounded", [False, True])
def test_keys_and_values_of_a_prompt_fit_what_is_counted(rounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a float8 cache are there twice for a while, as bytes too."""
    pool = torch.zeros(63, PAGE, HEADS, 2 * DIM, dtype=torch.float8_e4m3fn if rounded else torch.bfloat16)
    index = LayerIndex(selector(router(), 8, 0.5), pool.transpose(1, 2), Room(1, LONG),
                       UncodedSlots(63 * PAGE, torch.device("cpu")), scale=SCALE, kind=torch.bfloat16,
                       scales=Scales(0.3, 0.07) if rounded else None)
    monkeypatch.setattr(SparsePrompts, "bytes_beside", staticmethod(lambda *_: 0))
    slots, q = torch.arange(LONG), torch.zeros(1, HEADS, DIM, dtype=torch.bfloat16)
    with Held(pool) as held:
        index.read(q, slots, NothingMore())
    counted = prompt_bytes((HEADS, HEADS), DIM, LONG, 2, rounded=rounded)
    assert 4 * HEADS * DIM * LONG <= held.most <= counted + 256
