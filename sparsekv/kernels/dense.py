"""Dense causal attention through torch's own kernels: the path of every prefill and of every layer that stays dense."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsekv.kernels.attend import add_sinks, attend_gathered
from sparsekv.kernels.launch import NEG_INF, acc_dtype, as_tokens, dense_last, on_device, power_of_two
from sparsekv.kernels.stored import decode_attention

QUERY_BLOCK = 1024
ADDED_AT_ONCE, ADD_WARPS = 32, 4
"""Queries of a program of `add_kernel`, and its warps."""
FEW_QUERIES = 640
"""Queries up to which a chunk after a cache goes through the kernel that plans nothing: the end of a sparse prompt, 512
tokens and less than a block, is such a chunk of every piece."""
SINK_CHANNELS = 8
"""Channels added for learned sinks: two are used, fused kernels want multiples of eight."""


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, key_mask: Tensor | None = None,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:
    """Attend as the model does: causally, to all keys.

    Args:
        query: `[B, Hq, T, d]`, of the last T of the keys.
        key, value: `[B, Hkv, N, d]`.
        key_mask: `[B, N]`, nonzero = a real token.
        window: keys that a query sees, itself included [tokens].
        softcap: scores are squeezed by `softcap · tanh(s / softcap)` (Gemma 2).
        sinks: `[Hq]`, a learned logit a query head, one more term of the normalisation (gpt-oss); not with a softcap.

    Returns:
        As query; a query that sees nothing gives zero. Masks are made for a block of queries at a time.
    """
    count, length = query.shape[2], key.shape[2]
    if sinks is not None:
        if softcap is not None:
            raise ValueError("attention with learned sinks has no softcap, found both")
        alone = count == 1 and not (torch.is_grad_enabled() and query.requires_grad)
        return (_one_query_with_sinks if alone else _with_sinks)(query, key, value, sinks, scale, key_mask, window)
    if key_mask is None and softcap is None and (window is None or window >= length):
        if count == 1:
            return _one_query(query, key, value, scale, None)
        if count == length:
            return _sdpa(query, key, value, scale, is_causal=True)
        if query.is_cuda:
            return _after_cache(query, key, value, scale)
    return _in_blocks(query, key, value, scale, key_mask, window, softcap)


def _in_blocks(
    query: Tensor, key: Tensor, value: Tensor, scale: float, key_mask: Tensor | None, window: int | None,
    softcap: float | None = None, always: int = 0,
) -> Tensor:
    """With a mask, for a block of queries at a time. always: so many of the first keys are seen by every query, are no
    tokens of the mask or a window, and have no query of theirs."""
    count, length = query.shape[2], key.shape[2] - always
    columns = torch.arange(length, device=query.device)
    parts = []
    for first in range(length - count, length, QUERY_BLOCK):
        high = min(first + QUERY_BLOCK, length)
        low = 0 if window is None else max(0, first - window + 1)
        rows = columns[first:high, None]
        mask = columns[low:high] <= rows
        if window is not None:
            mask &= columns[low:high] > rows - window
        mask = mask[None, None]
        if key_mask is not None:
            mask = mask & key_mask[:, None, None, low:high].bool()
        q = query[:, :, first - (length - count):high - (length - count)]
        k, v = (x[:, :, low + always:high + always] for x in (key, value))
        if always:
            k, v = (torch.cat([x[:, :, :always], seen], dim=2) for x, seen in ((key, k), (value, v)))
            mask = F.pad(mask, (always, 0), value=True)
        attend = functools.partial(_capped, softcap=softcap) if softcap is not None else _masked
        parts.append(attend(q, k, v, scale, mask))
    return torch.cat(parts, dim=2)


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float, key_mask: Tensor | None,
    window: int | None,
) -> Tensor:
    """The sinks as the score of one more key, the first, whose value is zero: in two channels of their own, which are
    one at that key and zero at all others, queries have `sink / scale` and what its rounding left. So torch's fused
    kernels serve, which give no log-sum-exp that is documented."""
    count, length, dim = query.shape[2], key.shape[2], query.shape[3]
    square = key_mask is None and count == length and (window is None or window >= length)
    exact = sinks.to(acc_dtype(query)) / scale
    high = exact.to(query.dtype)
    low = (exact - high).to(query.dtype)
    channels = F.pad(torch.stack([high, low], dim=-1), (0, SINK_CHANNELS - 2))[None, :, None]
    q = torch.cat([query, channels.expand(*query.shape[:3], -1)], dim=-1)
    k, v = (F.pad(x, (0, SINK_CHANNELS, 1, 0)) for x in (key, value))
    k[:, :, 0, dim:dim + 2] = 1.0
    if square:
        out = _sdpa(F.pad(q, (0, 0, 1, 0)), k, v, scale, is_causal=True)[:, :, 1:]
    elif query.is_cuda and key_mask is None and (window is None or window >= length):
        out = _after_cache(q, k, v, scale)
    else:
        out = _in_blocks(q, k, v, scale, key_mask, window, always=1)
    return out[..., :dim]


def _one_query_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float, key_mask: Tensor | None,
    window: int | None,
) -> Tensor:
    """A decode step with sinks: no key is copied where they are float32, or on a GPU without a mask."""
    low = 0 if window is None else max(0, key.shape[2] - window)
    q, k, v = query[:, :, 0], key[:, :, low:], value[:, :, low:]
    rows, heads, length = k.shape[:3]
    if q.is_cuda and key_mask is None:
        starts = torch.zeros(rows, dtype=torch.long, device=q.device)
        out, lse = decode_attention(q, k, v, starts, torch.full_like(starts, length), scale=scale)
    else:
        used = (torch.ones(rows, length, dtype=torch.bool, device=q.device) if key_mask is None
                else key_mask[:, low:].bool())
        out, lse = attend_gathered(q, k, v, used[:, None].expand(-1, heads, -1), scale)
    return add_sinks(out, lse, sinks.detach())[0][:, :, None]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, **how: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **how)


def _masked(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> Tensor:
    if q.shape[2] == 1:
        return _one_query(q, k, v, scale, mask)
    return _sdpa(q, k, v, scale, attn_mask=mask).nan_to_num(0.0)


def _one_query(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """A decode step. torch would read (CPU) or copy (with a mask) the cache once a query head: a group's heads are made
    queries of one head. Any of torch's kernels but cuDNN's: that one, torch's choice on Hopper, plans anew for every
    length of the cache, some 30 milliseconds a token."""
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    backends: Any = contextlib.nullcontext()
    if q.is_cuda:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backends = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    with backends:
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale).reshape(q.shape)
    return out if mask is None else out.nan_to_num(0.0)


def _capped(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor, softcap: float) -> Tensor:
    group = q.shape[1] // k.shape[1]
    scores = (q.float() @ k.float().repeat_interleave(group, 1).mT) * scale
    scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~mask, NEG_INF)
    return (scores.softmax(-1).nan_to_num(0.0) @ v.float().repeat_interleave(group, 1)).to(q.dtype)


def _after_cache(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """A chunk after a cache on CUDA. cuDNN's kernel plans anew for every length of the cache, which takes longer than
    it gains on few queries."""
    if query.shape[2] > FEW_QUERIES and not query.requires_grad and splits(
            query.dtype, query.shape[1], key.shape[1], query.shape[3], query.device):
        return split_attention(query, key, value, scale)
    from torch.nn.attention.bias import causal_lower_right

    return _sdpa(query, key, value, scale, attn_mask=causal_lower_right(query.shape[2], key.shape[2]))


def split_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """`dense_attention` of a chunk after a cache as two cuDNN calls, all of the past and the chunk itself, merged by
    their log-sum-exps: torch's other kernels know the lower right corner, cuDNN's is faster and does not. CUDA only."""
    past = key.shape[2] - query.shape[2]
    far, far_lse = cudnn_attention(query, key[:, :, :past], value[:, :, :past], scale, causal=False)
    near, near_lse = cudnn_attention(query, key[:, :, past:], value[:, :, past:], scale, causal=True)
    return add_attention(near, near_lse, far, far_lse)[0]


def add_attention(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two disjoint sets of keys from that to each: out, more `[B, H, c, d]` and lse, more_lse
    `[B, H, c]`; out and lse are overwritten and returned."""
    add = launch_add if on_device(out) else add_attention_reference
    return add(out, lse, more, more_lse)


def add_attention_reference(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """`add_attention` in plain torch."""
    acc = acc_dtype(out)
    share = torch.sigmoid(more_lse - lse).nan_to_num(0.0)[..., None].to(acc)
    return out.copy_(torch.lerp(out.to(acc), more.to(acc), share)), lse.copy_(torch.logaddexp(lse, more_lse))


def launch_add(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """`add_attention` through Triton, in one pass."""
    from sparsekv.kernels.dense_triton import add_kernel

    batch, heads, count, dim = out.shape
    assert out.stride(-1) == 1 and lse.is_contiguous()
    if out.numel():
        add_kernel[(batch * heads, -(-count // ADDED_AT_ONCE))](
            as_tokens(out), as_tokens(dense_last(more)), lse, more_lse.contiguous(), heads, count, DIM=dim,
            WIDTH=power_of_two(dim), ROWS=ADDED_AT_ONCE, num_warps=ADD_WARPS)
    return out, lse


def cudnn_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp `[B, Hq, T]` float32 of cuDNN's kernel; causal: from the upper left corner. Right where
    `splits`."""
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, scale=scale)[:2]
    return out, lse.reshape(out.shape[:3]).float().contiguous()


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
