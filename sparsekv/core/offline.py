"""Decode steps on captured tensors: what a selector and an estimator would have given, without running the model.

There is no second mathematics here. A captured window stands for requests: a prefill that ends at one of its positions,
followed by the captured queries soon after it. Selector and estimator are built over that prefill and take their steps
as the runtime does; quality cards, calibration, diagnostics and benchmarks are made of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from sparsekv.core.estimators import Estimator
from sparsekv.core.layer import OBSERVED, LayerView, Queries, Selection
from sparsekv.core.regions import Regions, tokens_of_budget
from sparsekv.core.rope import RopeTable
from sparsekv.core.selectors.base import Selector
from sparsekv.core.selectors.router import Router
from sparsekv.core.step import build
from sparsekv.kernels import choose_tokens

NEG_INF = float("-inf")
POINTS = 24
"""Of a mass curve."""
S = TypeVar("S", bound=Selector)
E = TypeVar("E", bound=Estimator | None)


@dataclass(frozen=True)
class Window:
    """A layer (or several, side by side as heads) on one document: keys, values `[Hkv, N, d]` and queries `[Hq, T, d]`,
    keys and queries with RoPE, at ascending `positions [T]` that all heads share."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    positions: Tensor
    scale: float
    sink_size: int
    window_size: int
    rope: RopeTable | None = None
    layer_idx: int = 0
    num_layers: int = 1


class Request(NamedTuple):
    """A prefill of a window, the view of the tokens in sight afterwards, and the queries that follow (`T` of them, one
    row). `full [T, Hq, d]`: the output of full attention."""

    prefill: LayerView
    view: LayerView
    queries: Queries
    full: Tensor

    def build(self, selector: S, estimator: E) -> tuple[S, E]:
        """Selector and estimator over the prefill, as the runtime builds them when decoding begins. Give fresh ones."""
        build(self.prefill, selector, estimator)
        return selector, estimator


def requests(window: Window, count: int, *, span: int = 64, first: float = 1 / 3) -> Iterator[Request]:
    """Make `count` requests of a window: prefills that end at captured positions evenly spaced over those past the
    share `first` and past sink and local window, each followed by the captured queries less than `span` tokens on (at
    least one; 1: that one alone). Without a position past sink and window there is one, at the last.
    """
    positions = window.positions
    exact = int((positions <= window.sink_size + window.window_size).sum())
    low = min(max(int(first * len(positions)), exact), len(positions) - 1)
    starts = torch.linspace(low, len(positions) - 1, min(count, len(positions) - low)).long().tolist()
    for start in starts:
        yield request(window, int(positions[start]), span)


def request(window: Window, length: int, span: int) -> Request:
    """The prefill of the first `length` tokens, and the captured queries at `length … length + span − 1`.

    Raises ValueError where none was captured there."""
    here = (window.positions >= length) & (window.positions < length + span)
    if not bool(here.any()):
        raise ValueError(f"no query was captured between positions {length} and {length + span - 1}")
    queries = window.queries[None, :, here]
    lengths = window.positions[here] + 1
    end = int(lengths.max())
    device = window.keys.device
    regions = Regions.at_prefill_end(torch.zeros(1, dtype=torch.long, device=device), length, window.sink_size,
                                     window.window_size)
    before = (window.positions >= length - OBSERVED) & (window.positions < length)
    recent = window.queries[None, :, before if int(before.sum()) == min(OBSERVED, length) else before & False]
    prefill = LayerView(
        window.keys[None, :, :length], window.values[None, :, :length], regions=regions, scale=window.scale,
        num_query_heads=window.queries.shape[0], layer_idx=window.layer_idx, num_layers=window.num_layers,
        rope=window.rope, recent_queries=recent, recent_end=length)
    view = replace(prefill, keys=window.keys[None, :, :end], values=window.values[None, :, :end],
                   regions=regions.grown(end))
    asked = Queries(queries, lengths.to(device), window.rope)
    return Request(prefill, view, asked, dense_step(view, asked)[0])


def scores(view: LayerView, queries: Queries) -> Tensor:
    """`q·k·scale` of one row, -inf where a query cannot see a key: `[T, Hq, N]`, float32 at least."""
    keys = view.keys[0].to(torch.promote_types(view.keys.dtype, torch.float32))
    grouped = queries.rot[0].to(keys.dtype).reshape(keys.shape[0], -1, keys.shape[-1])
    logits = (grouped @ keys.mT).reshape(view.num_query_heads, queries.count, -1) * view.scale
    columns = torch.arange(keys.shape[1], device=keys.device)
    return logits.transpose(0, 1).masked_fill((columns >= queries.lengths[:, None])[:, None], NEG_INF)


def dense_step(view: LayerView, queries: Queries) -> tuple[Tensor, Tensor]:
    """Full attention of one row: out `[T, Hq, d]`, lse `[T, Hq]`."""
    logits = scores(view, queries)
    values = view.values[0].to(logits.dtype)
    weights = logits.softmax(-1).unflatten(1, (values.shape[0], -1))
    out = torch.einsum("thgn,hnd->thgd", weights, values).flatten(1, 2)
    return out, logits.logsumexp(-1)


def mid_scores(request: Request) -> Tensor:
    """`q·k·scale` over the mid region, -inf outside: `[T, Hq, N]`."""
    logits = scores(request.view, request.queries)
    return logits.masked_fill(~request.view.regions.mid_mask(0, logits.shape[-1])[0], NEG_INF)


def mid_share(request: Request) -> Tensor:
    """Attention over the mid region, normalised there: `[T, Hq, N]`, zeros where it is empty."""
    return mid_scores(request).softmax(-1).nan_to_num(0.0)


def mass_read(share: Tensor, selection: Selection) -> Tensor:
    """Share of the mid region's attention that a selection reads: `mid_share`'s `[T, Hq, N]` -> `[T, Hq]`."""
    tokens = selection.as_tokens().long()
    tokens = tokens.repeat_interleave(share.shape[1] // tokens.shape[1], dim=1)
    return (share.gather(-1, tokens.clamp(min=0)) * (tokens >= 0)).sum(-1)


def best_buckets(request: Request, router: Router, share: Tensor, budget: int | float) -> Selection:
    """Select what the router would read at a budget if it knew the attention: its buckets by true mass per token,
    summed over the group. share: `mid_share` of the request."""
    view, index = request.view, router.buckets
    assert index is not None
    counts, order = index.counts, index.order.long()
    grouped = share.unflatten(1, (view.num_kv_heads, -1)).sum(2)
    # attention in the order of the buckets, added up to where each of them ends
    running = (grouped.gather(-1, order.clamp(min=0).expand(len(share), -1, -1)) * (order >= 0)).double().cumsum(-1)
    mass = torch.nn.functional.pad(running, (1, 0)).gather(
        -1, index.offsets.long().expand(len(share), -1, -1)).diff(dim=-1).to(share.dtype)
    tokens = request.queries.per_query(tokens_of_budget(budget, request.prefill.regions))
    return Selection(tokens=choose_tokens(mass / counts.clamp(min=1), index.order, index.offsets, tokens,
                                          int(tokens.max())))


def relative_error(out: Tensor, full: Tensor) -> Tensor:
    """`‖out − full‖ / ‖full‖` of every output: `[..., d]` each -> `[...]`."""
    return (out - full).norm(dim=-1) / size_of(full)


def size_of(full: Tensor) -> Tensor:
    """`‖full‖` of every output, by which an error may be divided."""
    return full.norm(dim=-1).clamp(min=1e-12)


def mass_curve(share: Tensor, size: int) -> tuple[list[float], Tensor]:
    """Share of the mid mass in the best x of the mid keys, mean over queries: `mid_share`'s `[T, Hq, N]` and the mid
    region's size -> fractions `x` and `[Hq, POINTS]`."""
    running = share.sort(-1, descending=True).values.cumsum(-1)
    fractions = [math.exp(math.log(1e-3) * (1 - i / (POINTS - 1))) for i in range(POINTS)]
    ranks = [max(0, math.ceil(size * f) - 1) for f in fractions]
    return fractions, running[..., ranks].mean(0)
