"""Full causal attention through torch's own kernels: the path of every prefill and of every layer that stays dense."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SLIDING_BLOCK = 1024


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, window: int | None = None, starts: Tensor | None = None,
) -> Tensor:
    """Exact attention of the last q of k positions: query `[B, Hq, q, d]`, key and value `[B, Hkv, k, d]` -> as query.

    window: keys further back than this are not seen (sliding-window layers). starts `[B]`: first real token of a
    left-padded row. Memory grows with `q·k` only where rows are padded or a chunk follows a cache on a CPU.
    """
    q_len, k_len = query.shape[2], key.shape[2]
    options: dict[str, Any] = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if starts is not None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=_mask(q_len, k_len, window, starts), **options)
    if window is not None and window < k_len:
        return _sliding(query, key, value, window, options)
    if q_len == 1 or q_len == k_len:
        return F.scaled_dot_product_attention(query, key, value, is_causal=q_len > 1, **options)
    if query.is_cuda:
        from torch.nn.attention.bias import causal_lower_right

        return F.scaled_dot_product_attention(query, key, value, attn_mask=causal_lower_right(q_len, k_len), **options)
    mask = torch.ones(q_len, k_len, dtype=torch.bool, device=query.device).tril(k_len - q_len)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def _mask(q_len: int, k_len: int, window: int | None, starts: Tensor) -> Tensor:
    """`[B, 1, q, k]`; a padding query sees itself, so that no row is empty."""
    rows = torch.arange(k_len - q_len, k_len, device=starts.device)[:, None]
    columns = torch.arange(k_len, device=starts.device)
    mask = columns <= rows
    if window is not None:
        mask = mask & (columns > rows - window)
    return ((mask & (columns >= starts[:, None, None])) | (columns == rows))[:, None]


def _sliding(query: Tensor, key: Tensor, value: Tensor, window: int, options: dict[str, Any]) -> Tensor:
    q_len, k_len = query.shape[2], key.shape[2]
    offset = k_len - q_len
    parts = []
    for a in range(0, q_len, SLIDING_BLOCK):
        b = min(a + SLIDING_BLOCK, q_len)
        first, last = max(0, offset + a - window + 1), offset + b
        rows = torch.arange(offset + a, offset + b, device=query.device)[:, None]
        columns = torch.arange(first, last, device=query.device)
        mask = (columns <= rows) & (columns > rows - window)
        parts.append(F.scaled_dot_product_attention(
            query[:, :, a:b], key[:, :, first:last], value[:, :, first:last], attn_mask=mask, **options))
    return torch.cat(parts, dim=2)
