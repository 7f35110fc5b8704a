"""Full causal attention through torch's own kernels: the path of every prefill and of every layer that stays dense."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SLIDING_BLOCK = 1024
MERGE_BLOCK = 4096


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, window: int | None = None, starts: Tensor | None = None,
) -> Tensor:
    """Exact attention of the last q of k positions: query `[B, Hq, q, d]`, key and value `[B, Hkv, k, d]` -> as query.

    window: keys further back than this are not seen (sliding-window layers). starts `[B]`: first real token of a
    left-padded row. Memory grows with `q·k` only where rows are padded.
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
        if not query.requires_grad and splits(
            query.dtype, query.shape[1], key.shape[1], query.shape[3], query.device,
        ):
            return split_attention(query, key, value, scale)
        from torch.nn.attention.bias import causal_lower_right

        return F.scaled_dot_product_attention(query, key, value, attn_mask=causal_lower_right(q_len, k_len), **options)
    return _sliding(query, key, value, k_len, options)


def split_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """`causal_attention` of a chunk after a cache as two cuDNN calls, all of the past and the chunk itself, merged by
    their log-sum-exps: torch's other kernels know the lower right corner, cuDNN's is faster and does not. CUDA only."""
    past = key.shape[2] - query.shape[2]
    far, far_lse = _cudnn(query, key[:, :, :past], value[:, :, :past], scale, causal=False)
    near, near_lse = _cudnn(query, key[:, :, past:], value[:, :, past:], scale, causal=True)
    return lerp_rows(near, far, torch.sigmoid(far_lse - near_lse))


def lerp_rows(near: Tensor, far: Tensor, share: Tensor) -> Tensor:
    """`near + share · (far − near)` into `near [B, H, q, d]`, share `[B, H, q]` float32; in blocks, to stay small."""
    for a in range(0, near.shape[2], MERGE_BLOCK):
        rows = slice(a, a + MERGE_BLOCK)
        near[:, :, rows] = torch.lerp(near[:, :, rows].float(), far[:, :, rows].float(), share[:, :, rows, None])
    return near


def _cudnn(query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, scale=scale)[:2]
    return out, lse.reshape(out.shape[:3]).float()


@functools.cache
def splits(dtype: torch.dtype, heads_q: int, heads_kv: int, dim: int, device: torch.device) -> bool:
    """Whether `split_attention` is right here. It calls an operator that torch does not document, so it is believed
    only after it has given the same as float32 attention with a mask, once a shape."""
    if dtype not in (torch.float16, torch.bfloat16) or torch.cuda.get_device_capability(device)[0] < 9:
        return False
    q, k, v = (torch.randn(1, h, n, dim, dtype=dtype, device=device, generator=torch.Generator(device).manual_seed(i))
               for i, (h, n) in enumerate(((heads_q, 192), (heads_kv, 448), (heads_kv, 448))))
    mask = torch.ones(192, 448, dtype=torch.bool, device=device).tril(256)
    truth = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask, scale=0.5,
                                           enable_gqa=heads_q != heads_kv)
    try:
        found = split_attention(q, k, v, 0.5).float()
    except RuntimeError:
        return False
    return bool((found - truth).norm() < 0.02 * truth.norm())


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
