"""Exact top-k: score every mid key, read the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.selectors.base import Selector, Spends
from sparsekv.kernels.launch import wide_product
from sparsekv.util.config import option


def group_scores(view: LayerView, queries: Tensor) -> Tensor:
    """`q·k·scale`, with -inf outside the mid region: queries `[B, Hq, T, d]` -> `[B, Hkv, T, G, N]`, float32 at
    least."""
    return mask_mid(view, group_products(queries, view.keys) * view.scale).unflatten(2, (queries.shape[2], -1))


def group_products(queries: Tensor, keys: Tensor) -> Tensor:
    """Multiply queries `[B, Hq, T, d]` with the keys `[B, Hkv, N, d]` of their groups: `[B, Hkv, T·G, N]`, float32 at
    least."""
    batch, heads_kv = keys.shape[:2]
    q = queries.unflatten(1, (heads_kv, -1)).transpose(2, 3).flatten(2, 3).flatten(0, 1).to(keys.dtype)
    # rounded to bfloat16, a score near 200 would be wrong by up to half a nat
    return wide_product(q, keys.flatten(0, 1).mT).unflatten(0, (batch, heads_kv))


def mask_mid(view: LayerView, scores: Tensor) -> Tensor:
    """-inf outside the mid region, in place: scores `[B, H, n, N]`."""
    if len(scores) == 1 and scores.device.type == "cpu":  # elsewhere to read the borders is to wait for the device
        first, last = int(view.regions.mid_first[0]), int(view.regions.mid_last[0])
        scores[..., :first] = scores[..., last:] = float("-inf")
        return scores
    return scores.masked_fill_(~view.regions.mid_mask(0, scores.shape[-1])[:, None, None], float("-inf"))


def top_tokens(scores: Tensor, k: Tensor, widest: int, *, ordered: bool = False, stable: bool = False) -> Tensor:
    """The `k[b]` best of every list, padded with -1: scores `[B, H, T, N]`, k `[B]`, widest = the largest k
    -> `[B·T, H, widest]` int64, the best first if `ordered`. Entries of -inf are never chosen. stable: of equal
    ones the first are, wherever a list begins; many are equal where scores are pooled."""
    widest = min(widest, scores.shape[-1])
    if stable:
        values, tokens = (x[..., :widest] for x in scores.sort(dim=-1, descending=True, stable=True))
    else:
        values, tokens = scores.topk(widest, dim=-1, sorted=ordered or k.numel() > 1)
    inside = torch.arange(widest, device=k.device) < k[:, None] if k.numel() > 1 else k.new_ones(1, widest).bool()
    tokens = torch.where(inside[:, None, None] & ~torch.isneginf(values), tokens, -1)
    return tokens.transpose(1, 2).flatten(0, 1)


def key_bytes(view: LayerView) -> Tensor:
    """Bytes of all keys of the mid region, `[B]`: what scoring every one of them reads."""
    return view.regions.mid_sizes * (view.num_kv_heads * view.keys.shape[-1] * view.keys.element_size())


@dataclass(eq=False)
class TopK(Selector):
    """Exhaustive top-k over the mid region (completion paper, Lane A; top-k paper §3). The heads of a group share one
    list, by the sum of their softmax, unless `per_query_head`."""

    name: ClassVar[str] = "topk"
    replayable: ClassVar[bool] = True
    restorable: ClassVar[bool] = True
    spends: ClassVar[Spends] = Spends.AT_STEP
    scores_keys: ClassVar[bool] = True

    per_query_head: bool = option(False, help="Every query head reads its own tokens; otherwise the heads of a group "
                                              "share one list and token_budget counts that list.")

    def cost_bytes(self, view: LayerView) -> Tensor | float:
        return key_bytes(view)

    def select(self, view: LayerView, queries: Queries) -> Selection:
        scores = group_scores(view, queries.rot)
        if self.per_query_head:
            scores = scores.transpose(2, 3).flatten(1, 2)
        elif view.group == 1:
            scores = scores[:, :, :, 0]
        else:
            outside = torch.isneginf(scores[:, :, :, 0])
            scores = scores.softmax(-1).nan_to_num(0.0).sum(3).masked_fill(outside, float("-inf"))
        return Selection(tokens=top_tokens(scores, self.budget, self.widest))
