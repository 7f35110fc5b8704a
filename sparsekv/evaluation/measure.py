"""What every head does on captured held-out text: errors by method and budget, where its attention lies, what the
router reaches, how far the feature maps are off. The runtime's own selectors and estimators take decode steps on a
capture store, without the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsekv.artifacts.fingerprint import check_fingerprint
from sparsekv.artifacts.phi import PhiArtifact, PhiLayer
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.capture.store.store import CaptureStore, LayerCapture
from sparsekv.core.buckets import imbalance
from sparsekv.core.estimators import CentroidEstimator, Estimator, PhiEstimator
from sparsekv.core.estimators.centroid import equal_buckets
from sparsekv.core.estimators.phi import phi_tokens
from sparsekv.core.layer import Selection
from sparsekv.core.offline import (
    Request,
    Window,
    best_buckets,
    mass_curve,
    mass_read,
    mid_scores,
    mid_share,
    relative_error,
    requests,
    scores,
)
from sparsekv.core.registry import SELECTOR_ROWS, diagnosed
from sparsekv.core.rope import RopeTable
from sparsekv.core.selectors import SELECTORS, Selector
from sparsekv.core.selectors.router import Router
from sparsekv.core.step import two_parts
from sparsekv.evaluation.diagnostics import GAP_EDGES, Diagnostics
from sparsekv.models.feature_map import log_kernel
from sparsekv.util.errors import SparseKVError

BUDGETS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
COVER_QUERIES = 32
GAP_KEYS = 512
SCATTER_POINTS = 2000


def measure(
    store: CaptureStore, *, router: RouterArtifact | None = None, phi: PhiArtifact | None = None,
    budgets: Sequence[float] = BUDGETS, count: int = 8, rivals: bool = False, device: str = "cpu",
    advance: Callable[..., None] = lambda: None,
) -> Diagnostics:
    """All tables, from `count` requests a document: prefills that end past the first third of it, each followed by the
    queries captured soon after (`core.offline`).

    rivals: also bucket centroids at the bytes of φ's cache, over exact top-k. `advance` is called once a layer and
    document. Raises SparseKVError for artifacts of another model.
    """
    for artifact in (router, phi):
        if artifact is not None:
            check_fingerprint(artifact.config.model, store.model, f"the artifact {str(artifact.path or '')!r}")
    trained = next((a.config for a in (phi, router) if a is not None), None)
    sink, window = (int(getattr(trained, n) if trained else store.config[n]) for n in ("sink_size", "window_size"))
    made = Diagnostics(
        store.model, sorted(store.layers), [float(b) for b in budgets], store.context_length, sink, window,
        phi_tokens(store.head_dim, store.head_dim) if phi is None else phi.cache_tokens,
        router=_folder(router), phi=_folder(phi))
    sums: list[Sums] = []
    for layer in made.layers:
        total = Sums()
        placed = None if router is None or router.layer(layer) is None else router.to(device)
        maps = None if phi is None else phi.layer(layer)
        for document in range(store.num_documents):
            for request in requests(captured_window(store, layer, document, sink, window, device), count):
                _examine(total, request, made, placed, None if maps is None else maps.to(device), rivals)
            advance()
        sums.append(total)
    _assemble(made, sums)
    statistics = _statistics(store, device)
    made.tasks = {Path(str(store.config["corpus"])).name: _by_layer(statistics)}
    made.heads |= {"entropy" if name == "entropy_mid" else name: table for name, table in statistics.items()}
    return made


def add_task(made: Diagnostics, label: str, store: CaptureStore, device: str = "cpu") -> None:
    """Entropy and coverage by layer of another capture of the same model. Raises SparseKVError for another model's."""
    if store.model != made.model or sorted(store.layers) != made.layers:
        raise SparseKVError(f"the capture {str(store.path)!r} is of another model or other layers; expected those of "
                            "the first capture")
    made.tasks[label] = _by_layer(_statistics(store, device))


class Sums:
    """Sums over queries of tables `[Hq, ...]` by (group, name), with their counts; and samples of `ŝ` against `s`."""

    def __init__(self) -> None:
        self.tables: dict[tuple[str, str], Tensor] = {}
        self.counts: dict[tuple[str, str], int] = {}
        self.gaps = torch.zeros(len(GAP_EDGES) - 1, dtype=torch.long)
        self.pairs: list[Tensor] = []

    def add(self, group: str, name: str, mean: Tensor | list[Tensor], count: int) -> None:
        """A mean over `count` queries; a list has one table a budget."""
        key = (group, name)
        mean = torch.stack(mean, -1) if isinstance(mean, list) else mean
        self.tables[key] = self.tables.get(key, 0.0) + mean.double().cpu() * count
        self.counts[key] = self.counts.get(key, 0) + count


def captured_window(
    store: CaptureStore, layer: int, document: int, sink_size: int, window_size: int, device: str = "cpu",
) -> Window:
    """Return what a layer did on a document, for `core.offline`."""
    item: LayerCapture = store.read(layer, document).to(device)
    return Window(item.keys_rot(), item.values.float(), item.queries_rot(), item.query_positions, item.scale, sink_size,
                  window_size, RopeTable(item.layout, item.cos[None], item.sin[None]), layer,
                  int(store.model["num_layers"]))


def _examine(
    total: Sums, request: Request, made: Diagnostics, router: RouterArtifact | None, phi: PhiLayer | None,
    rivals: bool,
) -> None:
    """Add one request to a layer's sums."""
    view, count, share = request.view, request.queries.count, mid_share(request)
    estimators: dict[str, Estimator] = {}
    if phi is not None:
        estimators["phi"] = PhiEstimator(phi)
    if rivals:
        estimators["centroid"] = CentroidEstimator(equal_buckets(made.cache_tokens, view.keys.shape[-1]))
    for estimator in estimators.values():
        estimator.build(view)
    read: dict[str, list[Selection]] = {}
    layer = None if router is None else router.layer(view.layer_idx)
    have = {"router"} if layer is not None else set()
    have |= {"sketches"} if layer is not None and layer.sketch is not None else set()
    for name in diagnosed():
        needs = SELECTOR_ROWS[name].needs
        if not set(needs) <= have:
            continue
        trained: dict[str, Any] = {"layer": layer} if needs else {}
        selector = SELECTORS[name](token_budget=0.0, **trained)
        shown = {k: e for k, e in estimators.items() if name == "topk" or k == "phi"}
        read[name] = _steps(total, request, made, selector, shown)
        if name == "router":
            assert isinstance(selector, Router)
            total.add("recall", "best", [mass_read(share, best_buckets(request, selector, share, b)).mean(0)
                                         for b in made.budgets], count)
            total.add("heads", "imbalance", imbalance(selector.bucket_sizes[0]).repeat_interleave(view.group), count)
    if "router" in read:
        total.add("recall", "reached", [mass_read(share, r).mean(0) for r in read["router"]], count)
        total.add("recall", "topk", [_overlap(r, b, share) for r, b in zip(read["router"], read["topk"], strict=True)],
                  count)
    if phi is not None:
        _examine_map(total, request, phi.at(0.0), estimators["phi"])
    made.fractions, curve = mass_curve(share, int(view.regions.mid_sizes))
    total.add("curves", "mass", curve, count)


def _steps(
    total: Sums, request: Request, made: Diagnostics, selector: Selector, estimators: dict[str, Estimator],
) -> list[Selection]:
    """Steps at every budget, alone and completed by every estimator: errors, mass and share read. Returns what was
    selected."""
    view, queries, full = request.view, request.queries, request.full
    request.build(selector, None)
    lse = scores(view, queries).logsumexp(-1)
    tables: dict[tuple[str, str], list[Tensor]] = {}
    selections = []
    for budget in made.budgets:
        selector.token_budget = budget
        selector.prepare(view)
        step = two_parts(view, queries, selector, None)
        read = step.selection.counts().double().mean(-1)
        found = {("errors", selector.name): relative_error(step.exact_out, full).mean(0),
                 ("mass", selector.name): (step.exact_lse - lse).exp().mean(0),
                 ("read", selector.name): (1 - (view.regions.mid_sizes - read) / queries.lengths).mean().expand(
                     view.num_query_heads)}
        for name, estimator in estimators.items():
            estimator.set_read_share(view, selector.read_share(view))
            out, rest = estimator.partial(view, queries, step.selection)
            weight = torch.sigmoid(rest - step.exact_lse)
            found["errors", f"{selector.name}+{name}"] = relative_error(
                step.exact_out + weight[..., None] * (out - step.exact_out), full).mean(0)
            if (selector.name, name) == ("topk", "phi"):
                found["completion", "share"] = weight.mean(0)
        for key, value in found.items():
            tables.setdefault(key, []).append(value)
        selections.append(step.selection)
    for (group, name), columns in tables.items():
        total.add(group, name, columns, queries.count)
    return selections


def _overlap(one: Selection, best: Selection, share: Tensor) -> Tensor:
    """Share of the keys of `best` that the other selection has too, `[Hq]`. share `[T, Hq, N]`."""
    def mask(selection: Selection) -> Tensor:
        tokens = selection.as_tokens().long()
        end = share.shape[-1]
        marked = torch.zeros(*tokens.shape[:2], end + 1, dtype=torch.bool, device=tokens.device)
        marked = marked.scatter_(-1, torch.where(tokens < 0, end, tokens), True)[..., :end]
        return marked.repeat_interleave(share.shape[1] // marked.shape[1], dim=1)

    wanted = mask(best)
    return ((mask(one) & wanted).sum(-1) / wanted.sum(-1).clamp(min=1)).mean(0)


def _examine_map(total: Sums, request: Request, phi: PhiLayer, estimator: Estimator) -> None:
    """`ŝ − s` over an even sample of the mid keys: mean, spread, histogram, and pairs for the scatter."""
    view, queries = request.view, request.queries
    teacher = mid_scores(request).transpose(0, 1)
    top = teacher.amax(-1, keepdim=True)
    first, last = int(view.regions.mid_first), int(view.regions.mid_last)
    columns = torch.arange(first, last, max(1, (last - first) // GAP_KEYS), device=view.device)
    centre = estimator.centre[0] if isinstance(estimator, PhiEstimator) and estimator.centre is not None else None
    query = phi.maps.log_phi_q(queries.rot[0], centre, view.scale).unflatten(0, (view.num_kv_heads, -1))
    key = phi.maps.log_phi_k(view.keys[0, :, columns], centre)
    student = log_kernel(query, key[:, None]).flatten(0, 1)
    teacher = teacher[..., columns]
    gap = (student - teacher).flatten(1)
    gap = gap.masked_fill(torch.isinf(gap), float("nan"))  # a closed gate estimates nothing
    known = ~torch.isnan(gap)
    if not bool(known.any()):
        return
    mean = gap.nanmean(-1).nan_to_num(0.0)
    total.add("heads", "gap_mean", mean, queries.count)
    total.add("heads", "gap_std", (gap - mean[:, None]).square().nanmean(-1).sqrt().nan_to_num(0.0), queries.count)
    found = gap[known].clamp(GAP_EDGES[0], GAP_EDGES[-1])
    total.gaps += torch.histc(found, len(GAP_EDGES) - 1, GAP_EDGES[0], GAP_EDGES[-1]).long().cpu()
    pairs = torch.stack([(teacher - top).flatten(1)[known], (student - top).flatten(1)[known]], -1)
    total.pairs.append(pairs[torch.linspace(0, len(pairs) - 1, min(64, len(pairs))).long()].cpu())


def _statistics(store: CaptureStore, device: str) -> dict[str, Tensor]:
    """Where the attention of captured queries lies, by layer and head: `entropy_mid`, `cover75`, `cover95` and
    `mass_mid`, `[L, Hq]` each."""
    layers = []
    for layer in sorted(store.layers):
        rows = []
        for item in (store.read(layer, d) for d in range(store.num_documents)):
            kept = {name: item.statistics[name].double().mean(-1) for name in ("entropy_mid", "mass_mid")}
            rows.append(kept | coverage(item.to(device)))
        layers.append({name: torch.stack([r[name] for r in rows]).mean(0) for name in rows[0]})
    return {name: torch.stack([table[name] for table in layers]) for name in layers[0]}


def coverage(item: LayerCapture) -> dict[str, Tensor]:
    """`cover75` and `cover95`: the fewest keys that hold 75 % and 95 % of a query's attention, mean over captured
    queries, up to COVER_QUERIES of them, evenly spread: `[Hq]` float64."""
    positions = item.query_positions
    some = torch.linspace(0, len(positions) - 1, min(len(positions), COVER_QUERIES)).long().to(positions.device)
    queries, keys = item.queries_rot()[:, some], item.keys_rot()
    scores = (queries.reshape(len(keys), -1, keys.shape[-1]) @ keys.mT * item.scale).reshape(*queries.shape[:2], -1)
    unseen = torch.arange(keys.shape[1], device=keys.device) > positions[some, None]
    held = scores.masked_fill_(unseen, -math.inf).softmax(-1).sort(-1, descending=True).values.cumsum(-1)
    return {f"cover{share}": ((held < share / 100).sum(-1) + 1).double().mean(-1).cpu() for share in (75, 95)}


def _by_layer(statistics: dict[str, Tensor]) -> dict[str, list[float]]:
    return {name: [round(x, 4) for x in table.mean(1).tolist()] for name, table in statistics.items()}


def _assemble(made: Diagnostics, sums: list[Sums]) -> None:
    known = {key: table for s in sums for key, table in s.tables.items()}
    for (group, name), like in known.items():
        # a layer without an artifact's part has no such table: it stays NaN
        rows = [s.tables[group, name] / s.counts[group, name] if (group, name) in s.tables
                else torch.full_like(like, math.nan) for s in sums]
        getattr(made, group)[name] = torch.stack(rows).float()
    if made.recall:
        reached, best = made.recall.pop("reached"), made.recall.pop("best")
        made.recall["oracle"] = reached / best.clamp(min=1e-9)
    made.gaps = torch.stack([s.gaps for s in sums]).sum(0).tolist()
    pairs = [p for s in sums for p in s.pairs]
    if pairs:
        every = torch.cat(pairs)
        every = every[torch.linspace(0, len(every) - 1, min(SCATTER_POINTS, len(every))).long()]
        made.scatter = [[round(x, 3) for x in pair] for pair in every.tolist()]


def _folder(artifact: Any) -> str | None:
    return None if artifact is None or artifact.path is None else str(artifact.path)
