"""Attention of a prompt by blocks: the kernels against their twins, and lists against a literal transcription."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparsekv.kernels import block_attention as ba


def tensors(shape: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, ...]:
    """shape: query heads, KV heads, head dimension, tokens before the queries, queries."""
    heads_q, heads, dim, past, count = shape
    torch.manual_seed(seed)
    q = 2 * torch.randn(2, count, heads_q, dim).transpose(1, 2)
    k, v = (torch.randn(2, heads, past + count + 5, dim)[:, :, :past + count] for _ in range(2))
    return q, k, v


def test_scores_are_antidiagonals() -> None:
    q, k, _ = tensors((2, 1, 8, 128, 256))
    n = ba.STRIDE
    scores = ba.block_scores_reference(q, k, scale=0.3)
    group, block = 3, 1  # of queries from 128 + 3 n on, and tokens 128 to 255
    sums = [sum(float(q[1, 1, n * group + n - 1 - i] @ k[1, 0, 128 * block + n * j + i]) for i in range(n)) / n * 0.3
            for j in range(group + 1)]
    assert float(scores[1, 1, group, block]) == pytest.approx(float(torch.tensor(sums).logsumexp(0)), abs=1e-4)
    assert float(scores[0, 0, 0, 2]) == float("-inf")


@pytest.mark.parametrize(("share", "least"), [(0.25, 1), (0.0, 3), (0.5, 0)])
def test_lists_hold_the_largest_masses(share: float, least: int) -> None:
    q, k, _ = tensors((4, 2, 16, 1280, 640))
    scores = ba.block_scores_reference(q, k, scale=0.25)
    lists = ba.block_lists(scores, share, least)
    shares = scores.softmax(-1)
    for i in range(5):
        mass = shares[:, :, ba.EACH * i:ba.EACH * (i + 1)].sum(2)
        for b in range(2):
            chosen = {(h, int(j)) for h in range(4) for j in lists.blocks[b, h, i, :lists.counts[b, h, i]]}
            assert all({(h, 0), (h, 10 + i)} <= chosen for h in range(4))
            rest = {x for x in chosen if x[1] not in (0, 10 + i)}
            others = {(h, j) for h in range(4) for j in range(1, 10 + i)} - rest
            assert min(float(mass[b][x]) for x in rest) >= max(float(mass[b][x]) for x in others)
            assert len(chosen) == 4 * (max(least, int((10 + i) * share + 0.5)) + 2)
            for h in range(4):
                mine = lists.blocks[b, h, i, :lists.counts[b, h, i]].tolist()
                assert mine == sorted(mine) and mine[-1] == 10 + i


def test_lists_of_everything_are_full_attention() -> None:
    q, k, v = tensors((6, 2, 80, 1280, 640))
    out, lse = ba.block_attention(q, k, v, ba.block_lists(ba.block_scores(q, k, scale=0.1), 1.0, 0), scale=0.1)
    k, v = (x.repeat_interleave(3, 1) for x in (k, v))
    scores = (q @ k.mT * 0.1).masked_fill(~torch.ones(640, 1920, dtype=torch.bool).tril(1280), float("-inf"))
    torch.testing.assert_close(out, scores.softmax(-1) @ v, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-4, atol=1e-5)


def test_the_twin_holds_no_scores_of_all_pairs() -> None:
    class Largest(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            out = op(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.found = max(self.found, out.numel())
            return out

    q, k, _ = tensors((4, 2, 8, 0, 1024))
    with Largest() as largest:
        ba.block_scores_reference(q, k, scale=0.3)
    assert largest.found <= q.numel()


def test_tokens_outside_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="whole blocks of 128 tokens, found 130 and 256"):
        ba.block_scores(torch.zeros(1, 2, 130, 16), torch.zeros(1, 1, 256, 16), scale=1.0)


def test_tiles_have_room() -> None:
    for room in (101_376, 166_912, 232_448):  # sm_89, sm_80, sm_90
        for size in (2, 4):
            how = ba.score_tiles(size, room)
            assert how.stages * (how.rows + how.columns) * how.channels * size <= room
    assert ba.attention_launch(256, 232_448) == ba.ATTENTION[0]
    assert ba.attention_launch(256, 101_376) == ba.ATTENTION[1]
    assert ba.attention_launch(1024, 101_376) is None
