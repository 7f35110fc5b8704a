"""What feature maps do on requests of held-out windows: errors at every case, the shift of the estimated mass that
serves a head best in each, and the heads where completion is switched off."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparsekv.artifacts.phi import PhiLayer
from sparsekv.core.baselines.streaming import Streaming
from sparsekv.core.estimators.phi import PhiEstimator
from sparsekv.core.offline import Request, mid_scores, relative_error, requests, size_of
from sparsekv.core.selectors.base import Selector
from sparsekv.core.selectors.topk import TopK
from sparsekv.core.step import Parts, two_parts
from sparsekv.models.feature_map import FeatureMaps
from sparsekv.trainers.pool import Pool

CASES: dict[str, float | None] = {"sink_tail": None, "topk@0.01": 0.01, "topk@0.02": 0.02, "topk@0.05": 0.05,
                                  "topk@0.1": 0.1}
"""What is read exactly beside sink and tail: nothing, or the best keys, by their share of the context."""
SHIFTS = tuple(round(-3.0 + 0.1 * i, 1) for i in range(41))
REQUESTS, SPAN, FIRST = 8, 64, 2 / 3
"""Prefills of a window, the tokens decoded after each, and where the first of them ends: late, because a query that
decodes has its whole context before it."""
SCORES_AT_ONCE = 200_000_000


def calibrate(pool: Pool, maps: FeatureMaps, *, capped: bool, shifts: tuple[float, ...] = SHIFTS) -> dict[str, Tensor]:
    """Tables `[Lq]` from a pool of validation windows: for every case `<case> shift`, that of `shifts` with the least
    error there, `<case> error` and, with it, `<case> + phi error`; and `mass_ratio` `Σŵ / Σw` of the mid region
    (geometric mean over queries) after the first case's shift. capped: as `PhiLayer`."""
    grid = torch.tensor(shifts, device=pool.keys.device)
    tables: dict[str, list[Tensor]] = {}
    for kv_heads, query_heads in _pieces(pool):
        offsets = torch.zeros(1, query_heads.stop - query_heads.start, device=grid.device)
        layer = PhiLayer(maps.heads(query_heads, kv_heads), offsets, capped=capped)
        alone: dict[str, Tensor] = {}
        completed: dict[str, Tensor] = {}
        gap, count = torch.zeros_like(offsets[0]), 0
        for document in range(pool.documents):
            for request in requests(pool.window(document, kv_heads), REQUESTS, span=SPAN, first=FIRST):
                estimator = PhiEstimator(layer)
                estimator.build(request.prefill)
                count += request.full.shape[0]
                for case, share in CASES.items():
                    selector, _ = request.build(reader(share), None)
                    estimator.set_read_share(request.prefill, share or 0.0)
                    parts = two_parts(request.view, request.queries, selector, estimator)
                    errors = shifted_errors(parts, request.full, grid)
                    completed[case] = completed.get(case, 0.0) + errors.sum(1)
                    alone[case] = alone.get(case, 0.0) + relative_error(parts.exact_out, request.full).sum(0)
                    if share is None:
                        gap += (parts.rest_lse - mid_scores(request).logsumexp(-1)).sum(0)
        best = {case: errors.argmin(0) for case, errors in completed.items()}
        found = {"mass_ratio": (gap / count + grid[best[next(iter(CASES))]]).exp()}
        for case in CASES:
            found |= {f"{case} shift": grid[best[case]], f"{case} error": alone[case] / count,
                      f"{case} + phi error": completed[case].amin(0) / count}
        for name, value in found.items():
            tables.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in tables.items()}


def reader(share: float | None) -> Selector:
    """Reads the anchors, and the best `share` of the context."""
    return Streaming() if share is None else TopK(token_budget=share)


def shifted_errors(parts: Parts, full: Tensor, shifts: Tensor) -> Tensor:
    """Relative error of the completed output with the estimated mass moved by each of `shifts [P]`: `[P, Q, Hq]`. A
    shift only changes the weight of the estimate, so that all of them cost one step."""
    weight = torch.sigmoid(parts.rest_lse + shifts[:, None, None] - parts.exact_lse)
    off, move = parts.exact_out - full, parts.rest_out - parts.exact_out
    still, along, across = (off * off).sum(-1), (off * move).sum(-1), (move * move).sum(-1)
    return (still + 2 * weight * along + weight**2 * across).clamp(min=0).sqrt() / size_of(full)


def by_case(tables: dict[str, Tensor], what: str) -> Tensor:
    """The tables `<case> what` of all cases, `[L, Hq]` each -> `[L, S, Hq]`, in the order of `CASES`."""
    return torch.stack([tables[f"{case} {what}"] for case in CASES], 1)


def choose_gates(tables: dict[str, Tensor]) -> Tensor:
    """Gate of every head, 1 or 0, from tables of any one shape: completion is off where it does not help on average
    over the cases, and, while it raises the mean error of some case, for the heads that raise it most."""
    none = torch.stack([tables[f"{case} error"] for case in CASES]).flatten(1)
    completed = torch.stack([tables[f"{case} + phi error"] for case in CASES]).flatten(1)
    gate = (completed / none.clamp(min=1e-6)).mean(0) < 1.0
    while True:
        harm = torch.where(gate, completed - none, 0.0)
        case = int(harm.mean(1).argmax())
        if float(harm[case].mean()) <= 0:
            return gate.float().reshape(next(iter(tables.values())).shape)
        gate = gate & (torch.arange(gate.shape[0], device=gate.device) != harm[case].argmax())


def watched_requests(pool: Pool, windows: int) -> list[Request]:
    """One late request of each of the first windows, all heads: what training is validated on."""
    return [r for document in range(min(windows, pool.documents))
            for r in requests(pool.window(document), 1, span=SPAN, first=FIRST)]


def _pieces(pool: Pool) -> Iterator[tuple[slice, slice]]:
    """KV heads, and their query heads, whose scores of a request's queries are held at once."""
    size = max(1, SCORES_AT_ONCE // (pool.group * SPAN * pool.keys.shape[2]))
    for a in range(0, pool.heads_kv, size):
        b = min(a + size, pool.heads_kv)
        yield slice(a, b), slice(a * pool.group, b * pool.group)
