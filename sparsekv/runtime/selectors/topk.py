"""Exact top-k: score every mid key, read the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsekv.config import option
from sparsekv.errors import SparseKVError
from sparsekv.runtime.selectors.base import LayerView, Queries, Selection, Selector


def group_scores(view: LayerView, queries: Tensor) -> Tensor:
    """`q·k·scale`, with -inf outside the mid region: queries `[B, Hq, T, d]` -> `[B, Hkv, T, G, N]`."""
    batch, _, count, dim = queries.shape
    heads_kv = view.num_kv_heads
    q = queries.reshape(batch, heads_kv, view.group, count, dim).transpose(2, 3)
    keys = view.keys
    scores = q.reshape(batch, heads_kv, count * view.group, dim).to(keys.dtype) @ keys.mT
    scores = scores.float() * view.scale if keys.dtype != torch.float64 else scores * view.scale
    scores = scores.masked_fill(~view.regions.mid_mask()[:, None, None], float("-inf"))
    return scores.reshape(batch, heads_kv, count, view.group, -1)


def share_in_group(scores: Tensor, how: str) -> Tensor:
    """One score a KV head: `[B, Hkv, T, G, N] -> [B, Hkv, T, N]`.

    `sum` adds the softmax of every query head over the mid region, `max` takes the best raw score.
    """
    if how == "max" or scores.shape[3] == 1:
        return scores.amax(3)
    return scores.softmax(-1).nan_to_num(0.0).sum(3).masked_fill(torch.isinf(scores[:, :, :, 0]), float("-inf"))


def top_tokens(scores: Tensor, k: Tensor) -> Tensor:
    """The `k[b]` best of every list, padded with -1: scores `[B, H, T, N]`, k `[B]` -> `[B·T, H, max k]` int64.

    Entries of -inf are never chosen.
    """
    widest = min(int(k.max()), scores.shape[-1]) if k.numel() else 0
    values, tokens = scores.topk(widest, dim=-1, sorted=bool((k != widest).any()))
    keep = (torch.arange(widest, device=k.device) < k[:, None])[:, None, None] & ~torch.isneginf(values)
    tokens = torch.where(keep, tokens, -1)
    return tokens.transpose(1, 2).reshape(-1, scores.shape[1], widest)


@dataclass(eq=False)
class TopK(Selector):
    """Exhaustive top-k over the mid region (completion paper, Lane A; top-k paper §3)."""

    name: ClassVar[str] = "topk"
    source: ClassVar[str] = "completion paper §4.1; top-k paper §3"

    per_query_head: bool = option(False, help="Every query head reads its own tokens; otherwise the heads of a group "
                                              "share one list and token_budget counts that list.")
    group_score: str = option("sum", help="How a group shares one list: sum (of softmax over the mid region) or max "
                                          "(of raw scores).")

    def validate(self) -> None:
        super().validate()
        if self.group_score not in ("sum", "max"):
            raise SparseKVError(f"unknown group_score {self.group_score!r}: expected sum or max")

    def select(self, view: LayerView, queries: Queries) -> Selection:
        k = self.budget_tokens(view)
        scores = group_scores(view, queries.rot)
        if self.per_query_head:
            batch, heads_kv, count, group, length = scores.shape
            scores = scores.transpose(2, 3).reshape(batch, heads_kv * group, count, length)
        else:
            scores = share_in_group(scores, self.group_score)
        return Selection(tokens=top_tokens(scores, k))
