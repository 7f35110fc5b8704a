"""What feature maps do on held-out windows: errors at every case, the shift of `ŝ` that serves a head best in each, and
the heads where completion is switched off."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.core.offline import Scene, make_scene, mass_errors, top_k
from sparsekv.models.feature_map import Maps
from sparsekv.trainers.pool import Pool

CASES: dict[str, float | None] = {"sink_tail": None, "topk@0.01": 0.01, "topk@0.02": 0.02, "topk@0.05": 0.05,
                                  "topk@0.1": 0.1}
SHIFTS = tuple(round(-3.0 + 0.1 * i, 1) for i in range(41))
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
SCORES_AT_ONCE = 200_000_000
GAP_KEYS = 512
NEG_INF = float("-inf")


def by_case(tables: dict[str, Tensor], what: str) -> Tensor:
    """The tables `<case> what` of all cases, `[L, Hq, ...]` each -> `[L, S, Hq, ...]`, in the order of `CASES`."""
    return torch.stack([tables[f"{case} {what}"] for case in CASES], 1)


def pick_scene(pool: Pool, document: int, heads: slice, limit: int) -> tuple[Scene, Tensor, Tensor]:
    """At most `limit` queries of a window's last third, for some KV heads: their attention, and queries and keys with
    RoPE in float32. Late ones, because a query that decodes has its whole context before it."""
    keys = pool.keys[document, heads].float()
    asked = slice((heads.start or 0) * pool.group, (heads.stop or pool.heads_kv) * pool.group)
    total = pool.queries.shape[2]
    limit = max(1, min(limit, total, SCORES_AT_ONCE // (keys.shape[0] * pool.group * keys.shape[1])))
    some = torch.linspace(2 * total // 3, total - 1, limit, device=keys.device).long()
    queries = pool.queries[document, asked][:, some].float()
    scene = make_scene(queries, keys, pool.values[document, heads].float(), pool.positions[document, asked][:, some],
                       scale=pool.scale, sink_size=pool.sink_size, window_size=pool.window_size)
    return scene, queries, keys


def calibrate(pool: Pool, maps: Maps, *, shift: bool, limit: int = 64) -> dict[str, Tensor]:
    """Tables `[Lq]` from a pool of validation windows: for every case `<case> shift`, the one with the least error
    there (zero unless asked for), `<case> error` and, with it, `<case> + phi error`; `<case> table` `[Lq, P]`, the
    latter at every shift; `mass_ratio` `Σŵ / Σw` (geometric mean over queries) after the first case's, and `gap_pXX`,
    quantiles of `ŝ − s` over mid keys after its shift."""
    shifts = torch.tensor(SHIFTS if shift else (0.0,), device=pool.keys.device)
    tables: dict[str, list[Tensor]] = {}
    for first in range(0, pool.heads_kv, pieces_at_once(pool, limit)):
        heads = slice(first, min(first + pieces_at_once(pool, limit), pool.heads_kv))
        asked = slice(heads.start * pool.group, heads.stop * pool.group)
        own = maps.heads(asked, heads)
        none: dict[str, Tensor] = {}
        completed: dict[str, Tensor] = {}
        ratio, gaps = torch.zeros(1, device=shifts.device), []
        for document in range(pool.documents):
            scene, queries, keys = pick_scene(pool, document, heads, limit)
            logits = own.surrogate(queries, keys, scene.context, scale=pool.scale, sink_size=pool.sink_size)
            for case, fraction in CASES.items():
                read = None if fraction is None else top_k(scene, fraction)
                alone, many = mass_errors(scene, logits, read, shifts)
                none[case] = none.get(case, 0.0) + alone / pool.documents
                completed[case] = completed.get(case, 0.0) + many / pool.documents
            mass, truth = (x.masked_fill(~scene.mid, NEG_INF).logsumexp(-1) for x in (logits, scene.scores))
            ratio = ratio + (mass - truth).nanmean(-1) / pool.documents
            columns = slice(None, None, max(1, keys.shape[1] // GAP_KEYS))
            gap = (logits - scene.scores)[..., columns].masked_fill(~scene.mid[..., columns], float("nan"))
            gaps.append(gap.flatten(1))
        best = {case: shifts[errors.argmin(0)] for case, errors in completed.items()}
        chosen = best[next(iter(CASES))]
        found = {"mass_ratio": (ratio + chosen).exp()}
        quantiles = torch.cat(gaps, 1).nanquantile(torch.tensor(QUANTILES, device=chosen.device), dim=1) + chosen
        found |= {f"gap_p{round(100 * p):02d}": row for p, row in zip(QUANTILES, quantiles, strict=True)}
        for case in CASES:
            found |= {f"{case} shift": best[case], f"{case} error": none[case], f"{case} table": completed[case].mT,
                      f"{case} + phi error": completed[case].amin(0)}
        for name, value in found.items():
            tables.setdefault(name, []).append(value)
    return {name: torch.cat(parts) for name, parts in tables.items()}


def pieces_at_once(pool: Pool, limit: int) -> int:
    """KV heads whose attention for `limit` queries is held at once."""
    return max(1, SCORES_AT_ONCE // (pool.group * limit * pool.keys.shape[2]))


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
