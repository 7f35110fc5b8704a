"""What training.py measures on one capture store: every case (what is read exactly) with every method (what stands for
the rest), as decode steps of the product on requests of the store. Every measured query is a request of its own, which
ends its prefill right before it. All layers stand side by side as heads."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsekv.artifacts.hub.models import load_model
from sparsekv.artifacts.phi import PhiArtifact, PhiLayer
from sparsekv.artifacts.router import RouterArtifact, RouterLayer
from sparsekv.capture.run import CaptureConfig, run_capture
from sparsekv.capture.store.manifest import MANIFEST
from sparsekv.capture.store.store import CaptureStore
from sparsekv.core import offline
from sparsekv.core.estimators import CentroidEstimator, Estimator, PhiEstimator
from sparsekv.core.estimators.centroid import equal_buckets
from sparsekv.core.estimators.phi import phi_tokens
from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.regions import tokens_of_budget
from sparsekv.core.selectors.base import Selector
from sparsekv.core.selectors.router import Router
from sparsekv.core.selectors.sketch import SketchRouter
from sparsekv.core.selectors.topk import TopK
from sparsekv.core.step import Parts
from sparsekv.kernels import QueryModel, Sketch, choose_tokens
from sparsekv.models.feature_map import log_kernel
from sparsekv.runtime.hf.attach import writing
from sparsekv.trainers.calibrate import reader, shifted_errors
from sparsekv.trainers.pool import Part, Pool, load_pool
from sparsekv.util.output import read_marker

BUDGETS = (0.01, 0.02, 0.05, 0.1)
MEASURED_QUERIES = 16
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
Sums = dict[tuple[str, str, str], list[Tensor]]


def stores(options: argparse.Namespace, folder: Path, names: Sequence[str], *, generated: int = 0, **load: Any,
           ) -> dict[str, CaptureStore]:
    """Captures of the text's training part, with `generated` windows of the model's own beside them, of its held-out
    part (`heldout`), and of other text (`ood`), in a folder; those that are there already are opened. load: how the
    model is loaded."""
    wanted = [name for name in names if read_marker(folder / name / MANIFEST).get("complete") is not True]
    if wanted:
        model, tokenizer = load_model(options.model, device=options.device, **load)
        for name in wanted:
            own = generated if name == "train" else 0
            run_capture(CaptureConfig(
                model=options.model, corpus="embedded" if name == "ood" else options.text,
                split="all" if name == "ood" else name, output=str(folder / name), layers=options.layers,
                context_length=options.length, queries_per_document=options.queries, chunk_size=4096, seed=1,
                num_documents=own + (options.documents if name == "train" else options.heldout),
                generated_documents=own), model=model, tokenizer=tokenizer, generator=writing)
    return {name: CaptureStore.open(folder / name) for name in names}


def measured(store: CaptureStore, documents: list[int], device: str, count: int = MEASURED_QUERIES,
             sink_size: int | None = None, window_size: int | None = None) -> Iterator[offline.Request]:
    """`count` queries of the second half of every window, evenly; sink and window of the capture unless given."""
    sizes: dict[str, Any] = {"sink_size": sink_size, "window_size": window_size}
    parts = [Part(layer, 0, store.num_kv_heads) for layer in store.layers]
    for document in documents:
        pool: Pool = replace(load_pool(store, parts, [document], device=device),
                             **{name: size for name, size in sizes.items() if size is not None})
        yield from offline.requests(pool.window(0), count, span=1, first=0.5)


def side_by_side(phi: PhiArtifact, *, gated: bool) -> PhiLayer:
    """The maps of all layers as heads of one; with the gates, or with all heads on."""
    shift = phi.shift + phi.gate.log()[:, None] if gated else phi.shift
    return PhiLayer(phi.maps.map(lambda w: w.flatten(0, 1)), shift.transpose(0, 1).flatten(1),
                    tuple(phi.config.read_shares), phi.config.capped)


def layer_of(artifact: RouterArtifact, layers: Sequence[int]) -> RouterLayer:
    """The buckets of these layers, and their sketches, as those of one."""
    c, rows = artifact.config, [artifact.config.layers.index(i) for i in layers]
    weights, sketch = artifact.weights, artifact.sketch
    return RouterLayer(artifact.centroids[rows].flatten(0, 1),
                       None if weights is None else QueryModel(*(w[rows].flatten(0, 1) for w in weights)), c.key_space,
                       c.scores, None if sketch is None else Sketch(*(x[rows].flatten(0, 1) for x in sketch)),
                       c.sketch_bytes)


def router_of(artifact: RouterArtifact, request: offline.Request, kind: type[Router] = Router) -> Router:
    """A router of all layers of an artifact over a request."""
    layer = layer_of(artifact, artifact.config.layers)
    return request.build(kind(token_budget=max(BUDGETS), layer=layer), None)[0]


def spend(router: Selector, view: LayerView, queries: Queries, budget: float) -> Selection:
    """What a router reads at another budget."""
    router.token_budget = budget
    router.prepare(view)
    return router.select(view, queries)


def nearest_centroids(request: offline.Request, router: Router, budget: float) -> Selection:
    """Buckets by `q·centroid`, summed over the group."""
    view, queries = request.view, request.queries
    q = queries.folded if router.trained.key_space == "rot" else queries.folded_pre
    q = q.unflatten(1, (view.num_kv_heads, -1))
    near = torch.einsum("thgd,hcd->thc", q, router.buckets.centroids[0]).argsort(-1).argsort(-1) + 1.0
    tokens = queries.per_query(tokens_of_budget(budget, view.regions))
    return Selection(tokens=choose_tokens(near, *router.buckets[1:3], tokens, int(tokens.max())))


def cases(routers: dict[str, RouterArtifact], request: offline.Request) -> dict[str, Selection]:
    """What every case reads of the mid region. `router` is the untrained one, which `train-router` makes by default;
    oracle and kmeans choose among its buckets."""
    view, queries = request.view, request.queries
    reads = {"sink_tail": request.build(reader(None), None)[0].select(view, queries)}
    for budget in BUDGETS:
        reads[f"topk@{budget}"] = request.build(reader(budget), None)[0].select(view, queries)
    for name, artifact in routers.items():
        router = router_of(artifact, request)
        reads[f"router_{name}@0.05"] = spend(router, view, queries, 0.05)
        if name == "mean_key":
            # requests of sampled queries have no last ones to fit to: sketches of the artifact's own basis
            stages = {"router": router, "sketch": router_of(artifact, request, SketchRouter),
                      "topk_group": request.build(TopK(token_budget=max(BUDGETS)), None)[0]}
            reads |= {f"{n}@{b}": spend(s, view, queries, b) for n, s in stages.items() for b in BUDGETS}
            reads["oracle@0.05"] = offline.best_buckets(request, router, offline.mid_share(request), 0.05)
            reads["kmeans@0.05"] = nearest_centroids(request, router, 0.05)
    return reads


def errors(request: offline.Request, selection: Selection, estimators: dict[str, Estimator], share: float,
           ) -> dict[str, Tensor]:
    """Mean relative error of a step's output without an estimate (`none`) and with each."""
    view, queries, full = request.view, request.queries, request.full
    out, lse = view.attend(queries, selection)
    zero = lse.new_zeros(1)
    found = {"none": offline.relative_error(out, full).mean()}
    for name, estimator in estimators.items():
        estimator.set_read_share(request.prefill, share)
        rest = estimator.partial(view, queries, selection)
        found[name] = shifted_errors(Parts(out, lse, *rest, selection), full, zero).mean()
    return found


def measure(store: CaptureStore, phi: PhiArtifact, routers: dict[str, RouterArtifact], device: str, *,
            count: int = MEASURED_QUERIES) -> tuple[dict[Any, float], dict[str, float]]:
    """(case, method, metric) -> mean over layers, heads, documents and queries; and every method's size in tokens.
    `centroid` has as many bytes as φ's cache."""
    sums: Sums = {}
    layers = {"phi": side_by_side(phi, gated=False), "phi_gated": side_by_side(phi, gated=True)}
    for request in measured(store, list(range(store.num_documents)), device, count):
        estimators: dict[str, Estimator] = {name: PhiEstimator(layer) for name, layer in layers.items()}
        estimators["centroid"] = CentroidEstimator(equal_buckets(
            phi_tokens(phi.config.num_features, store.head_dim, moments=True), store.head_dim))
        for estimator in estimators.values():
            estimator.build(request.prefill)
        for name, value in calibration(request, layers["phi"]).items():
            sums.setdefault(("calibration", "phi", name), []).append(value)
        attention = offline.mid_share(request)
        for case, selection in cases(routers, request).items():
            share = float(case.partition("@")[2] or 0)
            for method, error in errors(request, selection, estimators, share).items():
                sums.setdefault((case, method, "rel_err"), []).append(error)
            if share:
                read = offline.mass_read(attention, selection).mean()
                sums.setdefault((case, "none", "mass_share"), []).append(read)
    means = {key: float(torch.stack(v).mean()) for key, v in sums.items()}
    return means, {name: e.cost_tokens(request.view) for name, e in estimators.items()}


def calibration_scores(request: offline.Request, estimator: PhiEstimator) -> Tensor:
    """The maps' own log weight of every mid key, `[T, Hq, n]`, before the cap."""
    view, layer = request.view, estimator.layer
    first, last = int(view.regions.mid_first[0]), int(view.regions.mid_last[0])
    log_q = layer.maps.log_phi_q(request.queries.rot, estimator.centre, view.scale)[0]  # [Hq, T, r]
    log_k = layer.maps.log_phi_k(view.keys[:, :, first:last], estimator.centre)[0]
    guess = log_kernel(log_q.reshape(log_k.shape[0], -1, log_q.shape[-1]), log_k).reshape(*log_q.shape[:2], -1)
    return guess.transpose(0, 1) + layer.offset[:, None]


def calibration(request: offline.Request, layer: PhiLayer) -> dict[str, Tensor]:
    """Per head `[Hq]`: quantiles of `ŝ − s` over the mid keys, its mean under the true attention, and `Σŵ / Σw`."""
    estimator = PhiEstimator(layer)
    estimator.build(request.prefill)
    first, last = int(request.view.regions.mid_first[0]), int(request.view.regions.mid_last[0])
    guess = calibration_scores(request, estimator)
    truth = offline.mid_scores(request)[..., first:last]
    gap = (guess - truth).transpose(0, 1).flatten(1)
    found = {f"gap_p{round(100 * q):02d}": gap.quantile(q, dim=1) for q in QUANTILES}
    found["gap_weighted"] = (truth.softmax(-1) * (guess - truth)).sum(-1).mean(0)
    found["mass_ratio"] = (guess.logsumexp(-1) - truth.logsumexp(-1)).exp().mean(0)
    return found
