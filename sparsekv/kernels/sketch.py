"""Sketches of keys: every key a few bytes, from which a query's scores are estimated; and the best tokens by them.

A code is `round(k·keys − centre)`, small integers in `r` channels; a query's side is `q·queries`, and the sum of their
products is the score `q·k` up to a number that is the query's alone. The scores of a group of query heads are
normalised over the candidates and summed, and the best tokens are those of the largest sum, told apart by grades: eight
to a doubling, from 2⁻²⁵ of a head's attention on; codes are coarser. Nothing waits for the host, and no shape depends
on what is in the tensors.

A code of `w` bytes has `r` channels, `w ≤ r ≤ 2w`: its first `2w − r` bytes hold one channel each, in 8 bits, the
others two each, in 4 bits: byte j is the sum of channel j and 16 times channel `j + r − w`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsekv.kernels.gather import gather_rows
from sparsekv.kernels.launch import NEG_INF, acc_dtype, dense_last, on_device, overlaps, padded, power_of_two
from sparsekv.kernels.routing import (
    empty_runs,
    launch_logits,
    places_of,
    rank_warps,
    routable,
    route_tokens_reference,
    seats_or,
)
from sparsekv.kernels.types import RouterScores

ENCODE_BLOCK, ENCODE_DEPTH, ENCODE_WARPS = 64, 64, 4
BLOCK, SCORE_WARPS = 256, 4
"""Candidates that are scored together."""
GRADE_BLOCKS, GRADE_PARTS, GRADE_WARPS = 2, 256, 4
"""Blocks of them that are graded together, and blocks whose masses are added at once."""
BEST_BLOCK, BEST_AHEAD, BEST_WARPS = 2048, 128, 8
ROW = 16
"""What the lengths of rows of candidates, and of tallies, are multiples of."""
GRADES, FLOOR, SHIFT = 256, 816, 20
"""Grades, the bits of 2⁻²⁵ as a float32 without its last SHIFT: grade 1 is of what is below."""
ONE = 2.0**15
"""The weight of a block's best candidate: half precision then holds what is 2⁻²⁹ of it, to 2⁻¹¹."""
TOLD = 4
"""Numbers between the tallies and what blocks tell each other."""
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


def encode_keys(keys: Tensor, sketch: Sketch, width: int) -> Tensor:
    """Codes of keys `[B, Hkv, N, d]` with RoPE: `[B, Hkv, N, w]` int8, w = width."""
    return launch_encode_keys(keys, sketch, width) if on_device(keys) else encode_keys_reference(keys, sketch, width)


def encode_keys_reference(keys: Tensor, sketch: Sketch, width: int) -> Tensor:
    """`encode_keys` in plain torch, some keys at a time."""
    acc, rank = acc_dtype(keys), sketch.rank
    maps, centre = sketch.keys.to(acc), sketch.centre.to(acc)[..., None, :]
    top, whole = largest(rank, width, keys.device), 2 * width - rank
    parts = []
    for part in keys.split(KEYS_AT_ONCE, dim=2):
        codes = (part.to(acc) @ maps - centre + 0.5).floor_().clamp_(-top, top).to(torch.int8)
        alone, low, high = codes.split([whole, width - whole, width - whole], dim=-1)
        parts.append(torch.cat([alone, low + 16 * high], dim=-1))
    return torch.cat(parts, dim=2)


def decode_codes(codes: Tensor, rank: int) -> Tensor:
    """The numbers in codes, `[..., w] -> [..., r]` int8."""
    width = codes.shape[-1]
    alone, pairs = codes.split([2 * width - rank, rank - width], dim=-1)
    return torch.cat([alone, _lower(pairs), (pairs + 8) >> 4], dim=-1)


def _lower(pairs: Tensor) -> Tensor:
    """The lower channels of bytes of two, int8."""
    return ((pairs & 15) ^ 8) - 8


def query_side_reference(q: Tensor, sketch: Sketch, scale: float) -> Tensor:
    """What codes are multiplied by, `[Q, Hq, r]` float32 at least: q `[Q, Hq, d]` with RoPE, the softmax scale."""
    count, heads_q, dim = q.shape
    acc = acc_dtype(q)
    maps = sketch.queries.to(acc)
    rows, heads = (maps.shape[0] if maps.dim() == 4 else 1), maps.shape[-3]
    grouped = q.to(acc).reshape(rows, count // rows, heads, heads_q // heads, dim).transpose(1, 2)
    side = grouped.flatten(2, 3) @ maps.reshape(rows, heads, dim, -1) * scale
    return side.unflatten(2, (count // rows, -1)).transpose(1, 2).reshape(count, heads_q, -1)


class Candidates(NamedTuple):
    """The tokens of the best buckets by the budget rule (`route_tokens`): q in the space of the scores, the scores, the
    index, the budget `[Q]` and the largest of it, and seats, by which then the sketch and its budget are kept too."""

    q: Tensor
    scores: RouterScores
    order: Tensor
    offsets: Tensor
    budget: Tensor
    widest: int
    seats: Tensor | None = None


def sketch_tokens(
    q: Tensor, sketch: Sketch, codes: Tensor, scale: float, budget: Tensor, widest: int,
    candidates: Candidates | None = None, first: Tensor | None = None, last: Tensor | None = None,
) -> Tensor:
    """Exactly the `budget[q]` candidates whose sketches promise the largest share of the group's attention, or all
    where there are fewer; of equal grades those that stand first.

    q `[Q, Hq, d]` with RoPE, codes `[B, Hkv, M, w]`; without candidates all tokens `first[q] <= i < last[q]` are.
    Returns `[Q, Hkv, widest]` int32 in the order of the candidates, padded with -1.
    """
    if on_device(q) and (candidates is None or routable(candidates.q, candidates.scores)):
        return launch_tokens(q, sketch, codes, scale, budget, widest, candidates, first, last)
    return sketch_tokens_reference(q, sketch, codes, scale, budget, widest, candidates, first, last)


def sketch_tokens_reference(
    q: Tensor, sketch: Sketch, codes: Tensor, scale: float, budget: Tensor, widest: int,
    candidates: Candidates | None = None, first: Tensor | None = None, last: Tensor | None = None,
) -> Tensor:
    """`sketch_tokens` in plain torch."""
    tokens = None if candidates is None else route_tokens_reference(*candidates)
    if candidates is not None and candidates.seats is not None:
        sketch, budget = sketch._replace(queries=sketch.queries[candidates.seats]), budget[candidates.seats]
    grades = grades_of(sketch_scores_reference(q, sketch, codes, scale, tokens, first, last))
    return best_tokens_reference(grades, tokens, budget, widest)


def sketch_scores_reference(
    q: Tensor, sketch: Sketch, codes: Tensor, scale: float, tokens: Tensor | None = None, first: Tensor | None = None,
    last: Tensor | None = None,
) -> Tensor:
    """Scores of the candidates, the softmax over them summed over the group: `[Q, Hkv, K]` float32 at least, -1 where
    there is none.

    q `[Q, Hq, d]` with RoPE, codes `[B, Hkv, M, w]`, tokens `[Q, Hkv, K]` padded with -1. Without tokens the
    candidates are `first[q] <= i < last[q]` and K = M.
    """
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
        found += (low - high / 16) @ _lower(codes[..., alone.shape[-1]:]).to(side.dtype).mT
    return found


def grades_of(scores: Tensor) -> Tensor:
    """The grades of scores, uint8: 0 where there is no candidate, else 1 to GRADES - 1, as the float32's bits are
    ordered."""
    upper = (scores.float().clamp(min=0.0).view(torch.int32) >> SHIFT) - FLOOR
    return torch.where(scores < 0, 0, upper.clamp(0, GRADES - 2) + 1).to(torch.uint8)


def best_tokens_reference(grades: Tensor, tokens: Tensor | None, budget: Tensor, widest: int) -> Tensor:
    """The `budget[q]` candidates of the best grades `[Q, H, K]`, of equal ones the first: `[Q, H, widest]` int32 in
    their order, padded with -1. tokens `[Q, H, K]`, or None where candidate i is token i."""
    count, heads, width = grades.shape
    out = torch.full((count, heads, widest + 1), -1, dtype=torch.int32, device=grades.device)
    if width == 0 or widest == 0:
        return out[..., :widest]
    wanted = budget[:, None].clamp(max=widest).minimum((grades > 0).sum(-1))
    kept = grades.topk(min(widest, width), dim=-1).values
    least = kept.gather(-1, (wanted[..., None] - 1).clamp(min=0))
    above, equal = grades > least, grades == least
    missing = wanted[..., None] - above.sum(-1, keepdim=True)
    chosen = (above | (equal & (equal.cumsum(-1) <= missing))) & (wanted > 0)[..., None]
    listed = torch.arange(width, dtype=torch.int32, device=grades.device).expand_as(grades) if tokens is None else (
        tokens.to(torch.int32))
    slot = torch.where(chosen, chosen.cumsum(-1) - 1, widest)
    return out.scatter_(-1, slot, torch.where(chosen, listed, -1))[..., :widest]


def launch_encode_keys(keys: Tensor, sketch: Sketch, width: int) -> Tensor:
    """`encode_keys` through Triton."""
    from sparsekv.kernels.sketch_triton import encode_kernel

    keys, maps, centre = dense_last(keys), sketch.keys.contiguous(), sketch.centre.contiguous()
    batch, heads, length, dim = keys.shape
    codes = torch.empty(batch, heads, length, width, dtype=torch.int8, device=keys.device)
    if codes.numel():
        encode_kernel[(batch * heads, -(-length // ENCODE_BLOCK))](
            keys, maps, centre, codes, heads, length, dim, *keys.stride()[:3], _by_row(maps, 4), _by_row(centre, 3),
            RANK=sketch.rank, BYTES=width, WIDTH=padded(width), BLOCK=ENCODE_BLOCK,
            DEPTH=min(padded(dim), ENCODE_DEPTH), num_warps=ENCODE_WARPS)
    return codes


class Scored(NamedTuple):
    """What `score_kernel` makes of the candidates: weights `[Q, Hkv, K, G]` float16, ONE for the largest of a block and
    -1 where there is no candidate; the largest scores of blocks and the sums of their weights over ONE
    `[Q, Hkv, blocks, G]`; the tokens (None where candidate i is token i) and how many are listed (`[Q, Hkv]`; behind
    them nothing is written, and K is a multiple of ROW); the zeros of `Asked`."""

    weights: Tensor
    tops: Tensor
    masses: Tensor
    tokens: Tensor | None
    counts: Tensor | None
    tallies: Tensor


class Graded(NamedTuple):
    """Grades of the candidates `[Q, Hkv, K]` uint8, tokens and counts of `Scored`, and tallies `[Q, Hkv, tally_of(K,
    widest)]`: how many have each grade above 1, the number of candidates in the place of grade 0; then TOLD numbers:
    programs that counted, tokens that are chosen, the lowest grade of them, how many of that grade; then a zero at
    least for every block of `best_kernel`."""

    grades: Tensor
    tokens: Tensor | None
    counts: Tensor | None
    tallies: Tensor


def launch_tokens(
    q: Tensor, sketch: Sketch, codes: Tensor, scale: float, budget: Tensor, widest: int,
    candidates: Candidates | None, first: Tensor | None, last: Tensor | None,
) -> Tensor:
    """`sketch_tokens` through Triton: the buckets' scores; what every bucket gives, beside it the queries' sides; the
    products, the grades, the best. Each launch is prepared while the one before it ends."""
    scored = launch_scores(q, sketch, codes, scale, widest, candidates, first, last)
    graded = launch_grades(scored, budget, widest, None if candidates is None else candidates.seats)
    return launch_best(graded, widest)


class Asked(NamedTuple):
    """What codes are multiplied by, in whole numbers: four planes `[Q, Hq, 4, w]` int8 and their step `[Q, Hq]`; the
    runs of candidates that buckets give and how many these are (`empty_runs`); zeros for the
    tallies of `Graded`.

    A score is the step times `256 p₀ + p₁` by the bytes of a code, and `256 p₂ + p₃` by 16 times the lower channels of
    bytes that hold two. That is the side of `query_side_reference` to 2⁻¹⁶ of its largest."""

    side: Tensor
    steps: Tensor
    runs: Tensor | None
    tallies: Tensor
    counts: Tensor | None = None


def launch_ask(
    q: Tensor, sketch: Sketch, width: int, scale: float, tally: int, candidates: Candidates | None = None,
) -> Asked:
    """What a query brings to codes of `width` bytes through Triton, with tallies of `tally` numbers."""
    from sparsekv.kernels.sketch_triton import ask_kernel

    q, maps = dense_last(q), sketch.queries.contiguous()
    count, heads_q, dim = q.shape
    rows, heads = (maps.shape[0] if maps.dim() == 4 else 1), maps.shape[-3]
    group, device, overlap = heads_q // heads, q.device, overlaps(q.device)
    side = torch.empty(count, heads_q, 4, width, dtype=torch.int8, device=device)
    steps = torch.empty(count, heads_q, dtype=torch.float32, device=device)
    tallies = torch.empty(count, heads, tally, dtype=torch.int32, device=device)
    given: tuple[Tensor, ...] = (steps,) * 6
    lists, buckets, widest, runs, counts, pdl, seats = 0, 1, 0, None, None, {}, None
    per_row = max(1, count // rows)
    if candidates is not None:
        offsets, seats = candidates.offsets.contiguous(), candidates.seats
        logits = launch_logits(candidates.q, candidates.scores, offsets, offsets=True, seats=seats)
        lists, buckets, widest = count * heads, offsets.shape[2] - 1, candidates.widest
        per_row = count // offsets.shape[0] if seats is None else 1
        runs, counts = empty_runs(count, heads, buckets, device)
        given = logits, offsets, candidates.budget.contiguous(), seats_or(seats, offsets), runs, counts
        pdl = {"launch_pdl": True} if overlap else {}
    most, wide = power_of_two(group), places_of(buckets)
    ask_kernel[(lists + count * heads_q,)](
        *given, q, maps, side, steps, tallies, scale, lists, heads, per_row, buckets, widest, dim,
        *q.stride()[:2], _by_row(maps, 4), tally, GROUP=group, ROWS=most, PADDED=wide, RANK=sketch.rank,
        BYTES=width, WIDTH=power_of_two(width), DIM=power_of_two(dim), SEATED=seats is not None, OVERLAP=overlap,
        num_warps=rank_warps(most * wide), **pdl)
    return Asked(side, steps, runs, tallies, counts)


def launch_scores(
    q: Tensor, sketch: Sketch, codes: Tensor, scale: float, widest: int, candidates: Candidates | None,
    first: Tensor | None, last: Tensor | None,
) -> Scored:
    """The scores of the candidates through Triton, of which at most `widest` will be chosen."""
    from sparsekv.kernels.sketch_triton import score_kernel

    device = q.device
    count, heads_q, _ = q.shape
    heads, length, bytes_ = codes.shape[1:]
    if codes.stride()[2:] != (bytes_, 1) or codes.stride(0) % bytes_ or codes.stride(1) % bytes_:
        codes = codes.contiguous()
    # rows of whole vectors
    width = length if candidates is None else ROW * -(-candidates.widest // ROW)
    asked = launch_ask(q, sketch, bytes_, scale, tally_of(width, widest), candidates)
    blocks, group = -(-width // BLOCK), heads_q // heads
    tokens = None if candidates is None else torch.empty(count, heads, width, dtype=torch.int32, device=device)
    weights = torch.empty(count, heads, width, group, dtype=torch.float16, device=device)
    tops, masses = (torch.empty(count, heads, blocks, group, dtype=torch.float32, device=device) for _ in range(2))
    scored = Scored(weights, tops, masses, tokens, asked.counts, asked.tallies)
    if not width:
        return scored
    if candidates is None:
        assert first is not None and last is not None
        edges = first.to(torch.int32).contiguous(), last.to(torch.int32).contiguous()
        lists, wide, strides = (edges[0],) * 3, 1, (0, 0)
    else:
        assert asked.runs is not None and asked.counts is not None
        order = dense_last(candidates.order)
        wide, strides, edges = asked.runs.shape[3], (order.stride(0), order.stride(1)), (order, order)
        lists = order, asked.runs, asked.counts
    overlap = overlaps(device)
    score_kernel[(count * heads, blocks)](
        asked.side, asked.steps, codes, *lists, *edges, asked.steps if tokens is None else tokens, weights, tops,
        masses, heads, count // codes.shape[0], width, *codes.stride()[:2], *strides, LISTED=tokens is not None,
        PADDED=wide, RANK=sketch.rank, BYTES=bytes_, ALIGNED=math.gcd(bytes_, 16), WIDTH=max(32, power_of_two(bytes_)),
        GROUP=group, HEADS=power_of_two(group), BLOCK=BLOCK, PACKED=codes.is_cuda, OVERLAP=overlap,
        num_warps=SCORE_WARPS, **({"launch_pdl": True} if overlap else {}))
    return scored


def launch_grades(scored: Scored, budget: Tensor, widest: int, seats: Tensor | None = None) -> Graded:
    """The grades of the candidates through Triton, and down to which `budget[q]` of them are chosen, at most `widest`;
    the zeros of the tallies are used up."""
    from sparsekv.kernels.sketch_triton import grade_kernel

    weights, tops, masses, tokens, counts, tallies = scored
    count, heads, width, group = weights.shape
    blocks, device = tops.shape[2], weights.device
    grades = torch.empty(count, heads, width, dtype=torch.uint8, device=device)
    overlap = overlaps(device)
    if width:
        grade_kernel[(count * heads, -(-blocks // GRADE_BLOCKS))](
            weights, tops, masses, tallies if counts is None else counts, budget.contiguous(), seats_or(seats, tallies),
            grades, tallies, heads, width, blocks, widest, tallies.shape[2], GROUP=group, HEADS=power_of_two(group),
            PARTS=min(GRADE_PARTS, power_of_two(blocks)), BLOCKS=GRADE_BLOCKS, BLOCK=BLOCK, LISTED=counts is not None,
            SEATED=seats is not None, OVERLAP=overlap, num_warps=GRADE_WARPS,
            **({"launch_pdl": True} if overlap else {}))
    return Graded(grades, tokens, counts, tallies)


def tally_of(width: int, widest: int) -> int:
    """Numbers in the tallies of a query and head."""
    return GRADES + ROW * -(-(TOLD + best_blocks(width, widest)) // ROW)


def best_blocks(width: int, widest: int) -> int:
    """Blocks of `best_kernel`."""
    return -(-max(width, widest) // BEST_BLOCK)


def launch_best(graded: Graded, widest: int) -> Tensor:
    """`best_tokens_reference` through Triton; the rest of the tallies' zeros are used up."""
    from sparsekv.kernels.sketch_triton import best_kernel

    grades, tokens, counts, tallies = graded
    count, heads, width = grades.shape
    out = torch.empty(count, heads, widest, dtype=torch.int32, device=grades.device)
    if not width or not widest:
        return out.fill_(-1)
    overlap = overlaps(grades.device)
    blocks = best_blocks(width, widest)
    best_kernel[(count * heads, blocks)](
        grades, grades if tokens is None else tokens, tallies, tallies if counts is None else counts, out, width,
        widest, tallies.shape[2], LISTED=tokens is not None, BLOCK=BEST_BLOCK,
        AHEAD=min(BEST_AHEAD, power_of_two(blocks)), OVERLAP=overlap, num_warps=BEST_WARPS,
        **({"launch_pdl": True} if overlap else {}))
    return out


def _by_row(x: Tensor, dims: int) -> int:
    """The stride of the batch, 0 where all rows share one."""
    return x.stride(0) if x.dim() == dims and x.shape[0] > 1 else 0
