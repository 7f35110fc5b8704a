"""The completion's mass fitted to a request: by what its own last queries would have needed. Ours, not the paper's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparsekv.artifacts.phi import PhiLayer
from sparsekv.core.offline import make_scene, mass_errors, top_k
from sparsekv.core.selectors.base import LayerView
from sparsekv.models.feature_map import grouped_log_kernel

QUERIES = 32
PRIOR = 0.5
LASTS = 256
"""Generated tokens after which the fit is dropped: measured, it helps that far, and does a little harm past it."""
SCORES_AT_ONCE = 2**25


def request_fit(view: LayerView, maps: PhiLayer, share: float, centre: Tensor | None = None) -> Tensor | None:
    """Shift `[B, Hq]` of every row and head for this request, float32, -inf of a closed gate; None where there is
    nothing to fit: maps without `errors`, no queries of the prefill, a mid region that has grown past them, keys that
    do not lie on the device.

    The last queries of the prefill attend as they did, and again with sink, tail and the best `share` of the context
    exact and the rest estimated; a head takes the shift with the least error, half of the validation windows' own
    error there added. maps: calibrated for that share. centre `[B, Hkv, d]`: mean keys of maps with a centred half.
    """
    count = min(QUERIES, view.recent_queries.shape[2])
    if maps.errors is None or count == 0 or view.keys.device != view.device:
        return None
    end = view.recent_end
    window = end - int(view.regions.mid_last.max())
    if window < 1:
        return None
    columns = torch.arange(end - count, end, device=view.device)[None]
    shifts = torch.tensor(maps.shift_grid, device=view.device)
    prior = maps.errors[0]
    found = torch.zeros(view.keys.shape[0], view.num_query_heads, device=view.device)
    for rows, heads in _pieces(view.keys.shape[0], view.num_kv_heads, view.group * count * end):
        asked = slice(heads.start * view.group, heads.stop * view.group)
        own = maps.maps.heads(asked, heads)
        queries = view.recent_queries[rows, asked, -count:].float()
        keys, values = (x[rows, heads, :end].float() for x in (view.keys, view.values))
        mean = None if centre is None else centre[rows, heads].float()
        log_q, log_k = own.log_phi_q(queries, mean, view.scale), own.log_phi_k(keys, mean)
        logits = grouped_log_kernel(log_q.flatten(0, 1), log_k.flatten(0, 1))
        starts = view.regions.starts[rows].repeat_interleave(queries.shape[1])[:, None]
        scene = make_scene(queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1),
                           columns.expand(starts.shape[0], -1), scale=view.scale, sink_size=view.regions.sink_size,
                           window_size=window, starts=starts)
        read = top_k(scene, share) if share > 0 else None
        error = mass_errors(scene, logits, read, shifts)[1]
        error = error.reshape(len(shifts), queries.shape[0], -1)
        found[rows, asked] = best_shift(error, prior[:, None, asked], shifts)
    return found.masked_fill(torch.isneginf(maps.offset), float("-inf"))


def best_shift(error: Tensor, prior: Tensor, shifts: Tensor) -> Tensor:
    """The shift with the least error, half of the prior's added: error and prior `[P, ...]` at the shifts `[P]`."""
    return shifts[(error + PRIOR * prior).argmin(0)]


def _pieces(rows: int, heads: int, scores: int) -> Iterator[tuple[slice, slice]]:
    """Rows and KV heads whose `scores` attention scores each are held at once."""
    held = max(1, min(heads, SCORES_AT_ONCE // scores))
    together = max(1, SCORES_AT_ONCE // (scores * heads))
    for row in range(0, rows, together):
        for head in range(0, heads, held):
            yield slice(row, min(row + together, rows)), slice(head, min(head + held, heads))
