"""What every head does on captured held-out text: errors by method and budget, where its attention lies, what the
router reaches, how far the feature maps are off. Measured on a capture store, without running the model."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsekv.artifacts.phi import PhiArtifact, PhiLayer
from sparsekv.artifacts.router import RouterArtifact, RouterLayer
from sparsekv.core import offline
from sparsekv.core.buckets import request_buckets
from sparsekv.core.offline import NEG_INF, Scene
from sparsekv.errors import SparseKVError
from sparsekv.kernels import assign_buckets, router_logits
from sparsekv.models import estimators
from sparsekv.store.store import CaptureStore, LayerCapture

FORMAT, FORMAT_VERSION = "sparsekv-diagnostics", 1
BUDGETS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
RIVALS = ("centroid", "moments", "sampling")
MOMENTS_RANK = 4
GAP_EDGES = [round(-8 + 0.5 * i, 1) for i in range(33)]
GAP_KEYS = 512
SCATTER_POINTS = 2000
TIMED_BUDGET = 0.01
SCORES_AT_ONCE = 100_000_000
Logits = Callable[[float, Tensor | None], Tensor]


@dataclass
class Diagnostics:
    """All tables of one store. `[L, Hq]` or `[L, Hq, B]` for `budgets` (shares of a query's context, 0 is sink and tail
    alone); the outer key of errors is the method (`topk+phi`).

    errors: mean relative L2 error of the head's output. mass: share of the head's attention that is read exactly,
    anchors included. share, true_share: of the attention that exact top-k leaves unread, what φ puts there and what is
    there. recall: mid mass the router's buckets reach over what the best buckets reach; overlap: share of exact top-k's
    keys among the router's. heads: entropy of the mid region (0..1), cover75 and cover95 (fewest keys with that mass),
    mass_mid, imbalance of the router's buckets (`C Σ n² / (Σ n)²`), gap_mean and gap_std of `ŝ − s` [nats]. curves:
    share of the mid mass in the best `fractions` of the mid keys, `[L, Hq, P]`. gaps: counts of `ŝ − s` between
    GAP_EDGES. scatter: pairs (s, ŝ), both minus the query's largest s. tasks: means by layer of
    every capture. times: seconds to load the tokens of a `budget`, to attend to them and to complete with φ, all heads
    of a layer.
    """

    model: dict[str, Any]
    layers: list[int]
    budgets: list[float]
    context_length: int
    sink_size: int
    window_size: int
    cache_tokens: float
    router: str | None = None
    phi: str | None = None
    errors: dict[str, Tensor] = field(default_factory=dict)
    mass: dict[str, Tensor] = field(default_factory=dict)
    read: dict[str, Tensor] = field(default_factory=dict)
    recall: dict[str, Tensor] = field(default_factory=dict)
    completion: dict[str, Tensor] = field(default_factory=dict)
    heads: dict[str, Tensor] = field(default_factory=dict)
    fractions: list[float] = field(default_factory=list)
    curves: dict[str, Tensor] = field(default_factory=dict)
    gaps: list[int] = field(default_factory=list)
    scatter: list[list[float]] = field(default_factory=list)
    tasks: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)

    def save(self, path: Path) -> Path:
        raw: dict[str, Any] = {"format": FORMAT, "format_version": FORMAT_VERSION}
        for name, value in ((f.name, getattr(self, f.name)) for f in fields(self)):
            if name in ("router", "phi") and value is not None:
                value = Path(os.path.relpath(value, path.parent)).as_posix()
            raw[name] = {k: _numbers(v) for k, v in value.items()} if name in TABLES else value
        path.write_text(json.dumps(raw) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Diagnostics:
        """Raises SparseKVError for a file that is missing, damaged, of another kind or version."""
        path = Path(path)
        if not path.is_file():
            raise SparseKVError(f"no diagnostics at {str(path)!r}; make them with `sparsekv eval diagnostics`")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if raw.pop("format") != FORMAT:
                raise ValueError("another format")
            version = raw.pop("format_version")
        except (ValueError, KeyError, AttributeError) as error:
            raise SparseKVError(f"{str(path)!r} is no diagnostics file ({error}); expected one of `sparsekv eval "
                                "diagnostics`") from error
        if version != FORMAT_VERSION:
            raise SparseKVError(f"{str(path)!r} has format {version}, this version reads {FORMAT_VERSION}; run "
                                "`sparsekv eval diagnostics` again")
        try:
            for name in TABLES:
                raw[name] = {k: _table(v) for k, v in raw[name].items()}
            for name in ("router", "phi"):
                raw[name] = None if raw[name] is None else str(path.parent / raw[name])
            return cls(**raw)
        except (KeyError, TypeError, ValueError) as error:
            raise SparseKVError(f"the diagnostics {str(path)!r} are damaged ({error}); make them again") from error


TABLES = ("errors", "mass", "read", "recall", "completion", "heads", "curves")


def _numbers(table: Tensor) -> Any:
    """Nested lists of four digits; NaN is null."""
    return json.loads(json.dumps(table.double().tolist()), parse_float=lambda x: float(f"{float(x):.4g}"),
                      parse_constant=lambda _: None)


def _table(value: Any) -> Tensor:
    return torch.tensor(json.loads(json.dumps(value).replace("null", "NaN")), dtype=torch.float32)


def measure(
    store: CaptureStore, *, router: RouterArtifact | None = None, phi: PhiArtifact | None = None,
    budgets: Sequence[float] = BUDGETS, queries: int = 32, documents: int | None = None, rivals: bool = False,
    device: str = "cpu", advance: Callable[..., None] = lambda: None,
) -> Diagnostics:
    """All tables from `queries` queries a document and head, past the first third of each window.

    rivals: also centroid, moments and sampling at the bytes of φ's cache, over exact top-k. `advance` is called once a
    layer and document.
    """
    for artifact in (router, phi):
        if artifact is not None:
            _check_model(store, artifact)
    held = next((a.config for a in (phi, router) if a is not None), None)
    sink, window = (int(getattr(held, n) if held else store.config[n]) for n in ("sink_size", "window_size"))
    size = phi.cache_tokens if phi is not None else estimators.phi_tokens(store.head_dim, store.head_dim)
    made = Diagnostics(
        store.model, sorted(store.layers), [float(b) for b in budgets], store.context_length, sink, window,
        size, router=_folder(router), phi=_folder(phi))
    count = store.num_documents if documents is None else min(documents, store.num_documents)
    sums: list[Sums] = []
    for layer in made.layers:
        total = Sums()
        maps = None if phi is None else phi.layer(layer)
        routing = None if router is None else router.layer(layer)
        for document in range(count):
            item = store.read(layer, document).to(device)
            _examine(total, item, made, routing, maps, queries, rivals)
            advance()
        sums.append(total)
    made.tasks = {Path(str(store.config["corpus"])).name: _statistics(store, count)}
    _assemble(made, sums)
    if phi is not None and phi.config.layers:
        layer = phi.config.layers[-1]
        made.times = _times(store.read(layer, 0).to(device), phi.layer(layer))  # type: ignore[arg-type]
    rows = [_head_statistics(store, layer, count) for layer in made.layers]
    made.heads |= {name.removesuffix("_mid") if name == "entropy_mid" else name: torch.stack([r[name] for r in rows])
                   for name in rows[0]}
    return made


def add_task(made: Diagnostics, label: str, store: CaptureStore) -> None:
    """Entropy and coverage by layer of another capture of the same model. Raises SparseKVError for another model's."""
    if store.model != made.model or sorted(store.layers) != made.layers:
        raise SparseKVError(f"the capture {str(store.path)!r} is of another model or other layers; expected those of "
                            "the first capture")
    made.tasks[label] = _statistics(store, store.num_documents)


class Sums:
    """Sums over queries of tables `[Hq, ...]` by (group, name), with their counts; and samples of `ŝ` against `s`."""

    def __init__(self) -> None:
        self.tables: dict[tuple[str, str], Tensor] = {}
        self.counts: dict[tuple[str, str], int] = {}
        self.gaps = torch.zeros(len(GAP_EDGES) - 1, dtype=torch.long)
        self.pairs: list[Tensor] = []

    def add(self, group: str, name: str, mean: Tensor, count: int) -> None:
        """A mean over `count` queries."""
        key = (group, name)
        self.tables[key] = self.tables.get(key, 0.0) + mean.double().cpu() * count
        self.counts[key] = self.counts.get(key, 0) + count


def _examine(
    total: Sums, item: LayerCapture, made: Diagnostics, router: RouterLayer | None, phi: PhiLayer | None, limit: int,
    rivals: bool,
) -> None:
    """Add one layer of one document."""
    keys, values, queries = item.keys_rot(), item.values.float(), item.queries_rot()
    wanted = queries.shape[1]
    some = torch.linspace(wanted // 3, wanted - 1, min(limit, wanted - wanted // 3)).long()
    step = max(1, SCORES_AT_ONCE // (queries.shape[0] * keys.shape[1]))
    bucket = None if router is None else request_buckets(
        item.keys_pre.float() if router.key_space == "pre" else keys, router.centroids.to(keys.device), router.scores,
        sink_size=made.sink_size, window_size=made.window_size)
    for part in some.split(step):
        q, positions = queries[:, part], item.query_positions[None, part]
        scene = offline.make_scene(q, keys, values, positions, scale=item.scale, sink_size=made.sink_size,
                                   window_size=made.window_size)
        logits = None if phi is None else _phi_logits(scene, q, keys, phi, item.scale, made.sink_size)
        estimates = _rivals(scene, q, keys, made, item.scale) if rivals else {}
        _examine_selection(total, scene, made, logits, estimates)
        if router is not None and bucket is not None:
            _examine_router(total, scene, made, _routed(scene, item, part, q, bucket, router), logits)
        if logits is not None:
            _examine_map(total, scene, logits(0.0, None))
        made.fractions, curve = offline.mass_curve(scene)
        total.add("curves", "mass", curve, len(part))


def _phi_logits(scene: Scene, queries: Tensor, keys: Tensor, phi: PhiLayer, scale: float, sink_size: int) -> Logits:
    """`ŝ` of all keys, calibrated for what is read, a share of the context."""
    phi = phi.to(queries.device)
    logits = phi.maps.surrogate(queries, keys, scene.context, scale=scale, sink_size=sink_size)
    return lambda share, read: phi.estimate(scene, logits, read, share)


def _rivals(
    scene: Scene, queries: Tensor, keys: Tensor, made: Diagnostics, scale: float,
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Untrained estimates of the rest as functions of what is read, each at the bytes of φ's cache."""
    from sparsekv.core.kmeans import spherical_kmeans

    dim = keys.shape[-1]
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, rank in (("centroid", 0), ("moments", MOMENTS_RANK)):
        buckets = estimators.equal_buckets(made.cache_tokens, dim, rank)
        bucket = assign_buckets(keys[None], spherical_kmeans(keys, buckets, 5))[0].long()
        projected = None
        if rank:
            basis = estimators.principal_directions(keys, bucket, buckets, rank)
            along = basis.repeat_interleave(scene.group, 0)
            projected = (queries @ along * scale, keys @ basis)
        found[name] = lambda read, b=bucket, n=buckets, p=projected: estimators.bucket_means(  # type: ignore[misc]
            scene, b, n, read, projected=p)
    generator = torch.Generator(device=keys.device).manual_seed(0)
    found["sampling"] = lambda read: estimators.sampled(scene, max(1, round(made.cache_tokens)), read,
                                                        generator=generator)
    return found


def _examine_selection(
    total: Sums, scene: Scene, made: Diagnostics, logits: Logits | None,
    rivals: dict[str, Callable[[Tensor], Tensor]],
) -> None:
    """Exact top-k at every budget: errors, mass, completion share."""
    count = scene.full.shape[1]
    reads = {b: offline.top_k(scene, b) for b in made.budgets}
    _errors(total, scene, "topk", reads, logits)
    for name, estimate in rivals.items():
        errors = [offline.relative_error(scene, offline.output(scene, r, estimate(r))) for r in reads.values()]
        total.add("errors", f"topk+{name}", torch.stack(errors, -1), count)
    if logits is not None:
        shares = []
        for budget, read in reads.items():
            exact = scene.anchors | read
            z_exact = scene.scores.masked_fill(~exact, NEG_INF).logsumexp(-1)
            z_rest = logits(budget, read).masked_fill(~(scene.mid & ~exact), NEG_INF).logsumexp(-1)
            shares.append(torch.sigmoid(z_rest - z_exact).mean(-1))
        total.add("completion", "share", torch.stack(shares, -1), count)


def _errors(total: Sums, scene: Scene, name: str, reads: dict[float, Tensor], logits: Logits | None) -> None:
    """reads: what is read by budget."""
    count = scene.full.shape[1]
    weights = scene.scores.softmax(-1)
    for label, estimate in ((name, None), (f"{name}+phi", logits)):
        if label == name or estimate is not None:
            outs = [offline.output(scene, r, None if estimate is None else estimate(b, r)) for b, r in reads.items()]
            errors = [offline.relative_error(scene, out) for out in outs]
            total.add("errors", label, torch.stack(errors, -1), count)
    exact = [scene.anchors | r for r in reads.values()]
    total.add("mass", name, torch.stack([(weights * e).sum(-1).mean(-1) for e in exact], -1), count)
    total.add("read", name, torch.stack([(e.sum(-1) / scene.context).mean(-1).expand(weights.shape[0])
                                         for e in exact], -1), count)


@dataclass
class Routed:
    """bucket `[Hkv, N]`; density of probability and of true mass `[Hkv, T, C]`; counts of the last query `[Hkv, C]`."""

    bucket: Tensor
    density: Tensor
    oracle: Tensor
    counts: Tensor


def _routed(
    scene: Scene, item: LayerCapture, part: Tensor, queries: Tensor, bucket: Tensor, router: RouterLayer,
) -> Routed:
    """Scores of the buckets as the runtime's selector makes them, from the keys a query sees (Saap §4)."""
    heads_q, count = queries.shape[:2]
    buckets = router.centroids.shape[1]
    place = bucket.repeat_interleave(scene.group, 0)[:, None].expand_as(scene.scores)
    mid = scene.mid.expand_as(scene.scores)
    sizes = scene.scores.new_zeros(heads_q, count, buckets).scatter_add_(-1, place, mid.to(scene.scores.dtype))
    logits = torch.zeros_like(sizes)
    if router.weights is not None and router.scores != "mean_key":
        asked = item.queries_pre[:, part].float() if router.key_space == "pre" else queries
        weights = type(router.weights)(*(w.to(queries.device) for w in router.weights))
        logits = router_logits(asked.transpose(0, 1).contiguous(), weights).transpose(0, 1)
    if router.scores != "mlp":
        total = torch.zeros_like(sizes).scatter_add_(-1, place, torch.where(mid, scene.scores, 0.0))
        logits = logits + total / sizes.clamp(min=1) + sizes.clamp(min=1).log()
    p = logits.masked_fill(sizes == 0, NEG_INF).softmax(-1).nan_to_num(0.0)
    mass = offline.bucket_mass(scene, bucket, buckets)
    p, mass = (x.reshape(bucket.shape[0], scene.group, count, buckets).sum(1) for x in (p, mass))
    sizes = sizes[:: scene.group]
    ranked = [(x / sizes.clamp(min=1)).masked_fill(sizes == 0, NEG_INF) for x in (p, mass)]
    return Routed(bucket, ranked[0], ranked[1], sizes[:, -1])


def _examine_router(total: Sums, scene: Scene, made: Diagnostics, routed: Routed, logits: Logits | None) -> None:
    count = scene.full.shape[1]
    reads = {b: offline.top_buckets(scene, routed.bucket, routed.density, b) for b in made.budgets}
    _errors(total, scene, "router", reads, logits)
    recall, overlap = [], []
    for budget, read in reads.items():
        best = offline.top_buckets(scene, routed.bucket, routed.oracle, budget)
        recall.append(offline.mass_share(scene, read) / offline.mass_share(scene, best).clamp(min=1e-9))
        top = offline.top_k(scene, budget)
        overlap.append(((read & top).sum(-1) / top.sum(-1).clamp(min=1)).mean(-1))
    total.add("recall", "oracle", torch.stack(recall, -1), count)
    total.add("recall", "topk", torch.stack(overlap, -1), count)
    n = routed.counts
    spread = n.shape[-1] * n.square().sum(-1) / n.sum(-1).square().clamp(min=1)
    total.add("heads", "imbalance", spread.repeat_interleave(scene.group), count)


def _examine_map(total: Sums, scene: Scene, logits: Tensor) -> None:
    """`ŝ − s` over an even sample of the mid keys: mean, spread, histogram, and pairs for the scatter."""
    columns = slice(None, None, max(1, scene.scores.shape[-1] // GAP_KEYS))
    mid = scene.mid[..., columns].expand(scene.scores[..., columns].shape)
    teacher, student = scene.scores[..., columns], logits[..., columns]
    gap = torch.where(mid, student - teacher, float("nan")).flatten(1)
    gap = gap.masked_fill(torch.isinf(gap), float("nan"))  # a closed gate estimates nothing
    known = ~torch.isnan(gap)
    if not bool(known.any()):
        return
    mean = gap.nanmean(-1).nan_to_num(0.0)
    spread = (gap - mean[:, None]).square().nanmean(-1).sqrt().nan_to_num(0.0)
    count = scene.full.shape[1]
    total.add("heads", "gap_mean", mean, count)
    total.add("heads", "gap_std", spread, count)
    found = gap[known].clamp(GAP_EDGES[0], GAP_EDGES[-1])
    total.gaps += torch.histc(found, len(GAP_EDGES) - 1, GAP_EDGES[0], GAP_EDGES[-1]).long().cpu()
    top = scene.scores.masked_fill(~scene.mid, NEG_INF).amax(-1, keepdim=True)
    pairs = torch.stack([(teacher - top).flatten(1)[known], (student - top).flatten(1)[known]], -1)
    total.pairs.append(pairs[torch.linspace(0, len(pairs) - 1, min(64, len(pairs))).long()].cpu())


def _times(item: LayerCapture, phi: PhiLayer) -> dict[str, float]:
    """Seconds to gather the keys and values of TIMED_BUDGET of a window, to attend to them, and to take them out of φ's
    cache and evaluate it; medians over one query of all heads."""
    from sparsekv.kernels import phi_cache, phi_partial, phi_remainder

    keys, values = item.keys_rot()[None], item.values.float()[None]
    query = item.queries_rot()[None, :, -1:]
    device, phi = keys.device, phi.to(keys.device)
    heads, length, dim = keys.shape[1:]
    count = max(1, math.ceil(TIMED_BUDGET * length))
    centre = (keys.mean(2),) if phi.centred else ()
    cache = phi_cache(phi.log_phi_k(keys, *centre), values)
    tokens = torch.randperm(length)[:count].to(device).expand(1, heads, count)
    index = tokens[..., None].expand(1, heads, count, dim)

    def load() -> tuple[Tensor, Tensor]:
        return keys.gather(2, index), values.gather(2, index)

    held = load()

    def attend() -> Tensor:
        scores = query.reshape(1, heads, -1, dim) @ held[0].mT
        return scores.softmax(-1) @ held[1]

    def complete() -> Tensor:
        rest = phi_remainder(cache, phi.log_phi_k(held[0], *centre), held[1], tokens >= 0)
        asked = phi.log_phi_q(query, centre[0] if centre else None, item.scale)[:, :, 0]
        return phi_partial(asked, rest, full_z=cache.z)[0]

    return {"budget": TIMED_BUDGET, **{f.__name__: _median_time(f, device) for f in (load, attend, complete)}}


def _median_time(call: Callable[[], Any], device: torch.device, repeats: int = 30) -> float:
    taken = []
    for _ in range(repeats + 3):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return sorted(taken[3:])[repeats // 2]


def _statistics(store: CaptureStore, documents: int) -> dict[str, list[float]]:
    """Means by layer of the store's own statistics, all captured queries."""
    found: dict[str, list[float]] = {}
    for layer in sorted(store.layers):
        for name, table in _head_statistics(store, layer, documents).items():
            found.setdefault(name, []).append(round(float(table.mean()), 4))
    return found


def _head_statistics(store: CaptureStore, layer: int, documents: int) -> dict[str, Tensor]:
    rows = [store.read(layer, d).statistics for d in range(documents)]
    return {name: torch.stack([r[name].double().mean(-1) for r in rows]).mean(0)
            for name in ("entropy_mid", "cover75", "cover95", "mass_mid") if name in rows[0]}


def _assemble(made: Diagnostics, sums: list[Sums]) -> None:
    known = {key: table for s in sums for key, table in s.tables.items()}
    for (group, name), like in known.items():
        # a layer without an artifact's part has no such table: it stays NaN
        rows = [s.tables[group, name] / s.counts[group, name] if (group, name) in s.tables
                else torch.full_like(like, math.nan) for s in sums]
        getattr(made, group)[name] = torch.stack(rows).float()
    made.gaps = torch.stack([s.gaps for s in sums]).sum(0).tolist()
    pairs = [p for s in sums for p in s.pairs]
    if pairs:
        every = torch.cat(pairs)
        every = every[torch.linspace(0, len(every) - 1, min(SCATTER_POINTS, len(every))).long()]
        made.scatter = [[round(x, 3) for x in pair] for pair in every.tolist()]


def _folder(artifact: Any) -> str | None:
    return None if artifact is None or artifact.path is None else str(artifact.path)


def _check_model(store: CaptureStore, artifact: Any) -> None:
    from sparsekv.artifacts.fingerprint import check_fingerprint

    check_fingerprint(artifact.config.model, store.model, f"the artifact {str(artifact.path or '')!r}",
                      ignore=("rope",))
