"""Every kernel against its twin in float64: the same checks under the interpreter and on a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsekv.kernels import (
    BucketMeans,
    BucketSums,
    Candidates,
    CompletionQuery,
    FeatureMapWeights,
    KeyBuckets,
    KeyFeatures,
    PhiState,
    QueryModel,
    ScoreMoments,
    Sketch,
    bucket_sums,
    bucket_tokens,
    build_index,
    codes,
    dense_attention,
    group_probability,
    histogram,
    losses,
    phi_join,
    round_means,
    routing,
    sketch,
    top_buckets,
)
from sparsekv.kernels import block_attention as blocks
from sparsekv.kernels.attend import (
    Pages,
    attend_buckets_reference,
    attend_tokens_reference,
    launch_anchors,
    launch_attend,
)
from sparsekv.kernels.attention_mass import launch_statistics, query_statistics_reference
from sparsekv.kernels.between import (
    launch_rms_norm,
    launch_rotate_pair,
    launch_silu_product,
    rms_norm_reference,
    rotate_pair_reference,
    silu_product_reference,
)
from sparsekv.kernels.bucket_mass import bucket_mass_reference, launch_log_mass, sorted_keys
from sparsekv.kernels.bucket_query import bucket_query_reference, launch_bucket_query
from sparsekv.kernels.bucket_sums import (
    against_bucket_reference,
    bucket_sums_reference,
    launch_against,
    launch_bucket_sums,
)
from sparsekv.kernels.chunk_attention import chunk_attention_reference, launch_chunk_attention
from sparsekv.kernels.completion import factored_reference, launch_factored, launch_query, phi_query_reference
from sparsekv.kernels.dense import add_attention_reference, launch_add
from sparsekv.kernels.features import (
    BESIDE_BYTES,
    key_features,
    key_features_reference,
    launch_features,
    phi_sums_reference,
    room_beside,
)
from sparsekv.kernels.features import launch_sums as launch_phi_sums
from sparsekv.kernels.few_rows import (
    Launch,
    few_rows_gated_reference,
    few_rows_reference,
    launch_few_rows,
    launch_few_rows_gated,
)
from sparsekv.kernels.gather import HotRows, fetch_rows_reference, launch_fetch
from sparsekv.kernels.indexing import assign_buckets_reference, launch_assign, launch_sort, sort_by_bucket_reference
from sparsekv.kernels.routing import bucket_logits_reference, choose_tokens_reference, launch_choose, launch_logits
from sparsekv.kernels.stored import (
    append_token_reference,
    decode_attention_reference,
    launch_append,
    launch_decode,
)
from sparsekv.kernels.vote import launch_vote, soft_vote_reference
from sparsekv.runtime.hf.storage import page_locked

FULL = -(-(2**31 - 1) // blocks.BLOCK)
"""Blocks of the longest cache."""
LISTS = (0, 0), (0, 2), (1 << blocks.SHARE_BITS, 0), (0, FULL)
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}


def error(mine: Tensor, truth: Tensor) -> float:
    return float((mine.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-30))


def agree(mine: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor], limit: float, name: str) -> None:
    """Two partial attentions."""
    out, gap = error(mine[0], truth[0]), mine[1].double() - truth[1].double()
    assert torch.equal(torch.isneginf(mine[1]), torch.isneginf(truth[1])), name
    assert out < limit, f"{name}: out {out:.1e}"
    worst, size = float(gap.nan_to_num(0.0).abs().max()), float(truth[1].abs().nan_to_num(posinf=0.0).max())
    assert worst < limit * 4 * max(1.0, size / 8), f"{name}: lse {worst:.1e}"


def double(x: Any) -> Any:
    """Every tensor of a tuple, or of one in it, in float64."""
    if isinstance(x, tuple):
        return type(x)(*map(double, x)) if hasattr(x, "_fields") else tuple(map(double, x))
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


class Step:
    """Two rows of a cache, the second padded and shorter, `queries` queries each, and an index of nine buckets.

    shape: query heads, KV heads, head dimension, tokens, sink, window, left padding, queries a row.
    """

    buckets, batch = 9, 2

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str, logits: float = 1.0):
        heads_q, heads, dim, length, sink, window, pad, queries = shape
        torch.manual_seed(length)
        self.q = (torch.randn(2 * queries, heads_q, dim, device=device) * logits).to(dtype)
        self.k, self.v = (torch.randn(2, heads, length + 3, dim, device=device).to(dtype)[:, :, :length]
                          for _ in range(2))
        starts, lengths = (torch.tensor(x, device=device) for x in ([0, pad], [length, max(1, length - 2)]))
        tails = (lengths - window).clamp(min=0).maximum(starts)
        first = (starts + sink).minimum(tails)
        assignment = torch.randint(0, self.buckets, (2, heads, length), device=device)
        assignment[:, 0] = 3
        self.order, self.offsets = build_index(assignment, self.buckets, first, tails)
        self.counts = self.offsets.diff(dim=-1)
        place = torch.arange(length, device=device)
        self.mid = (place >= first[:, None]) & (place < tails[:, None])
        ends = lengths.repeat_interleave(queries) - torch.arange(queries, device=device).flip(0).repeat(2)
        edges = {"starts": starts, "tail_starts": tails}
        self.regions: dict[str, Any] = {
            "scale": dim**-0.5, "sink_size": sink, **{n: x.repeat_interleave(queries) for n, x in edges.items()},
            "lengths": ends.maximum(starts.repeat_interleave(queries))}
        chosen = torch.rand(2 * queries, heads, self.buckets, device=device).argsort(-1)[..., :5].to(torch.int32)
        chosen[..., 3] = -1
        self.chosen = chosen

    def wide(self) -> list[Tensor]:
        return [x.double() for x in (self.q, self.k, self.v)]

    def completion(
        self, heavy: Tensor | None = None, width: int = 20, units: int = 24,
    ) -> tuple[CompletionQuery, CompletionQuery]:
        """A completion in the step's dtype, capped, and the same in float64, each of sums of its own features, `width`
        of them. With the
        tokens `heavy` their features are a thousand times the others', which their first channel says from then on, of
        a mass that leaves these some weight."""
        device, heads = self.q.device, self.k.shape[1]
        maps = maps_of_keys(2, heads, self.k.shape[3], units, width, self.q.dtype, device)
        if heavy is not None:
            places = torch.arange(self.k.shape[2], device=device)
            listed = (heavy.unflatten(0, (2, -1)).transpose(1, 2).flatten(2)[..., None, :] == places[:, None]).any(-1)
            self.k = self.k.clone()
            self.k[..., 0] = torch.where(listed, 4.0, -8.0)
            maps.w_in[:, 0], maps.w_in[..., 0], maps.w_out[:, 0], maps.bias[..., 0] = 0.0, 0.0, 2.5, 0.0
            maps.w_in[:, 0, 0] = 1.0
            # as in use features are relative to a shift near the largest: unshifted some are past what fp16 holds,
            # 65504, and the twin in fp16 is wrong by two thirds
            maps.shift.add_(10.0)
        features = torch.rand(*self.q.shape[:2], width, device=device)
        features[0, 0] = 0.0
        features = features.to(self.q.dtype)
        each = features.double().reshape(2, -1, heads, self.q.shape[1] // heads, width)
        log_scale = torch.randn(self.q.shape[:2], device=device) + (0 if heavy is None else 7 + 10 * math.log(2))
        cap = torch.randn(self.q.shape[:2], device=device) if heavy is None else None

        def made(keys: Tensor, maps: KeyFeatures) -> CompletionQuery:
            # by the kernel where there is one: in another order of sums a number may round the other way
            counted = key_features(keys, maps).double() * self.mid[:, None, :, None]
            mass = torch.einsum("bthgr,bhr->bthg", each, counted.sum(2)).reshape(self.q.shape[:2])
            numerator = torch.einsum("bthgr,bhrd->bthgd", each, counted.mT @ self.v.double()).reshape(self.q.shape)
            return CompletionQuery(features, log_scale, mass, numerator, cap, maps)

        mine = made(self.k, maps)
        return (mine._replace(mass=mine.mass.float(), numerator=mine.numerator.float()),
                double(made(self.k.double(), double(maps))))


def check_attention(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, logits: float = 1.0, only: str | None = None,
) -> None:
    """Lists of tokens, buckets and a paged cache, completed and not. only: one of `lists`, `buckets` and `pages`, of
    its forms the one that has most to it, completed with `completed` behind the name."""
    s = Step(shape, dtype, device, logits)
    asked, alone = (only or "").partition(" ")[::2]
    group = s.q.shape[1] // s.k.shape[1]
    tokens = bucket_tokens(s.order, s.offsets, s.chosen)
    per_head = tokens.repeat_interleave(group, 1).clone()
    per_head[:, ::2, :2] = -1
    everything = torch.where(s.mid[:, None], torch.arange(s.k.shape[2], device=device), -1)
    everything = everything.repeat_interleave(s.q.shape[0] // 2, 0).expand(-1, s.k.shape[1], -1)
    none, weights = tokens[..., :0], torch.randn(*per_head.shape, device=device)
    completions = s.completion()
    limit = LIMITS[dtype] if logits == 1 else 1e-2
    cases = [("tokens", tokens, {}), ("one list for all", tokens[:, :1], {}), ("per head", per_head, {}),
             ("none", none, {}), ("weighted", per_head, {"log_weights": weights}),
             ("weighted for all", tokens[:, :1], {"log_weights": weights[:, :1]}),
             ("no anchors", tokens, dict.fromkeys(("tail_starts", "lengths"), s.regions["starts"])),
             ("nothing", none, dict.fromkeys(("tail_starts", "lengths"), s.regions["starts"]))]
    completed = [("tokens", tokens), ("one list for all", tokens[:, :1]), ("per head", per_head), ("all", everything)]
    cases += [(f"completed: {name}", listed, {"completion": completions}) for name, listed in completed]
    cases += [("completed: weighted", per_head, {"completion": completions, "log_weights": weights}),
              ("completed: weighted for all", tokens[:, :1],
               {"completion": completions, "log_weights": weights[:, :1]}),
              ("completed: none", none, {"completion": completions})]
    if only is not None:
        most = "completed: weighted" if alone else "weighted"
        cases = [case for case in cases if asked == "lists" and case[0] in (most, f"{most} for all")]
    for name, listed, how in cases:
        mine, truth = ({**s.regions, **{n: x[side] if n == "completion" else x for n, x in how.items()}}
                       for side in (0, 1))
        agree(launch_attend(s.q, s.k, s.v, listed, **mine), attend_tokens_reference(*s.wide(), listed, **truth), limit,
              name)
    for completion in ((None, None), completions):
        if only is not None and (asked != "buckets" or bool(alone) != (completion is completions)):
            continue
        found = launch_attend(s.q, s.k, s.v, s.order, s.offsets, s.chosen, **s.regions, completion=completion[0])
        truth = attend_buckets_reference(*s.wide(), s.order, s.offsets, s.chosen, **s.regions, completion=completion[1])
        agree(found, truth, limit, f"buckets, completed: {completion[0] is not None}")
    # a paged cache: listed anchors, rows that read all they have, a row without anything
    count, page = s.q.shape[0], 5
    blocks = -(-s.k.shape[2] // page)
    used, whole = torch.arange(count, device=device) % 8, torch.zeros(count, dtype=torch.int32, device=device)
    whole[1::2] = torch.randint(1, s.k.shape[2] + 1, (count // 2,), device=device)
    pool = [torch.nn.functional.pad(x, (0, 0, 0, blocks * page - x.shape[2])) for x in (s.k, s.v)]
    table = torch.rand(count, blocks, device=device).argsort(-1)[:, :blocks].int()
    anchors = torch.randint(0, s.k.shape[2], (count, 7), device=device).int()
    by_list = {"scale": s.regions["scale"], "sink_size": 0, **dict.fromkeys(("starts", "tail_starts", "lengths"), used)}
    # what completes lies by seat, in another order; a row that reads all it has leaves nothing
    seats = 1 - torch.arange(count, device=device) * 2 // count
    part = (whole == 0)[:, None]
    own = [c._replace(mass=c.mass * part, numerator=c.numerator * part[..., None]) for c in completions]
    seated = [c._replace(keys=c.keys._replace(bias=c.keys.bias.flip(0), shift=c.keys.shift.flip(0)), seats=seats)
              for c in own]
    caches = [(none, None, pool), (tokens, None, pool), (tokens, (seated[0], own[1]), pool), (tokens, seated, pool)]
    if device == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9):
        rounded = [x.to(torch.float8_e4m3fn) for x in pool]
        caches += [(tokens, None, rounded), (tokens, seated, rounded)]
    if only is not None:
        caches = [(tokens, seated if alone else None, pool)] if asked == "pages" else []
    for listed, completed, kept in caches:
        listed = torch.where(whole[:, None, None] > 0, -1, listed)
        sides = (launch_attend, (s.q, *kept)), (attend_tokens_reference, [x.double() for x in (s.q, *kept)])
        mine, truth = (attend(*step, listed, **by_list, pages=Pages(anchors, whole, table, page),
                              out=torch.full_like(step[0], 7), completion=completion)
                       for (attend, step), completion in zip(sides, completed or (None, None), strict=True))
        agree(mine, truth, limit, f"pages of {kept[0].dtype}, completed: {completed is not None}")
        row, first = int(whole.argmax()), int(whole.max())
        slots = (table[row, :, None] * page + torch.arange(page, device=device)).flatten()[:first]
        own = [x[row * 2 // count, :, slots][None] for x in sides[1][1][1:]]
        exact = dense_attention(sides[1][1][0][row:row + 1, :, None], *own, scale=s.regions["scale"])[0, :, 0]
        assert error(truth[0][row], exact) < 1e-12


def check_completed(shape: tuple[int, ...], dtype: torch.dtype, device: str, few: bool = False) -> None:
    """Completed attention alone, of two KV heads. shape: query heads a KV head, head dimension, hidden units and
    features of the map of keys, tokens. few: without lists that have no weights."""
    group, dim, units, features, length = shape
    s = Step((2 * group, 2, dim, length, 3, 9, 2, 1), dtype, device)
    completions, tokens = s.completion(width=features, units=units), bucket_tokens(s.order, s.offsets, s.chosen)
    weights = torch.randn(*tokens.shape, device=device)
    for name, added in (("weighted", weights), ("completed", None))[:1 if few else 2]:
        found = launch_attend(s.q, s.k, s.v, tokens, **s.regions, log_weights=added, completion=completions[0])
        truth = attend_tokens_reference(*s.wide(), tokens, **s.regions, log_weights=added, completion=completions[1])
        agree(found, truth, LIMITS[dtype], f"{name} {shape}")
    found = launch_attend(s.q, s.k, s.v, s.order, s.offsets, s.chosen, **s.regions, completion=completions[0])
    truth = attend_buckets_reference(*s.wide(), s.order, s.offsets, s.chosen, **s.regions, completion=completions[1])
    agree(found, truth, LIMITS[dtype], f"buckets {shape}")
    ahead = launch_anchors(s.q, s.k, s.v, sizes=(units, features), **s.regions)
    if ahead is not None:
        found = launch_attend(s.q, s.k, s.v, tokens, **s.regions, completion=completions[0], anchored=ahead)
        truth = attend_tokens_reference(*s.wide(), tokens, **s.regions, completion=completions[1])
        agree(found, truth, LIMITS[dtype], f"anchors ahead {shape}")


def check_eight_bits(length: int, dtype: torch.dtype, device: str) -> None:
    """Queries of two bytes and keys and values of one."""
    q = torch.randn(1, 4, 32, device=device).to(dtype)
    k, v = (torch.randn(1, 2, length, 32, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    tokens = torch.arange(7, length // 2, 2, dtype=torch.int32, device=device).expand(1, 2, -1)
    how = {"scale": 0.2, "starts": torch.tensor([0], device=device), "sink_size": 4,
           "tail_starts": torch.tensor([length - 20], device=device), "lengths": torch.tensor([length], device=device)}
    agree(launch_attend(q, k, v, tokens, **how), attend_tokens_reference(*double((q, k, v)), tokens, **how),
          LIMITS[dtype], f"eight bits {length}")


def check_what_is_left(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Nearly all of the estimate is of keys that are read: what is left is a difference of large numbers."""
    s = Step(shape, dtype, device)
    tokens = bucket_tokens(s.order, s.offsets, s.chosen)
    completion, exact = s.completion(heavy=tokens)
    found = launch_attend(s.q, s.k, s.v, tokens, **s.regions, completion=completion)
    truth = attend_tokens_reference(*s.wide(), tokens, **s.regions, completion=exact)
    # of estimates in bf16, kept as two numbers, a thousandth is known to one in a hundred
    assert error(found[0], truth[0]) < (2e-2 if dtype == torch.bfloat16 else 5e-3)


def check_routing(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """shape: query heads, KV heads, head dimension, hidden units, buckets, probes, queries a row."""
    heads_q, heads, dim, hidden, buckets, probes, queries = shape
    torch.manual_seed(buckets)

    def random(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, device=device) * scale).to(dtype)

    q = random(2 * queries, heads_q, dim, scale=dim**-0.5)
    model = QueryModel(random(heads, dim, hidden), random(heads, hidden),
                       random(heads, hidden, buckets, scale=hidden**-0.5), random(heads, buckets))
    counts = torch.randint(0, 3, (2, heads, buckets), device=device)
    counts[0, 0] = 0
    offsets = torch.nn.functional.pad(counts.cumsum(-1), (1, 0)).int()
    order = torch.rand(2, heads, int(offsets.max()) + 4, device=device).argsort(-1).int()
    budget = torch.randint(0, buckets, (2 * queries,), device=device)
    widest, close = int(budget.max()), LIMITS[dtype]
    spread = torch.rand(2, heads, buckets, device=device)
    for scores in (model, BucketMeans(*round_means(random(2, heads, buckets, dim).float(), counts), 0.3, spread)):
        logits = bucket_logits_reference(q.double(), double(scores), counts)
        p = group_probability(logits, heads)
        for table, is_offsets in ((counts.int(), False), (offsets, True)):
            found = launch_logits(q, scores, table, offsets=is_offsets)
            assert torch.equal(torch.isneginf(found), torch.isneginf(logits))
            assert error(found.nan_to_num(neginf=0.0), logits.nan_to_num(neginf=0.0)) < close
        # ties within rounding may swap: the mass reached must agree, and the padding exactly
        chosen, best = routing.launch_route(q, scores, counts.int(), probes), top_buckets(p, counts, probes)
        reached = [torch.where(c >= 0, p.gather(-1, c.clamp(min=0).long()), 0.0).sum(-1) for c in (chosen, best)]
        assert torch.equal(chosen >= 0, best >= 0) and all(unique(x) for x in chosen.flatten(0, 1))
        assert float((reached[0] - reached[1]).abs().max()) < 4 * close
        density = p / counts.repeat_interleave(queries, 0).clamp(min=1)
        truth = choose_tokens_reference(density, order, offsets, budget, widest)
        by_token = torch.zeros(2 * queries, heads, order.shape[-1], dtype=torch.float64, device=device)
        bucket = torch.searchsorted(offsets[..., 1:].contiguous(), torch.arange(
            order.shape[-1], device=device, dtype=torch.int32).expand(2, heads, -1).contiguous(), right=True)
        each = density.gather(-1, bucket.clamp(max=buckets - 1).repeat_interleave(queries, 0))
        by_token.scatter_(-1, order.long().repeat_interleave(queries, 0), each)
        mine = launch_choose(launch_logits(q, scores, offsets, offsets=True), order, offsets, budget, widest,
                             logits=True)
        assert torch.equal((mine >= 0).sum(-1), (truth >= 0).sum(-1)) and all(unique(x) for x in mine.flatten(0, 1))
        reached = [torch.where(t >= 0, by_token.gather(-1, t.clamp(min=0).long()), 0.0).sum(-1) for t in (mine, truth)]
        assert float((reached[0] - reached[1]).abs().max()) < 4 * close


def unique(listed: Tensor) -> bool:
    kept = listed[listed >= 0].tolist()
    return len(set(kept)) == len(kept)


def check_budget_rule(buckets: int, device: str, few: bool = False) -> None:
    """Exactly the twin's tokens, in its order, from densities with many ties, zeros and empty buckets, by both ways to
    find the last bucket; lists of KV heads and of query heads. few: of KV heads alone."""
    torch.manual_seed(buckets)
    heads, queries = 2, 3
    counts = torch.randint(0, 4, (2, heads, buckets), device=device) * torch.randint(0, 2, (buckets,), device=device)
    offsets = torch.nn.functional.pad(counts.cumsum(-1), (1, 0)).int()
    order = torch.rand(2, heads, int(offsets.max()) + 2, device=device).argsort(-1).int()
    total = int(counts.sum(-1).min())
    budget = torch.tensor([0, 1, total // 3, total // 2, total, total + 9], device=device)
    half, more = total // 2 + 1, total + 9
    for lists, widest in ((1, half), (3, more))[:1 if few else 2]:
        density = torch.randint(0, 3, (2 * queries, heads * lists, buckets), device=device) / 4
        found = launch_choose(density, order, offsets, budget, widest, logits=False)
        truth = choose_tokens_reference(density.double(), order, offsets, budget, widest)
        assert found.shape == truth.shape and found.dtype == truth.dtype == torch.int32
        assert torch.equal(found, truth), (lists, widest)


def maps_of(
    heads: int, dim: int, width: int, features: int, dtype: torch.dtype, device: str, blocks: int = 1,
) -> FeatureMapWeights:
    def random(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(heads, *size, device=device) * scale).to(dtype)

    return FeatureMapWeights(random(dim, width, scale=dim**-0.5), random(width),
                             random(blocks * width, width, scale=width**-0.5), random(blocks * width),
                             random(blocks * width, width, scale=width**-0.5), random(blocks),
                             random(width, features, scale=width**-0.5), random(features))


def maps_of_keys(
    batch: int, heads: int, dim: int, units: int, features: int, dtype: torch.dtype, device: str,
) -> KeyFeatures:
    """A map of keys, of features of about one."""
    def random(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*size, device=device) * scale

    return KeyFeatures(random(heads, dim, units, scale=dim**-0.5).to(dtype), random(batch, heads, units),
                       random(heads, units, features, scale=units**-0.5).to(dtype), random(heads, features),
                       torch.randint(-1, 2, (batch, heads, features), device=device).float())


def check_factored(shape: tuple[int, ...], device: str) -> None:
    """shape: matrices, dimension, rows. Of the last matrix nothing is left after two rows, the first is zero."""
    count, dim, rank = shape
    torch.manual_seed(dim)
    parts = torch.randn(2, count, 3 * dim, dim, device=device) * torch.rand(dim, device=device) * 3
    parts[:, -1, :, 2:] = 0.0
    parts[:, 0] = 0.0
    covariance = parts.mT @ parts / parts.shape[2]
    (rows, left), (true_rows, true_left) = launch_factored(covariance, rank), factored_reference(
        covariance.double(), rank)
    assert rows.shape == true_rows.shape and left.shape == true_left.shape
    made, truth = (r.mT @ r + torch.diag_embed(x) for r, x in ((rows.double(), left.double()), (true_rows, true_left)))
    assert error(made, truth) < 1e-5
    assert error(made.diagonal(dim1=-2, dim2=-1), covariance.diagonal(dim1=-2, dim2=-1)) < 1e-5


def check_sums_and_features(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """shape: KV heads, head dimension, units, features, keys. Of three rows one counts all keys, one some and one none;
    what is summed in parts is what is summed at once, and taking all features out leaves nothing."""
    heads, dim, units, features, keys = shape
    torch.manual_seed(keys)
    k, v = (torch.randn(3, heads, keys + 2, dim, device=device).to(dtype)[:, :, 1:keys + 1] for _ in range(2))
    maps = maps_of_keys(3, heads, dim, units, features, dtype, device)
    if room_beside(maps) < BESIDE_BYTES * maps.w_in.element_size() // 2:
        pytest.skip("a program has too little shared memory for this map: it stays in plain torch")
    maps.b_out[0] += torch.linspace(-60, 60, features, device=device)  # far apart, as those of trained maps
    first, last = (torch.tensor(x, device=device) for x in ([0, keys // 4, 5], [keys, keys - 1, 3]))
    whole = launch_phi_sums(k, v, first, last, maps)
    truth = phi_sums_reference(k.double(), v.double(), first, last, double(maps))
    close = 1e-5 if dtype == torch.float32 else 1e-2
    assert torch.equal(torch.isneginf(whole.m), torch.isneginf(truth.m)) and torch.equal(whole.m, whole.m.ceil())
    scale = torch.exp2((whole.m.double() - truth.m).nan_to_num(0.0))
    assert error(whole.z * scale, truth.z) < close and error(whole.s * scale[..., None], truth.s) < close
    assert not whole.z[2].any() and not whole.s[2].any() and bool(torch.isneginf(whole.m[2]).all())

    middle = (first + last) // 2
    joined = phi_join(launch_phi_sums(k, v, first, middle, maps), launch_phi_sums(k, v, middle, last, maps))
    assert torch.equal(joined.m, whole.m)
    # matrix units add in float32 with a truncation, in another order here
    assert max(error(a, b) for a, b in zip(joined[1:], whole[1:], strict=True)) < 1e-5

    maps = maps._replace(shift=whole.m)
    kept = launch_features(k.repeat_interleave(2, 0), maps)
    assert kept.dtype == dtype and torch.equal(kept[::2], kept[1::2])
    places = torch.arange(keys, device=device)
    outside = ~((places >= first[:, None]) & (places < last[:, None]))[:, None, :, None]
    # those of keys that were not summed may exceed any number
    counted, exact = (x.double().masked_fill(outside, 0.0) for x in (
        kept[::2], key_features_reference(k.double(), double(maps))))
    assert error(counted, exact) < close
    left = (whole.z - counted.sum(2)).abs().sum(-1) / whole.z.sum(-1).clamp(min=1e-30)
    assert float(left.max()) < 1e-5
    assert error(counted.mT @ v.double(), whole.s) < 1e-5


def states_of(heads: int, dim: int, features: int, device: str) -> tuple[PhiState, PhiState]:
    """What completion keeps of two rows: sums alone, and with a mean key and moments."""
    cache = phi_sums_reference(
        *torch.randn(2, 2, heads, 30, dim, device=device), *torch.tensor([[0, 3], [30, 20]], device=device),
        maps_of_keys(2, heads, dim, 12, features, torch.float32, device))
    centre = torch.randn(2, heads, dim, device=device) * dim**-0.5
    # one row that reads nothing, and spreads from none at all to far past the bound
    spreads = torch.logspace(-3, -0.5, heads, device=device)[:, None, None]
    moments = ScoreMoments(torch.randn(2, heads, dim, device=device) * dim**-0.5,
                           torch.randn(2, heads, 5, dim, device=device) * spreads,
                           torch.rand(2, heads, dim, device=device) / dim, torch.rand(2, device=device) * 50,
                           torch.tensor([float("inf"), 1.5], device=device))
    return PhiState(*cache), PhiState(*cache, centre=centre, moments=moments)


def check_query(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """shape: query heads, KV heads, head dimension, width, features, queries a row, and blocks if not one."""
    heads_q, heads, dim, width, features, queries, *blocks = shape
    torch.manual_seed(dim)
    maps = maps_of(heads_q, dim, width, features, dtype, device, *blocks)
    q = torch.randn(2 * queries, heads_q, dim, device=device).to(dtype)
    plain, full = states_of(heads, dim, features, device)
    seats = torch.arange(2 * queries, device=device) % 3 % 2
    for size, state, who in (((heads_q,), full, None), ((2 * queries, heads_q), full, None), ((heads_q,), plain, None),
                             ((2, heads_q), full, seats), ((2, heads_q), plain, seats)):
        offset = torch.randn(size, device=device)
        offset[..., 0] = float("-inf")
        mine = launch_query(q, maps, offset, state, who)
        truth = phi_query_reference(q.double(), double(maps), offset.double(), double(state), who)
        assert mine.seats is truth.seats is who
        limit = 1e-4 if dtype == torch.float32 else 3e-2
        scale = [x.log_scale.double().exp() for x in (mine, truth)]
        assert not mine.features[:, 0].any() and not mine.mass[:, 0].any() and not mine.numerator[:, 0].any()
        assert error(mine.mass * scale[0], truth.mass * scale[1]) < limit
        for name in ("features", "numerator"):
            both = [getattr(x, name).double() * s[..., None] for x, s in zip((mine, truth), scale, strict=True)]
            assert error(*both) < limit, name
        if truth.cap is not None:
            torch.testing.assert_close(mine.cap[:, 1:].double(), truth.cap[:, 1:], atol=1e-3, rtol=1e-3)


def check_index_and_votes(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """shape: query heads, KV heads, head dimension, keys, buckets, queries a row."""
    heads_q, heads, dim, keys, buckets, queries = shape
    torch.manual_seed(keys)
    k = torch.randn(2, heads, keys, dim, device=device).to(dtype)
    q = torch.randn(2 * queries, heads_q, dim, device=device).to(dtype)
    own = torch.randn(2, heads, buckets, dim, device=device).to(dtype)
    for centroids in (own, own[0]):
        # equals within rounding may swap: the product reached must agree
        scores = k.double() @ centroids.double().mT
        mine, twin = launch_assign(k, centroids), assign_buckets_reference(k, centroids)
        assert mine.dtype == twin.dtype == torch.int32
        for found in (mine, twin):
            assert float((scores.amax(-1) - scores.gather(-1, found.long()[..., None])[..., 0]).max()) < 1e-3
    first, last = (torch.randint(0, keys + 1, (2 * queries,), device=device) for _ in range(2))
    last[0] = keys
    found = launch_vote(q, k, first, last, scale=dim**-0.5)
    truth = soft_vote_reference(q.double(), k.double(), first, last, scale=dim**-0.5)
    assert error(found, truth) < LIMITS[dtype]


def check_fetch(shape: tuple[int, ...], dtype: torch.dtype, device: str, on_host: bool = False) -> None:
    """shape: lists a KV head, KV heads, width of a row, tokens, listed tokens, queries a row. Rows that no list names
    and slots that no list has are poison, lists have gaps. on_host: rows in page-locked memory."""
    lists, heads, dim, tokens, width, queries = shape
    torch.manual_seed(tokens)
    index = torch.randint(-1, tokens, (2 * queries, heads * lists, width), dtype=torch.int32)
    source = torch.full((2, heads, tokens + 3, 2 * dim), float("nan"), dtype=dtype)[:, :, 1:-2, dim // 2:dim // 2 + dim]
    by_row = index.view(2, queries, heads, lists, width).transpose(1, 2).flatten(2).long()
    place = by_row.clamp(min=0)[..., None].expand(-1, -1, -1, dim)
    source.scatter_(2, place, torch.randn(2, heads, tokens, dim).to(dtype).gather(2, place))
    out = torch.full((2, heads, by_row.shape[2] + 2, 2 * dim), float("nan"), dtype=dtype)[..., :dim]
    truth = out.clone()
    slots = fetch_rows_reference(source, index, truth)
    named = by_row >= 0
    assert torch.equal(truth[:, :, :-2][named], source.gather(2, place)[named]) and truth[:, :, -2:].isnan().all()
    assert not truth[:, :, :-2][~named].any(), "slots without a token have zeros"
    kept = slots.view(2, queries, heads, lists, width).transpose(1, 2).flatten(2)
    assert torch.equal(kept, torch.where(named, torch.arange(kept.shape[2]), -1).int())
    if on_host:
        held = page_locked(tuple(source.shape), dtype)
        source = held.copy_(source)
    else:
        whole = source.new_empty(2, heads, tokens, 2 * dim).to(device)
        source = whole[..., dim:].copy_(source)
    found = out.to(device)
    mine = launch_fetch(source, index.to(device), found)
    assert torch.equal(mine.cpu(), slots) and torch.equal(found.cpu().nan_to_num(7.0), truth.nan_to_num(7.0))


def check_hot(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """shape: lists a KV head, KV heads, width of a row, tokens, listed tokens, queries a row, slots. Calls that name
    many tokens of the call before: every token lies where its slot says, no two in one, and one that lay there is not
    counted as copied."""
    lists, heads, dim, tokens, width, queries, slots = shape
    torch.manual_seed(tokens)
    source = torch.randn(2, heads, tokens, dim).to(dtype)
    behind = lists * queries * width
    tables = [HotRows.empty(2, heads, slots, torch.device(place)) for place in ("cpu", device)]
    outs = [torch.full((2, heads, slots + behind, dim), float("nan"), dtype=dtype, device=place)
            for place in ("cpu", device)]
    counts = [torch.zeros(2, dtype=torch.long, device=place) for place in ("cpu", device)]
    index, known = torch.randint(-1, tokens, (2 * queries, heads * lists, width)), {}
    copied = listed = 0
    for call in range(5):
        drawn = torch.randint(-1, tokens, index.shape)
        index = torch.where(torch.rand(index.shape) < 0.6, index, drawn).int()
        fetch = fetch_rows_reference, launch_fetch
        twin, mine = (fetch[i](source.to(x.device), index.to(x.device), x, tables[i], counts[i])
                      for i, x in enumerate(outs))
        assert torch.equal(twin, mine.cpu())
        assert all(torch.equal(a, b.cpu()) for a, b in zip(tables[0], tables[1], strict=True))
        for place in itertools.product(*map(range, index.shape)):
            token, slot, head = int(index[place]), int(twin[place]), (place[0] // queries, place[1] // lists)
            assert (token < 0) == (slot < 0)
            if token < 0:
                continue
            listed += 1
            for out in outs:
                assert torch.equal(out[head][slot].cpu(), source[head][token])
            copied += known.get((*head, slot)) != token or slot >= slots
            assert known.get((*head, slot, call), token) == token, "two tokens in a slot"
            known[(*head, slot, call)] = token
        known |= {(*at[:2], at[2]): token for at, token in list(known.items()) if len(at) == 4 and at[3] == call}
        assert counts[0].tolist() == counts[1].tolist() == [listed, copied]
    assert copied < listed, "nothing was hit"


def check_blocks(
    shape: tuple[int, ...], dtype: torch.dtype, device: str,
    shares: Sequence[tuple[float, int]] = ((0.25, 1), (0.0, 0), (0.1, 4), (1.0, 0)),
) -> None:
    """shape: query heads, KV heads, head dimension, tokens before the queries, queries. Scores, lists and attention,
    each given what the twins made before it. shares: of the blocks that are read, and how many at least."""
    heads_q, heads, dim, past, count = shape
    torch.manual_seed(past)
    q = torch.randn(2, count, heads_q, dim, device=device).to(dtype).transpose(1, 2)
    q *= torch.linspace(0.5, 3, heads_q, device=device).to(dtype)[:, None, None]
    k, v = (torch.randn(2, heads, past + count + 5, dim, device=device).to(dtype)[:, :, :past + count]
            for _ in range(2))
    scale = dim**-0.5
    found = blocks.launch_block_scores(q, k, scale=scale)
    scores = blocks.block_scores_reference(q.double(), k.double(), scale=scale)
    assert torch.equal(torch.isneginf(found), torch.isneginf(scores))
    seen = ~torch.isneginf(scores)
    assert error(found[seen], scores[seen]) < LIMITS[dtype]
    scores = scores.float()
    for share, least in shares:
        share = blocks.share_bits(share)
        mine, twin = (make(scores, share, least) for make in (blocks.launch_block_lists, blocks.block_lists_reference))
        # masses that are nearly equal may change places
        assert float((mine.counts - twin.counts).abs().sum()) <= 1e-3 * float(twin.counts.sum())
        there = torch.arange(twin.blocks.shape[3], device=device) < torch.minimum(mine.counts, twin.counts)[..., None]
        assert float((mine.blocks != twin.blocks)[there].float().mean()) < 1e-2
        assert bool((mine.blocks.gather(-1, mine.counts[..., None].long() - 1)[..., 0] == torch.arange(
            past // blocks.BLOCK, (past + count) // blocks.BLOCK, device=device)).all())
        found = blocks.launch_block_attention(q, k, v, mine, scale=scale)
        truth = blocks.block_attention_reference(q.double(), k.double(), v.double(), mine, scale=scale)
        agree(found, truth, LIMITS[dtype], "blocks")


def check_block_lists(heads: int, device: str, lists: Sequence[tuple[int, int]] = LISTS) -> None:
    """Scores of which lists are made with care: NaN in one head, infinite ones, masses that are zero or one another's;
    as many blocks as any list is asked for. lists: their share and how many blocks at least."""
    n, before = 3, 6
    torch.manual_seed(0)
    scores = torch.randn(2, heads, n * blocks.EACH, before + n, device=device)
    own = torch.arange(before, before + n, device=device)
    column = torch.arange(before + n, device=device)
    scores.masked_fill_(column > own.repeat_interleave(blocks.EACH)[:, None], float("-inf"))
    plain = blocks.block_lists_reference(scores, 0, 2)
    scores[0, 5, :20] = float("nan")  # the first two blocks of queries
    scores[0, 6, :, 0] = float("inf")
    scores[0, 7, :, :before] = float("-inf")
    scores[1, 5, :, 0] += 500.0
    scores[1, 6, :, :before] = 0.25
    for share, least in lists:
        twin = blocks.block_lists_reference(scores, share, least)
        mine = blocks.launch_block_lists(scores, share, least)
        for name, made in (("twin", twin), ("kernel", mine)):
            there = torch.arange(before + n, device=device) < made.counts[..., None]
            assert int(made.counts.min()) >= 2, name
            assert bool((made.blocks[..., 0] == 0).all()), name
            assert bool((made.blocks.gather(-1, made.counts[..., None].long() - 1)[..., 0] == own).all()), name
            assert bool((made.counts[0, 5, :2] == 2).all()), name
            assert int(made.counts[1, 5].max()) == 2, name  # without mass
            if least or share:
                assert bool((made.counts[0, 8:].sum(0) >= plain.counts[0, 8:].sum(0)).all()), name
            if share or least == FULL:
                assert bool((made.counts[:, 8:] == own + 1).all()), name
            assert bool((made.blocks[..., :-1] < made.blocks[..., 1:])[there[..., 1:]].all()), name
        assert float((mine.counts - twin.counts).abs().sum()) <= 1e-3 * float(twin.counts.sum())


def check_added(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """shape: rows, heads, queries, head dimension. Queries of which one part, or neither, reads nothing."""
    batch, heads, count, dim = shape
    torch.manual_seed(count)
    out, more = (torch.randn(batch, count, heads, dim, device=device).to(dtype).transpose(1, 2) for _ in range(2))
    lse, other = (3 * torch.randn(batch, heads, count, device=device) for _ in range(2))
    lse[0, 0, 0] = other[-1, -1, -1] = float("-inf")
    truth = add_attention_reference(*(x.double().clone() for x in (out, lse, more, other)))
    found = launch_add(out, lse, more, other)
    assert found[0] is out and found[1] is lse
    agree(found, truth, LIMITS[dtype], "added")


def check_chunk_attention(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Chunks of `size` tokens, the last ones of all, against plain torch. shape: query heads, KV heads, head dimension,
    tokens, chunks, size, listed places, some of them without a token."""
    heads_q, heads, dim, length, chunks, size, listed = shape
    torch.manual_seed(length)
    q = torch.randn(2, chunks * size, heads_q, dim, device=device).to(dtype).transpose(1, 2)
    k, v = (torch.randn(2, heads, length + 3, dim, device=device).to(dtype)[:, :, :length] for _ in range(2))
    lists = torch.rand(2, chunks, length - chunks * size, device=device).argsort(-1)[..., :listed].int()
    lists[1, -1, ::3] = -1
    truth = chunk_attention_reference(q.double(), k.double(), v.double(), lists, size=size, scale=dim**-0.5)
    agree(launch_chunk_attention(q, k, v, lists, size=size, scale=dim**-0.5), truth, LIMITS[dtype], "chunks")


def buckets_of(s: Step, number_of_buckets: int) -> tuple[BucketSums, KeyBuckets]:
    """Buckets of the mid region of a step's two rows, the last one empty."""
    number = torch.randint(0, max(1, number_of_buckets - 1), s.k.shape[:3], device=s.k.device)
    used = s.mid[:, None].expand_as(number)
    counts, keys = bucket_sums(s.k, number, used, number_of_buckets)
    values = bucket_sums(s.v, number, used, number_of_buckets)[1]
    means = (keys / counts.clamp(min=1)[..., None]).to(s.k.dtype)
    return BucketSums(means, counts, values), KeyBuckets(number.to(torch.int16))


def check_bucket_query(shape: tuple[int, ...], dtype: torch.dtype, device: str, number: int = 70) -> None:
    """The query's side, then attention that takes the estimates of what it reads out of it."""
    s = Step(shape, dtype, device)
    buckets, keys = buckets_of(s, number)
    scale = s.regions["scale"]
    mine = launch_bucket_query(s.q, buckets, scale)._replace(keys=keys)
    truth = bucket_query_reference(s.q.double(), double(buckets), scale)._replace(keys=keys)
    for name in ("features", "log_scale", "mass", "numerator"):
        found, exact = getattr(mine, name), getattr(truth, name)
        assert torch.equal(found.isinf(), exact.isinf()), name
        assert error(*(x.nan_to_num(neginf=0.0) for x in (found, exact))) < LIMITS[dtype], name
    seats = torch.tensor([1, 0], device=device).repeat_interleave(s.q.shape[0] // 2)
    seated = launch_bucket_query(s.q, BucketSums(*(x.flip(0) for x in buckets)), scale, seats)
    assert torch.equal(seated.numerator, mine.numerator) and torch.equal(seated.features, mine.features)
    tokens = bucket_tokens(s.order, s.offsets, s.chosen)
    group = s.q.shape[1] // s.k.shape[1]
    everything = torch.where(s.mid[:, None], torch.arange(s.k.shape[2], device=device), -1)
    everything = everything.repeat_interleave(s.q.shape[0] // 2, 0).expand(-1, s.k.shape[1], -1)
    for listed in (tokens, tokens[..., :0], tokens.repeat_interleave(group, 1), tokens[:, :1], everything):
        found = launch_attend(s.q, s.k, s.v, listed, **s.regions, completion=mine)
        exact = attend_tokens_reference(*s.wide(), listed, **s.regions, completion=truth)
        agree(found, exact, LIMITS[dtype], str(tuple(listed.shape)))
        if listed.shape[1] == s.k.shape[1]:  # the same numbers, by the list
            row = torch.arange(len(listed), device=device) // (len(listed) // len(s.k))
            own = keys.number[row[:, None, None], torch.arange(s.k.shape[1], device=device)[:, None], listed]
            by_list = launch_attend(s.q, s.k, s.v, listed, **s.regions, completion=mine._replace(
                keys=KeyBuckets(own, listed=True)))
            assert all(map(torch.equal, by_list, found))
            exact_by_list = attend_tokens_reference(*s.wide(), listed, **s.regions, completion=truth._replace(
                keys=KeyBuckets(own, listed=True)))
            assert all(map(torch.equal, exact_by_list, exact))
    found = launch_attend(s.q, s.k, s.v, s.order, s.offsets, s.chosen, **s.regions, completion=mine)
    agree(found, attend_tokens_reference(*s.wide(), tokens, **s.regions, completion=truth), LIMITS[dtype], "buckets")


def check_bucket_mass(shape: tuple[int, ...], device: str) -> None:
    """shape: query heads, KV heads, head dimension, keys, queries, buckets, sink, window."""
    heads_q, heads, dim, length, count, buckets, sink, window = shape
    torch.manual_seed(length)
    queries, keys = torch.randn(heads_q, count, dim, device=device) * 2, torch.randn(heads, length, dim, device=device)
    bucket = torch.randint(buckets - 1, (heads, length), device=device)  # the last bucket is empty
    positions = torch.randint(length, (heads_q, count), device=device)
    positions[:, 0] = sink  # a query without a mid key
    regions: dict[str, Any] = {"scale": dim**-0.5, "sink_size": sink, "window_size": window}
    truth = bucket_mass_reference(queries.double(), keys.double(), bucket, positions, buckets, **regions)
    found = launch_log_mass(queries, *sorted_keys(keys, bucket, buckets), positions, **regions)
    assert torch.isneginf(found[..., -1]).all() and torch.isneginf(found[:, 0]).all()
    torch.testing.assert_close(found.softmax(-1).nan_to_num(0.0).double(), truth, rtol=1e-4, atol=1e-6)


def check_statistics(shape: tuple[int, ...], device: str) -> None:
    """shape: query heads, KV heads, head dimension, keys, queries, sink, window."""
    heads_q, heads, dim, length, count, sink, window = shape
    torch.manual_seed(length)
    queries = torch.randn(heads_q, count, dim, device=device) * 2
    keys = torch.randn(heads, length + 3, dim, device=device)[:, :length]
    positions = torch.randperm(length, device=device)[:count].sort().values
    options: dict[str, Any] = {"scale": dim**-0.5, "sink_size": sink, "window_size": window}
    truth = query_statistics_reference(queries.double(), keys.double(), positions, **options)
    found = launch_statistics(queries, keys, positions, **options)
    assert set(found) == set(truth)
    for name, expected in truth.items():
        torch.testing.assert_close(found[name].double(), expected.double(), rtol=1e-4, atol=1e-4, msg=name)
        assert found[name].dtype == (torch.int32 if name == "top1_position" else torch.float32)


def check_sketch(shape: tuple[int, ...], dtype: torch.dtype, device: str, few: bool = False) -> None:
    """shape: query heads, KV heads, head dimension, rank, bytes, keys, candidates, queries a row. A sketch for all rows
    and one for each; candidates of buckets by means and by a model, and all tokens between two borders; a query
    without any. few: a sketch for each row, scores of means and one budget."""
    heads_q, heads, dim, rank, width, length, listed, queries = shape
    torch.manual_seed(length)
    keys = torch.randn(2, heads, length + 2, dim, device=device).to(dtype)[:, :, :length]
    q = torch.randn(2 * queries, heads_q, dim, device=device).to(dtype)
    top = codes.largest(rank, width, device)
    own = Sketch(torch.randn(2, heads, dim, rank, device=device) * top / 2 / dim**0.5,
                 torch.randn(2, heads, rank, device=device), torch.randn(2, heads, dim, rank, device=device) / rank)
    first = torch.randint(0, max(1, length // 2), (2 * queries,), device=device)
    last = first + torch.randint(0, max(1, length // 2), (2 * queries,), device=device)
    last[0] = first[0]
    budget = torch.randint(0, listed + 1, (2 * queries,), device=device)
    budget[0], budget[-1] = 0, listed
    order = torch.rand(2, heads, length, device=device).argsort(-1).int()
    cuts = torch.rand(2, heads, 10, device=device).sort(-1).values * length
    offsets = torch.nn.functional.pad(cuts.int(), (1, 1), value=0)
    offsets[..., -1] = length
    model = QueryModel(*(torch.randn(heads, *x, device=device).to(dtype) for x in ((dim, 8), (8,), (8, 11), (11,))))
    sums, spread = torch.randn(2, heads, 11, dim, device=device), torch.rand(2, heads, 11, device=device)
    means = BucketMeans(*round_means(sums, torch.ones_like(spread)), 0.3, spread)
    kinds: list[Any] = [means] if few else [means, model]
    pools: list[tuple[Candidates | None, dict[str, Tensor]]] = [
        (Candidates(q, scores, order, offsets, budget, listed), {}) for scores in kinds]
    for maps in (own,) if few else (own, Sketch(*(x[0] for x in own))):
        exact = keys.double() @ maps.keys.double() - maps.centre.double()[..., None, :]
        for held in (codes.launch_encode_keys(keys, maps, width), codes.encode_keys_reference(keys, maps, width)):
            assert held.shape == (2, heads, length, width) and held.dtype == torch.int8
            away = codes.decode_codes(held, rank) - exact.clamp(-top, top)
            # the kernel's maps are rounded as the keys are
            assert float(away.abs().max()) < 0.5 + LIMITS[dtype] * rank * float(top.max()) ** 0.5
        prepared = sketch.launch_prepare(q, maps, width, 0.3, histogram.BINS + 5, pools[0][0])
        exact_side = sketch.query_side_reference(q.double(), double(maps), 0.3)
        away = side_of(prepared, rank) - exact_side
        assert bool((away.abs() <= 1.01 * sides_step(exact_side, width)).all()) and not prepared.histogram.any()
        for pool, edges in (*pools, (None, {"first": first, "last": last})):
            given = pool, edges.get("first"), edges.get("last")
            scored = (sketch.launch_all(q, maps, held, 0.3, listed + 7, first, last) if pool is None
                      else sketch.launch_scores(q, maps, held, 0.3, listed + 7, pool))
            kept = scored.histogram.clone()
            mine = sketch.launch_histogram(scored, budget, listed + 7)
            if pool is None:
                assert mine.tokens is None and not mine.bins[..., length:].any()
                mine = mine._replace(bins=mine.bins[..., :length])
            else:
                logits = launch_logits(pool.q, pool.scores, offsets, offsets=True)
                listing = launch_choose(logits, order, offsets, budget, listed, logits=True)
                assert mine.tokens is not None and mine.counts is not None
                used = torch.arange(mine.bins.shape[2], device=device) < mine.counts[..., None]
                mine = mine._replace(tokens=mine.tokens.where(used, -1), bins=mine.bins.where(used, 0))
                assert torch.equal(mine.counts, (listing >= 0).sum(-1))
                assert torch.equal(mine.tokens[..., :listed], listing)
            scores = sketch.sketch_scores_reference(q.double(), double(maps), held, 0.3, mine.tokens, **edges)
            truth = histogram.bins_of(scores)
            assert torch.equal(mine.bins > 0, truth > 0) and not mine.bins[0].any()
            # products of 10 bits of mantissa, logarithms of 11: a bin is 9 to 12.5 %
            assert bool(((mine.bins.int() - truth.int()).abs() <= 1).all())
            assert float((mine.bins != truth).float().mean()) < (0.1 if dtype == torch.float32 else 0.2)
            assert torch.equal(mine.histogram[..., :histogram.BINS], counted_bins(mine.bins))
            assert not mine.histogram[..., histogram.BINS + histogram.TICKET:].any()  # nothing is selected yet
            for wanted, widest in ((budget // 2, listed + 7), (budget, listed))[:1 if few else 2]:
                binned = sketch.launch_histogram(scored._replace(histogram=kept.clone()), wanted, widest)
                found = sketch.launch_select(binned, widest)
                assert torch.equal(found, histogram.best_tokens_reference(mine.bins, mine.tokens, wanted, widest))
                assert torch.equal(sketch.launch_tokens(q, maps, held, 0.3, wanted, widest, *given), found)
    # what is kept of a request lies by seat: the rows the other way round
    seats = 1 - torch.arange(2 * queries, device=device) // queries
    by_row = [x.repeat_interleave(queries, 0) for x in (order, offsets, held, own.queries, means.means, means.steps,
                                                        means.spread)]
    kept = torch.tensor([listed, listed // 2], device=device)
    for scores in kinds:
        there, here = scores, scores
        if isinstance(scores, BucketMeans):
            there = BucketMeans(means.means.flip(0), means.steps.flip(0), means.scale, means.spread.flip(0))
            here = BucketMeans(*by_row[4:6], means.scale, by_row[6])
        seated = Candidates(q, there, by_row[0], offsets.flip(0), kept, listed, seats)
        alone = Candidates(q, here, *by_row[:2], kept[seats], listed)
        routed = [launch_choose(launch_logits(q, c.scores, c.offsets, offsets=True, seats=c.seats), c.order, c.offsets,
                                c.budget, listed, logits=True, seats=c.seats) for c in (seated, alone)]
        assert torch.equal(*routed) and bool((routed[0] >= 0).any())
        maps = own._replace(queries=own.queries.flip(0)), own._replace(queries=by_row[3])
        for tokens in (sketch.launch_tokens, sketch.sketch_tokens_reference):
            both = [tokens(q, sides, by_row[2], 0.3, budget, listed + 7, pool, None, None)
                    for sides, budget, pool in ((maps[0], kept // 2, seated), (maps[1], kept[seats] // 2, alone))]
            assert torch.equal(*both)


def side_of(prepared: sketch.Prepared, rank: int) -> Tensor:
    """The side `[Q, Hq, r]` in float64 that the planes stand for."""
    planes = prepared.planes.double() * prepared.steps.double()[..., None, None]
    bytewise, lower = 256 * planes[..., 0, :] + planes[..., 1, :], 256 * planes[..., 2, :] + planes[..., 3, :]
    whole = 2 * bytewise.shape[-1] - rank
    assert not lower[..., :whole].any()
    pairs = bytewise[..., whole:]
    return torch.cat([bytewise[..., :whole], pairs + 16 * lower[..., whole:], 16 * pairs], dim=-1)


def sides_step(side: Tensor, width: int) -> Tensor:
    """The largest error of every channel in the planes of a side: half a step, and of a pair's 16 times as much."""
    rank = side.shape[-1]
    whole = 2 * width - rank
    alone, low, high = side.split([whole, width - whole, width - whole], dim=-1)
    planes = torch.cat([alone, high / 16, (low - high / 16) / 16], dim=-1)
    step = planes.abs().amax(-1, keepdim=True) / 32512
    times = torch.where(torch.arange(rank, device=side.device) < whole, 0.5, 8.5)
    return step * times


def counted_bins(bins: Tensor) -> Tensor:
    """How many have each bin above 1, and in the place of bin 0 how many there are."""
    counts = torch.zeros(*bins.shape[:2], histogram.BINS, dtype=torch.int32, device=bins.device)
    counts.scatter_add_(-1, bins.long(), torch.ones_like(bins, dtype=torch.int32))
    counts[..., 0], counts[..., 1] = (bins > 0).sum(-1), 0
    return counts


def scored(bins: Tensor, tokens: Tensor | None, widest: int) -> sketch.Scored:
    """Scores of two heads of which `histogram_kernel` makes these bins."""
    bits = ((bins.int() - 1 + histogram.FLOOR) << histogram.SHIFT) + (1 << histogram.SHIFT - 1)
    middles = torch.where(bins == 1, -40.0, bits.view(torch.float32).log2()).where(bins > 0, float("-inf"))
    scores = torch.stack([middles, torch.full_like(middles, float("-inf"))], dim=2).half()
    blocks = -(-bins.shape[2] // sketch.SCORED_AT_ONCE)
    # the first of a head of mass one, the others of none
    tops = torch.zeros(*bins.shape[:2], 2, blocks, device=bins.device)
    masses = torch.nn.functional.pad(torch.ones_like(tops[..., :1]), (0, blocks - 1)) if blocks else tops
    counts = None if tokens is None else torch.full(bins.shape[:2], bins.shape[2], dtype=torch.int32,
                                                    device=bins.device)
    size = sketch.histogram_size(bins.shape[2], widest)
    return sketch.Scored(scores, tops, masses, tokens, counts,
                         torch.zeros(*bins.shape[:2], size, dtype=torch.int32, device=bins.device))


def check_best_tokens(width: int, device: str, few: bool = False) -> None:
    """Exactly the twin's tokens, in its order, from bins with many ties, ones and gaps. few: one of the budgets."""
    torch.manual_seed(width)
    rows, heads = 5, 2
    bins = torch.randint(0, 5, (rows, heads, width), device=device, dtype=torch.uint8)
    bins[1] = torch.randint(0, histogram.BINS, (heads, width), device=device, dtype=torch.uint8)
    bins[2] = 0
    bins[3] = bins[3].clamp(max=1)
    tokens = torch.rand(rows, heads, width, device=device).argsort(-1).int()
    there = int((bins[0] > 0).sum(-1).min()) if width else 0
    for budget in ([0, there // 2, 5, there, 1], [there, 1, 0, width // 3, width + 9])[:1 if few else 2]:
        for widest in {there // 3 + 1} if few else {max(budget), there // 3 + 1, 0}:
            for listed in (tokens, None):
                given = torch.tensor(budget, device=device)
                binned = sketch.launch_histogram(scored(bins, listed, widest), given, widest)
                assert torch.equal(binned.bins, bins)
                found = sketch.launch_select(binned, widest)
                truth = histogram.best_tokens_reference(bins, listed, given, widest)
                assert found.shape == truth.shape and found.dtype == truth.dtype == torch.int32
                assert torch.equal(found, truth), (budget, widest, listed is None)
                if found.numel():
                    taken = binned.histogram[..., histogram.BINS + histogram.TICKET]
                    assert bool((taken == sketch.select_blocks(width, widest)).all() or not width)


def check_losses(shape: tuple[int, ...], device: str, few: bool = False) -> None:
    """shape: KV heads, query heads of each, queries, keys, head dimension. Queries without a key, with one, and with
    all; logits far below the others; a mask of its own strides. few: one of the masks and shares that are read."""
    heads_kv, group, count, length, dim = shape
    torch.manual_seed(length)
    heads = heads_kv * group
    teacher = 3 * torch.randn(heads, count, length, device=device)
    teacher[..., ::5] -= 12
    student = teacher + torch.randn_like(teacher)
    seen = torch.randint(0, length + 1, (heads_kv, 1, count, 1), device=device)
    seen[0, 0, 0], seen[0, 0, -1], seen[-1, 0, -1] = 0, 1, length
    mask = (torch.arange(length, device=device) < seen).expand(-1, group, -1, -1).reshape(heads, count, length)
    values = torch.randn(heads_kv, length, dim, device=device)
    anchor_out = torch.randn(heads, count, dim, device=device)
    anchor_lse = 2 * torch.randn(heads, count, device=device)
    weights = losses.Weights(3.0, 6.0, 1.0, 0.1, 0.1, 0.2, 0.2)
    wide = [x.double() for x in (student, teacher)]
    for kept in (mask.mT.contiguous().mT, mask, mask[:1, :1])[:1 if few else 3]:
        found, truth = (f(*x, kept.expand_as(mask) if f is losses.kl_huber_reference else kept, weights) for f, x in (
            (losses.launch_kl_huber, (student, teacher)), (losses.kl_huber_reference, wide)))
        for name, a, b in zip(found._fields, found, truth, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
        for read in (0.4,) if few else (0.0, 0.02, 0.4):
            for counted in (torch.tensor([0.7], device=device), 0.7)[:1 if few else 2]:
                given = losses.Outputs(values, anchor_out, anchor_lse, counted)
                exact = losses.Outputs(*(x.double() for x in given[:3]), counted)
                a, b = (losses.launch_output_error(student, teacher, kept, given, read),
                        losses.output_error_reference(*wide, kept.expand_as(mask), exact, read))
                for mine, true in zip(a, b, strict=True):
                    torch.testing.assert_close(mine.double(), true, rtol=2e-3, atol=2e-5)


def check_bins() -> None:
    """Bins order as scores do, eight to a doubling; none is lost at either end."""
    scores = torch.tensor([-1.0, 0.0, 1e-30, 2.0**-25, 2.0**-24, 0.5, 0.57, 1.0, 4.0, 1e9], dtype=torch.float64)
    bins = histogram.bins_of(scores)
    assert bins.tolist() == [0, 1, 1, 1, 9, 193, 194, 201, 217, histogram.BINS - 1]


def random_phi(s: Step, dtype: torch.dtype, device: str, width: int = 40, features: int = 24) -> tuple[Any, ...]:
    """Maps, offset and state of a step, for `phi_query`, and the map of keys that the state is made with."""
    maps = maps_of_keys(2, s.k.shape[1], s.k.shape[3], 24, features, dtype, device)
    first = torch.where(s.mid.any(1), s.mid.int().argmax(1), 0)
    cache = phi_sums_reference(s.k, s.v, first, first + s.mid.sum(1), maps)
    return maps_of(s.q.shape[1], s.q.shape[2], width, features, dtype, device), torch.randn(
        s.q.shape[1], device=device), PhiState(*cache), maps._replace(shift=cache.m)


def check_decode(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Append and full attention on storage with room to spare, of which what is not yet there is poison."""
    heads_q, heads_kv, dim, room, batch = shape
    torch.manual_seed(0)
    keys, values = (torch.randn(batch, heads_kv, room, dim, device=device, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(batch, heads_kv, 1, dim, device=device, dtype=dtype) for _ in range(2))
    lengths = torch.randint(1, room + 1, (batch,), device=device)
    starts = (lengths * torch.rand(batch, device=device) * 0.5).long()
    lengths[0], starts[0] = room, 0
    for b in range(batch):
        keys[b, :, lengths[b] - 1:], values[b, :, lengths[b] - 1:] = float("nan"), float("nan")
    mine, truth = (keys.clone(), values.clone()), (keys.clone(), values.clone())
    launch_append(k, v, *mine, lengths)
    append_token_reference(k, v, *truth, lengths)
    for x, y in zip(mine, truth, strict=True):
        assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))
    q = torch.randn(batch, heads_q, dim, device=device, dtype=dtype)
    agree(launch_decode(q, *mine, starts, lengths, scale=0.2),
          decode_attention_reference(q.double(), *mine, starts, lengths, scale=0.2), LIMITS[dtype], "decode")


def check_sort(shape: tuple[int, ...], device: str) -> None:
    """Places by bucket, of which some are empty and some places of none; shape: rows, places, buckets."""
    rows, length, buckets = shape
    torch.manual_seed(length)
    bucket = torch.randint(0, max(1, buckets - 2), (rows, 2, length), device=device, dtype=torch.int32)
    for used in (None, torch.rand(rows, 1, length, device=device) < 0.7):
        keyed = bucket if used is None else torch.where(used, bucket, buckets)
        for mine, truth in zip(launch_sort(keyed, buckets), sort_by_bucket_reference(keyed, buckets), strict=True):
            assert mine.dtype == truth.dtype == torch.int32 and mine.is_contiguous() and torch.equal(mine, truth)


def check_between(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Norms of every kind, the gate of an MLP, and the rotation of heads that lie between others; shape: rows, query
    heads, KV heads, head dimension."""
    rows, heads_q, heads, dim = shape
    torch.manual_seed(dim)
    x = torch.randn(rows, 3, dim + 1, device=device, dtype=dtype)[..., :dim] * 3
    weight = torch.randn(dim, device=device, dtype=dtype)
    step = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    for how in ({}, {"rounds": False}, {"rounds": False, "shift": 1.0}):
        mine = launch_rms_norm(x, weight, 1e-6, **how)
        truth = rms_norm_reference(x.double(), weight.double(), 1e-6, **how)
        assert mine.dtype == dtype and error(mine, truth) < step
    gate, up = x, torch.randn(rows, 3, dim, device=device, dtype=dtype)
    mine = launch_silu_product(gate, up)
    assert mine.dtype == dtype and error(mine, silu_product_reference(gate.double(), up.double())) < step
    q, k = (torch.randn(rows, 1, n, dim, device=device, dtype=dtype).transpose(1, 2) for n in (heads_q, heads))
    for batch in (1, rows):
        angle = torch.randn(batch, 1, dim // 2, device=device).repeat(1, 1, 2)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        for mine, truth in zip(launch_rotate_pair(q, k, cos, sin), rotate_pair_reference(q, k, cos, sin), strict=True):
            assert mine.dtype == dtype and error(mine, truth.double()) < step


def check_few_rows(shape: tuple[int, ...], dtype: torch.dtype, device: str, how: Launch | None = None) -> None:
    """Products of a few rows, with biases and without; shape: rows, inputs, outputs of one to three weights."""
    rows, dim, *outputs = shape
    torch.manual_seed(dim)
    x = torch.randn(rows, 1, dim, device=device, dtype=dtype)
    weights = [torch.randn(n, dim, device=device, dtype=dtype) * dim**-0.5 for n in outputs]
    for biased in (False, True):
        biases = [torch.randn(n, device=device, dtype=dtype) if biased else None for n in outputs]
        given = double(x), [double(w) for w in weights], [double(b) for b in biases]
        found = launch_few_rows(x, weights, biases, how)
        for mine, truth in zip(found, few_rows_reference(*given), strict=True):
            assert mine.dtype == dtype and mine.shape == truth.shape and mine.is_contiguous()
            assert error(mine, truth) < LIMITS[dtype], f"{shape}, biases {biased}, {how}"
        if len(outputs) == 2 and outputs[0] == outputs[1]:
            mine = launch_few_rows_gated(x, weights, biases, how)
            assert mine.dtype == dtype and error(mine, few_rows_gated_reference(*given)) < LIMITS[dtype]


def check_bucket_sums(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Sums over buckets, of which some are empty, and every row against its own; rows of a longer storage, and a mask
    whose dimensions lie in another order."""
    batch, heads, length, dim, buckets = shape
    torch.manual_seed(0)
    x = torch.randn(batch, heads, length + 9, dim, device=device, dtype=dtype)[:, :, 4:length + 4]
    bucket = torch.randint(0, max(1, buckets - 2), (batch, heads, length), device=device, dtype=torch.int32)
    turned = (torch.rand(heads, batch, length, device=device) < 0.7).transpose(0, 1)
    for used in (None, torch.rand(batch, 1, length, device=device) < 0.7, turned):
        mine = launch_bucket_sums(x, bucket, used, buckets)
        truth = bucket_sums_reference(x.double(), bucket, used, buckets)
        assert torch.equal(mine[0].double(), truth[0])
        assert error(mine[1], truth[1]) < 1e-6
    table = torch.randn(batch, heads, buckets, dim, device=device, dtype=dtype)
    for apart in (False, True):
        mine, truth = (f(a, b, bucket, apart=apart) for f, a, b in (
            (launch_against, x, table), (against_bucket_reference, x.double(), table.double())))
        assert error(mine, truth) < 1e-5
