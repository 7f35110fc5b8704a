"""What training.py measures on one capture store: every case (what is read exactly) with every method (what stands for
the rest), on scenes built once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.core import offline
from sparsekv.kernels import QueryModel, router_logits
from sparsekv.models import estimators
from sparsekv.runtime import request_fit
from sparsekv.store.store import CaptureStore, LayerCapture
from sparsekv.trainers.calibrate import CASES
from sparsekv.trainers.kmeans import spherical_kmeans

BUDGETS = (0.01, 0.02, 0.05, 0.1)
MEASURED_QUERIES = 64
RANK = 16
MANY_BUCKETS = 256
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
Means = dict[tuple[str, str, str], list[Tensor]]


class View(NamedTuple):
    """One layer of one document: its attention for queries in the second half, and the captured tensors."""

    scene: offline.Scene
    queries: Tensor
    queries_pre: Tensor
    keys: Tensor
    keys_pre: Tensor
    scale: float


def view(store: CaptureStore, item: LayerCapture, count: int = MEASURED_QUERIES,
         positions: range | None = None) -> View:
    """`count` queries of the second half, evenly; or those at `positions`, of a store that holds all queries."""
    if positions is None:
        late = item.query_positions.expand(len(item.queries_pre), -1) >= store.context_length // 2
        count = min(count, int(late.sum(1).min()))
        pick = torch.stack([r.nonzero()[:, 0][torch.linspace(0, int(r.sum()) - 1, count).long()] for r in late])
    else:
        held = item.query_positions.expand(len(item.queries_pre), -1)
        pick = torch.searchsorted(held, held.new_tensor(positions).repeat(held.shape[0], 1))
    rows = pick[..., None].expand(-1, -1, store.head_dim)
    queries, queries_pre = (q.gather(1, rows) for q in (item.queries_rot(), item.queries_pre.float()))
    keys = item.keys_rot()
    scene = offline.make_scene(queries, keys, item.values.float(), item.query_positions[pick],
                               scale=item.scale, sink_size=store.config["sink_size"],
                               window_size=store.config["window_size"])
    return View(scene, queries, queries_pre, keys, item.keys_pre.float(), item.scale)


class Rivals:
    """The untrained estimators at the bytes of a φ cache of `features`. Maps without an absolute scale are shifted by
    what training windows say, head by head."""

    def __init__(self, features: int, dim: int, seed: int = 0):
        self.tokens = estimators.phi_tokens(features, dim, moments=True)
        self.dim = dim
        self.generator = torch.Generator().manual_seed(seed)
        self.directions = estimators.orthogonal_directions(features, dim, self.generator)
        self.shifts: dict[tuple[int, str], Tensor] = {}

    def reads(self) -> dict[str, float]:
        """Bytes of every method in tokens."""
        wide = MANY_BUCKETS * (2 * self.dim + 1) / (2 * self.dim)
        own = {m: self.tokens for m in ("centroid", "moments", "sampling", "sampling_uniform", "prf")}
        return {**own, "phi": self.tokens, "phi_gated": self.tokens, f"centroid_{MANY_BUCKETS}": wide,
                "hedgehog": estimators.phi_tokens(2 * self.dim, self.dim)}

    def fit(self, store: CaptureStore, documents: list[int], device: str) -> None:
        for layer in store.layers:
            found: dict[str, list[Tensor]] = {}
            for document in documents:
                seen = view(store, store.read(layer, document).to(device))
                for name, logits in self._features(seen).items():
                    found.setdefault(name, []).append(estimators.mass_shift(seen.scene, logits))
            self.shifts |= {(layer, name): torch.stack(v).mean(0) for name, v in found.items()}

    def _features(self, seen: View) -> dict[str, Tensor]:
        pairs = {"prf": estimators.favor(seen.queries, seen.keys, self.directions.to(seen.keys.device),
                                         scale=seen.scale),
                 "hedgehog": estimators.identity_softmax(seen.queries, seen.keys)}
        return {name: estimators.feature_logits(seen.scene, *pair) for name, pair in pairs.items()}

    def buckets(self, keys: Tensor, size: int) -> tuple[Tensor, int]:
        """Bucket of every key `[Hkv, N]` of the request itself, and the number of buckets."""
        size = min(size, keys.shape[1] // 4)
        found = spherical_kmeans(keys, size, iterations=10, engine="torch")
        return (keys @ found.mT).argmax(-1), size

    def __call__(self, layer: int, seen: View) -> dict[str, Callable[[Tensor | None], Tensor]]:
        """By method: from what is read to log weights of the rest."""
        scene, keys = seen.scene, seen.keys
        group = scene.group
        sizes = {"centroid": estimators.equal_buckets(self.tokens, self.dim),
                 "moments": estimators.equal_buckets(self.tokens, self.dim, RANK),
                 "proposal": max(1, int(self.tokens * self.dim / (self.dim + 1))),
                 f"centroid_{MANY_BUCKETS}": MANY_BUCKETS}
        # half of the reads choose where to sample, by mean keys alone; the other half are the samples
        drawn = max(1, int(self.tokens / 2))
        buckets = {name: self.buckets(keys, size) for name, size in sizes.items()}
        basis = estimators.principal_directions(keys, *buckets["moments"], RANK)
        projected = (seen.queries @ basis.repeat_interleave(group, 0) * seen.scale, keys @ basis)
        proposal = estimators.mixture(scene, estimators.bucket_means(scene, *buckets["proposal"]))
        generator = torch.Generator(device=keys.device).manual_seed(layer)

        def centroid(name: str) -> Callable[[Tensor | None], Tensor]:
            return lambda read: estimators.bucket_means(scene, *buckets[name], read)

        shifted = {name: logits + self.shifts[layer, name][:, None, None]
                   for name, logits in self._features(seen).items()}
        return {
            "centroid": centroid("centroid"), f"centroid_{MANY_BUCKETS}": centroid(f"centroid_{MANY_BUCKETS}"),
            "moments": lambda read: estimators.bucket_means(scene, *buckets["moments"], read, projected=projected),
            "sampling": lambda read: estimators.sampled(scene, drawn, read, proposal=proposal, generator=generator),
            "sampling_uniform": lambda read: estimators.sampled(scene, int(self.tokens), read, generator=generator),
            "prf": lambda _: shifted["prf"], "hedgehog": lambda _: shifted["hedgehog"],
        }


def phi_logits(phi: PhiArtifact, layer: int, seen: View) -> Callable[[float, Tensor | None], dict[str, Tensor]]:
    """Log weights of the learned maps for a share of the context and what is read: with the gate forced on, and
    gated."""
    maps = phi.layer(layer)
    assert maps is not None, f"the feature maps have no layer {layer}"
    logits = maps.maps.surrogate(seen.queries, seen.keys, seen.scene.context, scale=seen.scale,
                                 sink_size=phi.config.sink_size)
    forced = maps._replace(offsets=phi.shift[phi.config.layers.index(layer)])
    return lambda share, read: {name: which.estimate(seen.scene, logits, read, share)
                                for name, which in (("phi", forced), ("phi_gated", maps))}


def router_scores(router: RouterArtifact, layer: int, seen: View) -> tuple[Tensor, dict[str, Tensor]]:
    """Bucket of every key `[Hkv, N]`, and the score per key of each bucket `[Hkv, T, C]` by the router, by an oracle
    that knows the attention, and by `q·centroid`."""
    scene, heads_kv = seen.scene, seen.keys.shape[0]
    trained = router.layer(layer)
    assert trained is not None and trained.key_space in ("rot", "pre")
    rotated = trained.key_space == "rot"
    keys, queries = (seen.keys, seen.queries) if rotated else (seen.keys_pre, seen.queries_pre)
    centroids = trained.centroids.to(keys.device)
    buckets = centroids.shape[1]
    bucket = (keys @ centroids.mT).argmax(-1)
    member = torch.nn.functional.one_hot(bucket, buckets).to(keys.dtype)

    def total(x: Tensor) -> Tensor:
        return (x.reshape(heads_kv, -1, x.shape[-1]) @ member).reshape(*x.shape[:2], buckets)

    mid = scene.mid.expand(scene.scores.shape)
    count = total(mid.to(keys.dtype))
    logits = torch.zeros_like(count)
    if trained.scores != "mlp":
        logits = total(torch.where(mid, scene.scores, 0.0)) / count.clamp(min=1) + count.log()
    if trained.weights is not None:
        weights = QueryModel(*(w.to(keys.device) for w in trained.weights))
        logits = logits + router_logits(queries.transpose(0, 1), weights).transpose(0, 1)

    def shared(x: Tensor) -> Tensor:
        return x.reshape(heads_kv, scene.group, *x.shape[1:]).sum(1)

    per_key = {name: shared(p) / shared(count).clamp(min=1) for name, p in (
        ("router", logits.softmax(-1).nan_to_num(0.0)), ("oracle", offline.bucket_mass(scene, bucket, buckets)))}
    return bucket, {**per_key, "kmeans": shared(offline.grouped(queries, centroids))}


def cases(routers: dict[str, RouterArtifact], best: str, layer: int, seen: View) -> dict[str, Tensor | None]:
    """What every case reads of the mid region: bool `[Hq, T, N]`, or None for the anchors alone."""
    scene = seen.scene
    reads: dict[str, Tensor | None] = {"sink_tail": None}
    reads |= {f"topk@{b}": offline.top_k(scene, b) for b in BUDGETS}
    for name, router in routers.items():
        bucket, scores = router_scores(router, layer, seen)
        reads[f"router_{name}@0.05"] = offline.top_buckets(scene, bucket, scores["router"], 0.05)
        if name == best:
            reads |= {f"router@{b}": offline.top_buckets(scene, bucket, scores["router"], b) for b in BUDGETS}
            reads |= {f"{c}@0.05": offline.top_buckets(scene, bucket, scores[c], 0.05) for c in ("oracle", "kmeans")}
    return reads


def measure(store: CaptureStore, phi: PhiArtifact, routers: dict[str, RouterArtifact], best: str, rivals: Rivals,
            device: str) -> tuple[dict[Any, float], dict[Any, Tensor]]:
    """(case, method, metric) -> mean over layers, heads, documents and queries; and (metric) -> per head `[L, Hq]` of
    the calibration of φ."""
    sums: Means = {}
    heads: dict[str, list[list[Tensor]]] = {}
    for row, layer in enumerate(store.layers):
        for document in range(store.num_documents):
            seen = view(store, store.read(layer, document).to(device))
            scene = seen.scene
            learned = phi_logits(phi, layer, seen)
            for name, value in calibration(scene, learned(0.0, None)["phi"]).items():
                per_layer = heads.setdefault(name, [[] for _ in store.layers])
                per_layer[row].append(value)
            untrained = rivals(layer, seen)
            for case, read in cases(routers, best, layer, seen).items():
                share = float(case.partition("@")[2] or 0)
                estimates = {**learned(share, read), **{name: rival(read) for name, rival in untrained.items()}}
                for method, logits in (("none", None), *estimates.items()):
                    error = offline.relative_error(scene, offline.output(scene, read, logits))
                    sums.setdefault((case, method, "rel_err"), []).append(error.mean())
                if read is not None:
                    share = offline.mass_share(scene, read).mean()
                    sums.setdefault((case, "none", "mass_share"), []).append(share)
    means: dict[Any, float] = {key: float(torch.stack(v).mean()) for key, v in sums.items()}
    per_head = {name: torch.stack([torch.stack(v).mean(0) for v in layers]).cpu() for name, layers in heads.items()}
    means |= {("calibration", "phi", name): float(v.mean()) for name, v in per_head.items()}
    return means, per_head


def measure_request(store: CaptureStore, phi: PhiArtifact, rivals: Rivals, device: str) -> dict[Any, float]:
    """φ as the runtime has it, its mass fitted to the request's last queries, beside φ as calibrated and centroids:
    (case, method, rel_err) -> mean over the 256 tokens that follow a prefill of half and of three quarters of every
    window, every eighth measured. The store holds all queries."""
    sums: Means = {}
    shifts = torch.tensor(phi.config.shift_grid, device=device)
    for layer in store.layers:
        maps = phi.layer(layer)
        assert maps is not None
        for document in range(store.num_documents):
            item = store.read(layer, document).to(device)
            buckets = rivals.buckets(item.keys_rot(), estimators.equal_buckets(rivals.tokens, rivals.dim))
            for ended in (store.context_length // 2, 3 * store.context_length // 4):
                before = view(store, item, positions=range(ended - request_fit.QUERIES, ended))
                seen = view(store, item, positions=range(ended, ended + request_fit.LASTS, 8))
                logits = [maps.maps.surrogate(v.queries, v.keys, v.scene.context, scale=v.scale,
                                              sink_size=phi.config.sink_size) for v in (before, seen)]
                for case, share in CASES.items():
                    there, read = (None if share is None else offline.top_k(v.scene, share) for v in (before, seen))
                    at = maps.at(share or 0.0)
                    assert at.errors is not None
                    error = offline.mass_errors(before.scene, logits[0], there, shifts)[1]
                    fit = request_fit.best_shift(error, at.errors[0], shifts)
                    own = at._replace(offsets=fit[None])
                    estimates = {"none": None, "phi": at.estimate(seen.scene, logits[1], read, share or 0.0),
                                 "phi_request": own.estimate(seen.scene, logits[1], read, share or 0.0),
                                 "centroid": estimators.bucket_means(seen.scene, *buckets, read)}
                    for method, estimate in estimates.items():
                        found = offline.relative_error(seen.scene, offline.output(seen.scene, read, estimate))
                        sums.setdefault((case, method, "rel_err"), []).append(found.mean())
    return {key: float(torch.stack(v).mean()) for key, v in sums.items()}


def measure_routers(store: CaptureStore, routers: dict[str, RouterArtifact], device: str) -> dict[Any, float]:
    """The rows of the routers, and of the first one's oracle, that need no φ: (case, none, metric) -> mean."""
    sums: Means = {}
    for layer in store.layers:
        for document in range(store.num_documents):
            seen = view(store, store.read(layer, document).to(device))
            scene = seen.scene
            reads = {}
            for name, router in routers.items():
                bucket, scores = router_scores(router, layer, seen)
                if not reads:
                    reads["oracle@0.05"] = offline.top_buckets(scene, bucket, scores["oracle"], 0.05)
                reads |= {f"router_{name}@{b}": offline.top_buckets(scene, bucket, scores["router"], b)
                          for b in BUDGETS}
            for case, read in reads.items():
                error = offline.relative_error(scene, offline.output(scene, read))
                sums.setdefault((case, "none", "rel_err"), []).append(error.mean())
                sums.setdefault((case, "none", "mass_share"), []).append(offline.mass_share(scene, read).mean())
    return {key: float(torch.stack(v).mean()) for key, v in sums.items()}


def calibration(scene: offline.Scene, logits: Tensor) -> dict[str, Tensor]:
    """Per head `[Hq]`: quantiles of `ŝ − s` over the mid keys, its mean under the true attention, and `Σŵ / Σw`."""
    gap = (logits - scene.scores).masked_fill(~scene.mid, float("nan")).flatten(1)
    found = {f"gap_p{round(100 * q):02d}": gap.nanquantile(q, dim=1) for q in QUANTILES}
    truth = scene.scores.masked_fill(~scene.mid, offline.NEG_INF)
    weight = truth.softmax(-1).nan_to_num(0.0)
    found["gap_weighted"] = (weight * (logits - scene.scores).masked_fill(~scene.mid, 0.0)).sum(-1).mean(-1)
    guess = logits.masked_fill(~scene.mid, offline.NEG_INF)
    found["mass_ratio"] = (guess.logsumexp(-1) - truth.logsumexp(-1)).exp().mean(-1)
    return found


def check(store: CaptureStore, rivals: Rivals, device: str) -> None:
    """Before anything is measured: exact weights leave no error, and every rival gives a finite output."""
    seen = view(store, store.read(store.layers[0], 0).to(device), 8)
    scene = seen.scene
    read = offline.top_k(scene, 0.05)
    assert float(offline.relative_error(scene, offline.output(scene, read, scene.scores)).max()) < 1e-3
    for name, rival in rivals(store.layers[0], seen).items():
        out = offline.output(scene, read, rival(read))
        assert bool(torch.isfinite(out).all()), f"{name} gives an infinite output"
