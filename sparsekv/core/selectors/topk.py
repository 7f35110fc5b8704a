"""Exact top-k: score every mid key, read the best."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from sparsekv.config import option
from sparsekv.core.selectors.base import LayerView, Queries, Selection, Selector
from sparsekv.errors import SparseKVError


def group_scores(view: LayerView, queries: Tensor) -> Tensor:
    """`q·k·scale`, with -inf outside the mid region: queries `[B, Hq, T, d]` -> `[B, Hkv, T, G, N]`."""
    batch, _, count, dim = queries.shape
    heads_kv = view.num_kv_heads
    q = queries.reshape(batch, heads_kv, view.group, count, dim).transpose(2, 3)
    keys = view.keys
    scores = q.reshape(batch, heads_kv, count * view.group, dim).to(keys.dtype) @ keys.mT
    scores = scores.float() * view.scale if keys.dtype != torch.float64 else scores * view.scale
    return mask_mid(view, scores).reshape(batch, heads_kv, count, view.group, -1)


def mask_mid(view: LayerView, scores: Tensor) -> Tensor:
    """-inf outside the mid region, in place where it can be: scores `[B, H, n, N]`."""
    if scores.shape[0] == 1:
        first, last = int(view.regions.mid_first[0]), int(view.regions.mid_last[0])
        scores[..., :first] = float("-inf")
        scores[..., last:] = float("-inf")
        return scores
    return scores.masked_fill(~view.regions.mid_mask()[:, None, None], float("-inf"))


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


@dataclass(eq=False)
class TopK(Selector):
    """Exhaustive top-k over the mid region (completion paper, Lane A; top-k paper §3)."""

    name: ClassVar[str] = "topk"
    source: ClassVar[str] = "completion paper §4.1; top-k paper §3"
    scores_keys: ClassVar[bool] = True

    per_query_head: bool = option(False, help="Every query head reads its own tokens; otherwise the heads of a group "
                                              "share one list and token_budget counts that list.")
    layer_budget: str = option("uniform", help="How the budget is spread over layers: uniform, linear (in depth, equal "
                                               "total) or a JSON file with one number a layer (a share below 1 or "
                                               "tokens).")
    slope: float = option(0.5, help="With layer_budget linear the first layer gets 1 + slope times the budget, the "
                                    "last 1 − slope; between -1 and 1.")
    group_score: str = option("sum", help="How a group shares one list: sum (of softmax over the mid region) or max "
                                          "(of raw scores).")

    def validate(self) -> None:
        super().validate()
        if self.group_score not in ("sum", "max"):
            raise SparseKVError(f"unknown group_score {self.group_score!r}: expected sum or max")
        if not -1 <= self.slope <= 1:
            raise SparseKVError(f"slope must be between -1 and 1, found {self.slope}")
        self.table = None if self.layer_budget in ("uniform", "linear") else read_layer_budgets(self.layer_budget)

    def layer_tokens(self, view: LayerView) -> Tensor:
        """This layer's k for every row, `[B]`."""
        k = self.budget_tokens(view)
        if self.layer_budget == "uniform":
            return k
        if self.table is not None:
            if len(self.table) != view.num_layers:
                raise SparseKVError(f"{self.layer_budget} has {len(self.table)} layer budgets; this model has "
                                    f"{view.num_layers} layers")
            own = self.table[view.layer_idx]
            k = torch.ceil(own * view.regions.context).long() if own < 1 else torch.full_like(k, int(own))
        else:
            depth = view.layer_idx / max(view.num_layers - 1, 1)
            k = torch.round(k * (1 + self.slope * (1 - 2 * depth))).long()
        return torch.minimum(k, view.regions.mid_sizes)

    def select(self, view: LayerView, queries: Queries) -> Selection:
        k = self.layer_tokens(view)
        scores = group_scores(view, queries.rot)
        if self.per_query_head:
            batch, heads_kv, count, group, length = scores.shape
            scores = scores.transpose(2, 3).reshape(batch, heads_kv * group, count, length)
        else:
            scores = share_in_group(scores, self.group_score)
        return Selection(tokens=top_tokens(scores, k))
