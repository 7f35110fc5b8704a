"""The sketch of a router, by closed form from a capture: how its queries and keys are spread."""

from __future__ import annotations

import torch

from sparsekv.core.sketch import fit_sketch, second_moment
from sparsekv.kernels import Sketch
from sparsekv.trainers.pool import Pool


def closed_form(pool: Pool, width: int, wide: int) -> Sketch:
    """The basis in which the captured queries tell the captured keys apart best, `[Lk, ...]` (`core/sketch.py`). Keys
    of the sink are left out: they are always read, and unlike all others."""
    keys = pool.keys[:, :, pool.sink_size:]
    moments = [second_moment(queries[None], pool.heads_kv)[0] for queries in pool.queries]
    centre = keys[0].float().mean(1)  # near enough to the mean for float32
    total, square = torch.zeros_like(centre), torch.zeros(*centre.shape, centre.shape[-1], device=centre.device)
    for document in range(pool.documents):
        away = keys[document].float() - centre[:, None]
        total += away.sum(1)
        square += away.mT @ away
    count = max(1, keys.shape[0] * keys.shape[2])
    mean = total / count
    covariance = square / count - mean[:, :, None] * mean[:, None]
    return fit_sketch(torch.stack(moments).mean(0), centre + mean, covariance, width, wide)
