"""Exact top-k: score every mid key, read the best."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from sparsekv.config import option
from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.selectors.base import Selector
from sparsekv.errors import SparseKVError


def group_scores(view: LayerView, queries: Tensor) -> Tensor:
    """`q·k·scale`, with -inf outside the mid region: queries `[B, Hq, T, d]` -> `[B, Hkv, T, G, N]`."""
    batch, _, count, dim = queries.shape
    heads_kv, keys = view.num_kv_heads, view.keys
    q = queries.reshape(batch, heads_kv, view.group, count, dim).transpose(2, 3)
    scores = q.reshape(batch, heads_kv, count * view.group, dim).to(keys.dtype) @ keys.mT
    scores = scores.to(torch.promote_types(keys.dtype, torch.float32)) * view.scale
    return mask_mid(view, scores).reshape(batch, heads_kv, count, view.group, -1)


def mask_mid(view: LayerView, scores: Tensor) -> Tensor:
    """-inf outside the mid region, in place: scores `[B, H, n, N]`."""
    if len(scores) == 1 and scores.device.type == "cpu":  # elsewhere to read the borders is to wait for the device
        first, last = int(view.regions.mid_first[0]), int(view.regions.mid_last[0])
        scores[..., :first] = scores[..., last:] = float("-inf")
        return scores
    return scores.masked_fill_(~view.regions.mid_mask(0, scores.shape[-1])[:, None, None], float("-inf"))


def top_tokens(scores: Tensor, k: Tensor, widest: int) -> Tensor:
    """The `k[b]` best of every list, padded with -1: scores `[B, H, T, N]`, k `[B]`, widest = the largest k
    -> `[B·T, H, widest]` int64. Entries of -inf are never chosen."""
    widest = min(widest, scores.shape[-1])
    values, tokens = scores.topk(widest, dim=-1, sorted=k.numel() > 1)
    inside = torch.arange(widest, device=k.device) < k[:, None] if k.numel() > 1 else k.new_ones(1, widest).bool()
    tokens = torch.where(inside[:, None, None] & ~torch.isneginf(values), tokens, -1)
    return tokens.transpose(1, 2).flatten(0, 1)


def read_layer_budgets(path: str) -> list[float]:
    """One number a layer from a JSON file. Raises SparseKVError."""
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise SparseKVError(f"layer_budget must be uniform, linear or a JSON file, and {path!r} could not be read: "
                            f"{error}") from error
    if not isinstance(table, list) or not all(isinstance(x, int | float) and x >= 0 for x in table):
        raise SparseKVError(f"{path!r} must hold a JSON list with one number a layer")
    return table


def key_bytes(view: LayerView) -> Tensor:
    """Bytes of all keys of the mid region, `[B]`: what scoring every one of them reads."""
    return view.regions.mid_sizes * (view.num_kv_heads * view.keys.shape[-1] * view.keys.element_size())


@dataclass(eq=False)
class TopK(Selector):
    """Exhaustive top-k over the mid region (completion paper, Lane A; top-k paper §3). The heads of a group share one
    list, by the sum of their softmax, unless `per_query_head`."""

    name: ClassVar[str] = "topk"
    source: ClassVar[str] = "completion paper §4.1; top-k paper §3"
    scores_keys: ClassVar[bool] = True

    per_query_head: bool = option(False, help="Every query head reads its own tokens; otherwise the heads of a group "
                                              "share one list and token_budget counts that list.")
    layer_budgets: str = option("uniform", help="How the budget is spread over layers: uniform, linear (in depth, "
                                                "equal total: 1.5 times the budget in the first layer, half in the "
                                                "last) or a JSON file with one number a layer (a share below 1 or "
                                                "tokens).")

    def validate(self) -> None:
        super().validate()
        self.table = None if self.layer_budgets in ("uniform", "linear") else read_layer_budgets(self.layer_budgets)

    def layer_budget(self, view: LayerView, tokens: Tensor) -> Tensor:
        if self.layer_budgets == "linear":
            depth = view.layer_idx / max(view.num_layers - 1, 1)
            return torch.round(tokens * (1.5 - depth)).long()
        if self.table is None:
            return tokens
        if len(self.table) != view.num_layers:
            raise SparseKVError(f"{self.layer_budgets} has {len(self.table)} layer budgets; this model has "
                                f"{view.num_layers} layers")
        own = self.table[view.layer_idx]
        return torch.ceil(own * view.regions.context).long() if own < 1 else torch.full_like(tokens, int(own))

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
