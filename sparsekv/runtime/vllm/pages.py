"""A page pool as one long cache: token `p` of a request lies in slot `table[p // page] · page + p % page`."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels import dense_attention, slots_at
from sparsekv.util.errors import SparseKVError


def by_slot(pool: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a pool `[blocks, Hkv, page, 2d]` whose memory runs by block, token, head (NHD), as views
    `[Hkv, slots, d]`; bytes are float8 (e4m3). Raises SparseKVError for another memory."""
    if pool.dtype == torch.uint8:
        pool = pool.view(torch.float8_e4m3fn)
    dim = pool.shape[3] // 2
    rows = pool.transpose(1, 2)
    if rows.stride(0) != rows.shape[1] * rows.stride(1):
        raise SparseKVError(f"the pages of this model lie {rows.stride(0)} numbers apart and hold "
                            f"{rows.shape[1] * rows.stride(1)}; expected pages side by side, token by token (layout "
                            "NHD, one group of layers); serve it with vLLM's own attention")
    flat = rows.flatten(0, 1).transpose(0, 1)
    return flat[..., :dim], flat[..., dim:]


def taken(rows: Tensor, slots: Tensor) -> Tensor:
    """Keys or values `[Hkv, slots, d]` in slots `[n]`, `[Hkv, n, d]`. Float8 goes as bytes, which every version of
    torch can index on CUDA."""
    if rows.dtype.itemsize > 1:
        return rows[:, slots]
    return rows.view(torch.uint8)[:, slots].view(rows.dtype)


def write(pool: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Keys and values `[n, Hkv, d]` into their slots `[n]`; a negative slot is none."""
    keys, values = by_slot(pool)
    kept = slots >= 0
    real = slots[kept]
    keys[:, real] = key[:len(slots)][kept].transpose(0, 1).to(pool.dtype)
    values[:, real] = value[:len(slots)][kept].transpose(0, 1).to(pool.dtype)


def attend_pages(
    q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, lengths: Tensor, table: Tensor, page: int, *,
    scale: float, window: int | None = None, softcap: float | None = None,
) -> Tensor:
    """Causal attention of every request over its own pages, one after another (the CPU's path): q `[T, Hq, d]`, the
    queries of request r are `starts[r]` to `starts[r + 1]`, the last of `lengths[r]` tokens; keys, values
    `[Hkv, slots, d]`, table `[R, blocks]` -> `[T, Hq, d]`. A request of length 0 is left out, its output zero."""
    out = torch.zeros_like(q)
    edges = starts.tolist()
    for row, length in enumerate(lengths.tolist()):
        first, last = edges[row:row + 2]
        if length <= 0 or first == last:
            continue
        slots = slots_at(table[row:row + 1].to(q.device), torch.arange(length, device=q.device)[None], page)[0]
        attended = dense_attention(q[None, first:last].transpose(1, 2), keys[None, :, slots], values[None, :, slots],
                                scale=scale, window=window, softcap=softcap)
        out[first:last] = attended[0].transpose(0, 1)
    return out
