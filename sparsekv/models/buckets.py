"""Where a bucket that no key falls into starts anew."""

from __future__ import annotations

from torch import Tensor


def restarts(keys: Tensor, empty: Tensor, worst: Tensor) -> Tensor:
    """For the i-th empty bucket of a head the i-th worst served key, `[H, C, d]`; what stands in the other places means
    nothing. keys `[H, n, d]`, empty `[H, C]`, worst `[H, k]`: keys by number, the worst first; past them the last."""
    rank = (empty.cumsum(1) - 1).clamp(min=0, max=worst.shape[1] - 1)
    return keys.gather(1, worst.gather(1, rank)[..., None].expand(-1, -1, keys.shape[2]))
