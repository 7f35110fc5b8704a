"""Sketches of keys: every key a few bytes, from which a query's scores are estimated; and the best tokens by them.

A code is `round(k·keys − centre)`, small integers in `r` channels; a query's side is `q·queries`, and the sum of their
products is the score `q·k` up to a number that is the query's alone. The scores of a group of query heads are
normalised over the candidates and summed, and the best tokens are those of the largest sum. Nothing waits for the host,
and no shape depends on what is in the tensors.

A code of `w` bytes has `r` channels, `w ≤ r ≤ 2w`: its first `2w − r` bytes hold one channel each, in 8 bits, the
others two each, in 4 bits: byte j is the sum of channel j and 16 times channel `j + r − w`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsekv.kernels.gather import gather_rows
from sparsekv.kernels.launch import NEG_INF, acc_dtype, dense_last, on_device, overlaps, padded, power_of_two

ENCODE_BLOCK, ENCODE_WARPS = 64, 4
QUERY_WARPS = 4
SCORE_BLOCK, SCORE_WARPS = 128, 4
WEIGH_BLOCK, WEIGH_WARPS = 512, 4
TALLY_BLOCK, TALLY_WARPS = 1024, 4
DIGITS = ((20, 11), (10, 10), (0, 10))
"""The digits of a 31-bit number that the search for the last chosen score goes through: shift and bits."""
KEYS_AT_ONCE = 8192


class Sketch(NamedTuple):
    """How keys and queries of a KV head are sketched: keys and queries `[..., Hkv, d, r]`, centre `[..., Hkv, r]`; the
    leading dimension is the batch where every row has its own."""

    keys: Tensor
    centre: Tensor
    queries: Tensor

    @property
    def rank(self) -> int:
        """r."""
        return self.keys.shape[-1]


def largest(rank: int, width: int, device: Any = None) -> Tensor:
    """The largest code of every channel, `[r]`; the smallest is its opposite."""
    return torch.where(torch.arange(rank, device=device) < 2 * width - rank, 127, 7)


def encode(keys: Tensor, sketch: Sketch, width: int) -> Tensor:
    """Codes of keys `[B, Hkv, N, d]` with RoPE: `[B, Hkv, N, w]` int8, w = width."""
    return launch_encode(keys, sketch, width) if on_device(keys) else encode_reference(keys, sketch, width)


def encode_reference(keys: Tensor, sketch: Sketch, width: int) -> Tensor:
    """`encode` in plain torch, some keys at a time."""
    acc, rank = acc_dtype(keys), sketch.rank
    maps, centre = sketch.keys.to(acc), sketch.centre.to(acc)[..., None, :]
    top, whole = largest(rank, width, keys.device), 2 * width - rank
    parts = []
    for part in keys.split(KEYS_AT_ONCE, dim=2):
        codes = (part.to(acc) @ maps - centre + 0.5).floor_().clamp_(-top, top).to(torch.int8)
        alone, low, high = codes.split([whole, width - whole, width - whole], dim=-1)
        parts.append(torch.cat([alone, low + 16 * high], dim=-1))
    return torch.cat(parts, dim=2)


def decode(codes: Tensor, rank: int) -> Tensor:
    """The numbers in codes, `[..., w] -> [..., r]` int8."""
    width = codes.shape[-1]
    alone, pairs = codes.split([2 * width - rank, rank - width], dim=-1)
    return torch.cat([alone, (pairs << 4) >> 4, (pairs + 8) >> 4], dim=-1)


def query_side(q: Tensor, sketch: Sketch, scale: float) -> Tensor:
    """What codes are multiplied by, `[Q, Hq, r]` float32 at least: q `[Q, Hq, d]` with RoPE, the softmax scale."""
    return launch_query(q, sketch, scale) if on_device(q) else query_side_reference(q, sketch, scale)


def query_side_reference(q: Tensor, sketch: Sketch, scale: float) -> Tensor:
    """`query_side` in plain torch."""
    count, heads_q, dim = q.shape
    acc = acc_dtype(q)
    maps = sketch.queries.to(acc)
    rows, heads = (maps.shape[0] if maps.dim() == 4 else 1), maps.shape[-3]
    grouped = q.to(acc).reshape(rows, count // rows, heads, heads_q // heads, dim).transpose(1, 2)
    side = grouped.flatten(2, 3) @ maps.reshape(rows, heads, dim, -1) * scale
    return side.unflatten(2, (count // rows, -1)).transpose(1, 2).reshape(count, heads_q, -1)


def sketch_scores(
    q: Tensor, sketch: Sketch, codes: Tensor, scale: float, tokens: Tensor | None = None, first: Tensor | None = None,
    last: Tensor | None = None,
) -> Tensor:
    """Scores of the candidates, the softmax over them summed over the group: `[Q, Hkv, K]` float32 at least, -1 where
    there is none.

    q `[Q, Hq, d]` with RoPE, codes `[B, Hkv, M, w]`, tokens `[Q, Hkv, K]` padded with -1. Without tokens the
    candidates are `first[q] <= i < last[q]` and K = M.
    """
    score = launch_scores if on_device(q) else sketch_scores_reference
    return score(q, sketch, codes, scale, tokens, first, last)


def sketch_scores_reference(
    q: Tensor, sketch: Sketch, codes: Tensor, scale: float, tokens: Tensor | None = None, first: Tensor | None = None,
    last: Tensor | None = None,
) -> Tensor:
    """`sketch_scores` in plain torch."""
    side = query_side_reference(q, sketch, scale)
    side = side.unflatten(1, (codes.shape[1], -1))
    if tokens is None:
        assert first is not None and last is not None
        side = side.unflatten(0, (codes.shape[0], -1))
        logits = torch.cat([_products(side, part[:, None]) for part in codes.split(KEYS_AT_ONCE, dim=2)],
                           dim=-1).flatten(0, 1)
        place = torch.arange(codes.shape[2], device=q.device)
        used = ((place >= first[:, None]) & (place < last[:, None]))[:, None]
    else:
        logits, used = _products(side, gather_rows(codes, tokens.clamp(min=0))), tokens >= 0
    weights = logits.masked_fill(~used[:, :, None], NEG_INF).softmax(-1).nan_to_num(0.0).sum(2)
    return torch.where(used, weights, -1.0)


def _products(side: Tensor, codes: Tensor) -> Tensor:
    """Sums of products `[..., G, n]` of sides `[..., G, r]` with codes `[..., n, w]`, taken apart no further than they
    must be: a byte of two channels is 16 times the upper one and the lower one."""
    width = codes.shape[-1]
    alone, low, high = side.split([2 * width - side.shape[-1], *[side.shape[-1] - width] * 2], dim=-1)
    found = torch.cat([alone, high / 16], dim=-1) @ codes.to(side.dtype).mT
    if low.shape[-1]:
        found += (low - high / 16) @ ((codes[..., alone.shape[-1]:] << 4) >> 4).to(side.dtype).mT
    return found


def best_tokens(scores: Tensor, tokens: Tensor | None, budget: Tensor, widest: int) -> Tensor:
    """Exactly the `budget[q]` candidates of the largest score, or all where there are fewer; of equal scores those that
    stand first. scores `[Q, H, K]`, negative where there is no candidate; tokens `[Q, H, K]`, or None where candidate i
    is token i. Returns `[Q, H, widest]` int32 in the order of the candidates, padded with -1."""
    choose = launch_best if on_device(scores) else best_tokens_reference
    return choose(scores, tokens, budget, widest)


def best_tokens_reference(scores: Tensor, tokens: Tensor | None, budget: Tensor, widest: int) -> Tensor:
    """`best_tokens` in plain torch."""
    count, heads, width = scores.shape
    out = torch.full((count, heads, widest + 1), -1, dtype=torch.int32, device=scores.device)
    if width == 0 or widest == 0:
        return out[..., :widest]
    wanted = budget[:, None].clamp(max=widest).minimum((scores >= 0).sum(-1))
    kept = scores.topk(min(widest, width), dim=-1).values
    least = kept.gather(-1, (wanted[..., None] - 1).clamp(min=0))
    above, equal = scores > least, scores == least
    missing = wanted[..., None] - above.sum(-1, keepdim=True)
    chosen = (above | (equal & (equal.cumsum(-1) <= missing))) & (wanted > 0)[..., None]
    listed = torch.arange(width, dtype=torch.int32, device=scores.device).expand_as(scores) if tokens is None else (
        tokens.to(torch.int32))
    slot = torch.where(chosen, chosen.cumsum(-1) - 1, widest)
    return out.scatter_(-1, slot, torch.where(chosen, listed, -1))[..., :widest]


def launch_encode(keys: Tensor, sketch: Sketch, width: int) -> Tensor:
    """`encode` through Triton."""
    from sparsekv.kernels.sketch_triton import encode_kernel

    keys, maps, centre = dense_last(keys), sketch.keys.contiguous(), sketch.centre.contiguous()
    batch, heads, length, dim = keys.shape
    codes = torch.empty(batch, heads, length, width, dtype=torch.int8, device=keys.device)
    if codes.numel():
        encode_kernel[(batch * heads, -(-length // ENCODE_BLOCK))](
            keys, maps, centre, codes, heads, length, dim, *keys.stride()[:3], _by_row(maps, 4), _by_row(centre, 3),
            RANK=sketch.rank, BYTES=width, WIDTH=padded(width), BLOCK=ENCODE_BLOCK, DIM=padded(dim),
            num_warps=ENCODE_WARPS)
    return codes


def launch_query(q: Tensor, sketch: Sketch, scale: float) -> Tensor:
    """`query_side` through Triton."""
    from sparsekv.kernels.sketch_triton import query_kernel

    q, maps = dense_last(q), sketch.queries.contiguous()
    count, heads_q, dim = q.shape
    rows = maps.shape[0] if maps.dim() == 4 else 1
    side = torch.empty(count, heads_q, sketch.rank, dtype=torch.float32, device=q.device)
    query_kernel[(count * heads_q,)](
        q, maps, side, scale, heads_q, heads_q // maps.shape[-3], count // rows, dim, *q.stride()[:2], _by_row(maps, 4),
        RANK=sketch.rank, WIDTH=power_of_two(sketch.rank), DIM=power_of_two(dim), num_warps=QUERY_WARPS)
    return side


def launch_scores(
    q: Tensor, sketch: Sketch, codes: Tensor, scale: float, tokens: Tensor | None = None, first: Tensor | None = None,
    last: Tensor | None = None,
) -> Tensor:
    """`sketch_scores` through Triton: the queries' sides, the products with the largest and the mass of every block,
    the sums over the group."""
    from sparsekv.kernels.sketch_triton import score_kernel, weigh_kernel

    side, codes = launch_query(q, sketch, scale), dense_last(codes)
    count, heads_q, rank = side.shape
    heads, bytes_ = codes.shape[1], codes.shape[3]
    listed = None if tokens is None else tokens.to(torch.int32).contiguous()
    width = codes.shape[2] if listed is None else listed.shape[2]
    group, device = heads_q // heads, q.device
    scores = torch.empty(count, heads, width, dtype=torch.float32, device=device)
    if not width:
        return scores
    blocks = -(-width // SCORE_BLOCK)
    logits = torch.empty(count, heads_q, width, dtype=torch.float32, device=device)
    tops, masses = (torch.empty(count, heads_q, blocks, dtype=torch.float32, device=device) for _ in range(2))
    if listed is None:
        assert first is not None and last is not None
        edges = first.to(torch.int32).contiguous(), last.to(torch.int32).contiguous()
        listed = edges[0]
    else:
        edges = listed, listed
    overlap = overlaps(device)
    pdl: dict[str, Any] = {"launch_pdl": True} if overlap else {}
    rows = power_of_two(group)
    score_kernel[(count * heads, blocks)](
        side, codes, listed, *edges, logits, tops, masses, heads, count // codes.shape[0], width, *codes.stride()[:3],
        LISTED=tokens is not None, RANK=rank, BYTES=bytes_, WIDTH=padded(bytes_), GROUP=group, ROWS=padded(group),
        BLOCK=SCORE_BLOCK, OVERLAP=overlap, num_warps=SCORE_WARPS, **pdl)
    weigh_kernel[(count * heads, -(-width // WEIGH_BLOCK))](
        logits, tops, masses, scores, width, blocks, GROUP=group, ROWS=rows, PARTS=power_of_two(blocks),
        BLOCK=WEIGH_BLOCK, OVERLAP=overlap, num_warps=WEIGH_WARPS, **pdl)
    return scores


def launch_best(scores: Tensor, tokens: Tensor | None, budget: Tensor, widest: int) -> Tensor:
    """`best_tokens` through Triton: the last chosen score digit by digit from counts of how many scores have each, then
    how many every block gives, then the tokens. A score orders as its bits do, plus one: zero is no candidate."""
    from sparsekv.kernels.sketch_triton import count_kernel, fill_kernel, tally_kernel

    scores = scores.float().contiguous()
    count, heads, width = scores.shape
    device, rows = scores.device, count * heads
    out = torch.empty(count, heads, widest, dtype=torch.int32, device=device)
    if not width or not widest:
        return out.fill_(-1)
    listed = scores if tokens is None else tokens.to(torch.int32).contiguous()
    tallies = torch.zeros(len(DIGITS), rows, 1 << DIGITS[0][1], dtype=torch.int32, device=device)
    blocks = -(-width // TALLY_BLOCK)
    above, equal = (torch.empty(rows, blocks, dtype=torch.int32, device=device) for _ in range(2))
    overlap = overlaps(device)
    pdl: dict[str, Any] = {"launch_pdl": True} if overlap else {}
    common = budget.contiguous(), heads, rows, width, widest
    how: dict[str, Any] = {"BLOCK": TALLY_BLOCK, "OVERLAP": overlap, "num_warps": TALLY_WARPS}
    for digit in range(len(DIGITS)):
        # what is ahead of the first is no kernel: the tallies are set to zero
        tally_kernel[(rows, blocks)](scores, tallies, *common, DIGIT=digit, **how, **(pdl if digit else {}))
    count_kernel[(rows, blocks)](scores, tallies, above, equal, *common, blocks, **how, **pdl)
    fill_kernel[(rows, max(blocks, -(-widest // TALLY_BLOCK)))](
        scores, listed, tallies, above, equal, out, *common, blocks, LISTED=tokens is not None,
        PARTS=power_of_two(blocks), **how, **pdl)
    return out


def _by_row(x: Tensor, dims: int) -> int:
    """The stride of the batch, 0 where all rows share one."""
    return x.stride(0) if x.dim() == dims and x.shape[0] > 1 else 0
