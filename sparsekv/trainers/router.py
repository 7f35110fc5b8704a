"""`sparsekv train-router`: buckets of keys, the query model that predicts where attention falls (Saap §4), and the
sketch that tells the keys of the best buckets apart."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsekv.artifacts.hub.modelcard import write_card
from sparsekv.artifacts.router import RouterArtifact, RouterArtifactConfig
from sparsekv.capture.store.store import CaptureStore
from sparsekv.core.buckets import imbalance, spherical_kmeans
from sparsekv.core.index import RouterLayer
from sparsekv.core.offline import Request, best_buckets, mass_read, mid_share, requests
from sparsekv.core.selectors.router import SCORES, Router
from sparsekv.core.selectors.sketch import SketchRouter
from sparsekv.core.sketch import check_sketch, code_size
from sparsekv.kernels import QueryModel, Sketch, assign_buckets, bucket_mass
from sparsekv.models.losses import bucket_kl
from sparsekv.models.router import BucketRouter
from sparsekv.trainers.options import DEFAULT, TrainingOptions, chosen, recipe_option
from sparsekv.trainers.pool import Part, Pool, load_pool, pool_bytes, provenance, split_documents
from sparsekv.trainers.sketch import closed_form
from sparsekv.trainers.task import Task, by_head
from sparsekv.trainers.work import Run
from sparsekv.util.config import MOST_STEPS, option
from sparsekv.util.errors import SparseKVError, check_choice
from sparsekv.util.progress import progress

LONG_CONTEXT = 65_536
SPACES = ("auto", "pre", "rot")
BUDGETS = (0.01, 0.02, 0.05, 0.1)
JUDGED_AT = 0.05
ITERATIONS = 10
KMEANS_HEADS = 8
CARD_REQUESTS = 8
WATCHED_WINDOWS, WATCHED_REQUESTS = 2, 2


@dataclass(frozen=True)
class RouterRecipe:
    """How a router is trained. The defaults are what README's tables report: no query model. hidden_size: hidden units
    of the query model; batch_size: its queries a step, of all query heads that share it; long_range: it trains on
    queries whose best key is further away than this [tokens], where a window has enough of them; one_window: all
    queries of a step are of one window. sink_size, window_size: what it leaves to exact attention, and the artifact
    says [tokens]; the capture's where they are None. constant_rate: no warm-up and no decay. last_weights: keep those,
    and not every head's best of five validations. sketch_bytes, sketch_wide: a quarter of the head dimension and an
    eighth of that where they are None."""

    num_buckets: int = 1024
    scores: str = "mean_key"
    key_space: str = "auto"
    hidden_size: int = 1024
    max_steps: int = 3000
    batch_size: int = 256
    lr: float = 2e-3
    long_range: int = 0
    one_window: bool = False
    sink_size: int | None = None
    window_size: int | None = None
    constant_rate: bool = False
    last_weights: bool = False
    sketch_bytes: int | None = None
    sketch_wide: int | None = None


RECIPES = {DEFAULT: RouterRecipe(),
           "saap": RouterRecipe(scores="mlp", key_space="pre", max_steps=40_000, batch_size=1000, lr=1e-5,
                                long_range=1024, one_window=True, sink_size=1, window_size=2047, constant_rate=True,
                                last_weights=True, sketch_bytes=0)}


@dataclass(frozen=True)
class RouterConfig(TrainingOptions):
    preset: str = option(DEFAULT, help="default, or saap: the paper's settings.")
    num_buckets: int | None = recipe_option(RECIPES, "num_buckets", help="Buckets C per KV head [buckets].", min=2)
    scores: str | None = recipe_option(
        RECIPES, "scores", help="How a query scores buckets: mean_key (untrained, by the means of each request's own "
                                "keys) or mlp (the paper's query model).")
    key_space: str | None = recipe_option(
        RECIPES, "key_space", group="Training", help="Keys that are clustered: rot (with RoPE), pre (RoPE removed, as "
                                                     "the paper), or auto: pre from 65536 tokens of context on.")
    max_steps: int | None = recipe_option(RECIPES, "max_steps", group="Training", min=1, max=MOST_STEPS,
                                          help="Training steps of the query model [steps].")
    lr: float | None = recipe_option(RECIPES, "lr", group="Training",
                                     help="Peak learning rate (Adam, warm-up, cosine to zero; saap: constant).")
    sketch_bytes: int | None = option(None, min=0, help="Bytes of a key's sketch, 0 for none [bytes]. [default: a "
                                                        "quarter of the head dimension; saap: 0]")


def train_router(config: RouterConfig, recipe: RouterRecipe | None = None) -> RouterArtifact:
    """k-means, training where a query model is asked for, quality card, save. recipe: in place of the preset's. Raises
    SparseKVError for a bad store, options or output."""
    config.check()
    recipe = chosen(config, RECIPES, recipe)
    check_choice("scores", recipe.scores, SCORES)
    check_choice("key space", recipe.key_space, SPACES)
    store = CaptureStore.open(config.capture)
    train, validation = split_documents(store, config.validation_documents)
    if recipe.key_space == "auto":
        recipe = replace(recipe, key_space="pre" if store.context_length >= LONG_CONTEXT else "rot")
    check_buckets(recipe.num_buckets, store.context_length * len(train))
    width, wide = code_size(recipe.sketch_bytes, recipe.sketch_wide, store.head_dim)
    sink, window = (store.config[n] if getattr(recipe, n) is None else getattr(recipe, n)
                    for n in ("sink_size", "window_size"))
    if store.context_length <= sink + window:
        raise SparseKVError(f"windows of {store.context_length} tokens have nothing between a sink of {sink} and a "
                            f"local window of {window}; capture longer contexts")
    recipe = replace(recipe, sketch_bytes=width, sketch_wide=wide, sink_size=sink, window_size=window)
    if width:
        check_sketch(width, wide, store.head_dim)
    sizes = f"--num-buckets {recipe.num_buckets} and {len(train)} windows"
    with Run("router", config, recipe, store, lambda heads: router_memory(recipe, store, len(train), heads),
             sizes) as run:
        return _train(run, config, recipe, store, train, validation, (width, wide))


def check_buckets(num_buckets: int, keys: int) -> None:
    """Raises SparseKVError for more buckets than a head has keys to train on."""
    if keys < num_buckets:
        raise SparseKVError(f"{num_buckets} buckets need at least as many keys, and the capture has {keys} a "
                            "head; use fewer buckets or a larger capture")


def router_memory(recipe: RouterRecipe, store: CaptureStore, documents: int, heads: int) -> int:
    """Bytes that the training of so many KV heads holds for certain: captured keys and queries, centroids, and of a
    query model the weights, gradients and moments."""
    buckets, dim, hidden = recipe.num_buckets, store.head_dim, recipe.hidden_size
    weights = 3 * hidden * (dim + buckets) if recipe.scores == "mlp" else 0
    return pool_bytes(store, documents, heads, values=False) + 4 * heads * (buckets * dim + weights)


def _train(
    run: Run, config: RouterConfig, recipe: RouterRecipe, store: CaptureStore, train: list[int], validation: list[int],
    code: tuple[int, int],
) -> RouterArtifact:
    width, wide = code
    sizes: dict[str, Any] = {"sink_size": recipe.sink_size, "window_size": recipe.window_size}
    for index, parts in enumerate(run.groups):
        if run.finished(parts):
            continue
        name = "" if len(run.groups) == 1 else f" {index + 1}/{len(run.groups)}"
        pool = replace(load_pool(store, parts, train, device=run.device, values=False), **sizes)
        run.start()
        saved = run.saved(f"kmeans-{parts[0].name}")
        if saved is None:
            saved = {"centroids": cluster(pool, recipe, config.seed, name)}
            run.save(f"kmeans-{parts[0].name}", saved)
        layer = RouterLayer(saved["centroids"].to(run.device), None, recipe.key_space, recipe.scores,
                            closed_form(pool, width, wide) if width else None, width)
        validating = replace(load_pool(store, parts, validation, device=run.device), **sizes)
        if recipe.scores == "mlp":
            task = RouterTask(recipe, pool, validating, layer.centroids, parts, config.seed, name)
            run.fit(task, index, "router", f"train router{name}", recipe.max_steps, recipe.lr)
            layer = layer._replace(weights=QueryModel(*(w.detach() for w in task.router.fold())))
        del pool
        with progress(f"quality of the router{name}"):
            result = {"centroids": layer.centroids, **quality(validating, layer)}
        if layer.weights is not None:
            result |= {f"query_model.{k}": w for k, w in layer.weights._asdict().items()}
        if layer.sketch is not None:
            result |= {f"sketch.{k}": x for k, x in layer.sketch._asdict().items()}
        run.keep(parts, result)
    made: list[RouterArtifact] = []

    def assemble(tensors: dict[str, Tensor]) -> None:
        card = {k.removeprefix("quality."): v for k, v in tensors.items() if k.startswith("quality.")}
        weights = None
        if recipe.scores == "mlp":
            weights = QueryModel(*(tensors[f"query_model.{k}"] for k in QueryModel._fields))
        sketch = Sketch(*(tensors[f"sketch.{k}"] for k in Sketch._fields)) if width else None
        made.append(RouterArtifact(
            RouterArtifactConfig(
                model=store.model, layers=store.layers, num_buckets=recipe.num_buckets, key_space=recipe.key_space,
                scores=recipe.scores, **sizes, sketch_bytes=width, sketch_wide=wide,
                provenance=provenance(store, asdict(config) | asdict(recipe), train, validation), quality=_card(card)),
            tensors["centroids"], weights, run.out, sketch=sketch))
        made[0].save(run.out)
        write_card(run.out, {"router": asdict(made[0].config)})

    run.finish(assemble)
    return made[0] if made else RouterArtifact.load(run.out)


def cluster(pool: Pool, recipe: RouterRecipe, seed: int, name: str = "") -> Tensor:
    """Spherical k-means over the keys of all windows: `[Lk, C, d]` unit centroids."""
    groups = range(0, pool.heads_kv, KMEANS_HEADS)
    with progress(f"k-means{name}", len(groups) * ITERATIONS, "iterations") as advance:
        return torch.cat([
            spherical_kmeans(
                pool.keys_in(recipe.key_space, heads=slice(a, a + KMEANS_HEADS)).transpose(0, 1).flatten(1, 2),
                recipe.num_buckets, iterations=ITERATIONS, seed=seed, advance=advance) for a in groups])


class RouterTask(Task):
    """Bucket KL of one query model a KV head, all heads in one batch. The targets, attention mass per bucket, are
    computed once."""

    def __init__(self, recipe: RouterRecipe, pool: Pool, validating: Pool, centroids: Tensor, parts: list[Part],
                 seed: int, name: str = ""):
        super().__init__()
        self.seed, self.one_window = seed, recipe.one_window
        self.batch = -(-recipe.batch_size // pool.group)
        self.constant_rate, self.last_weights = recipe.constant_rate, recipe.last_weights
        self.documents, self.heads_q, self.per_document = pool.queries.shape[:3]
        self.heads_kv, self.group = pool.heads_kv, pool.group
        seeds = [(seed * 997 + part.layer) * 4096 + part.first + h for part in parts for h in range(part.heads)]
        dim, buckets = pool.queries.shape[3], recipe.num_buckets
        self.router = by_head(lambda heads: BucketRouter(heads, dim, buckets, recipe.hidden_size), seeds)
        distance = pool.positions[:, None] - pool.best
        # stable: equal distances are many, and every device must draw the same queries
        self.order = distance.argsort(dim=2, descending=True, stable=True).int()
        enough = self.per_document // 4  # where fewer look far, the furthest-looking ones
        self.number = (distance > recipe.long_range).sum(2).clamp(min=max(1, enough)).float()
        self.queries = pool.queries_in(recipe.key_space).flatten(0, 2)
        with progress(f"targets{name}", self.documents, "windows") as advance:
            self.mass = targets(pool, centroids, recipe.key_space, advance).flatten(0, 2)
        self.head = torch.arange(self.heads_q, device=self.queries.device)[:, None]
        layer = RouterLayer(centroids, self.router.to(centroids.device).fold(), recipe.key_space, "mlp")
        self.watched: list[tuple[Request, Router, Tensor]] = []
        for document in range(min(WATCHED_WINDOWS, validating.documents)):
            for request in requests(validating.window(document), WATCHED_REQUESTS):
                router, _ = request.build(Router(token_budget=JUDGED_AT, layer=layer), None)
                self.watched.append((request, router, mid_share(request)))

    def draws(self, first: int, count: int) -> dict[str, Tensor]:
        """The window `[count, batch]` of every query, and uniform numbers `[count, group, batch]`: which of its far
        queries; the same for every KV head."""
        found = []
        for step in range(first, first + count):
            generator = torch.Generator().manual_seed(self.seed * 104_729 + step)
            window = torch.randint(self.documents, (1 if self.one_window else self.batch,), generator=generator)
            found.append((window.expand(self.batch), torch.rand(self.group, self.batch, generator=generator)))
        return {"document": torch.stack([d for d, _ in found]), "query": torch.stack([q for _, q in found])}

    def losses(self, draw: dict[str, Tensor]) -> dict[str, Tensor]:
        document = draw["document"].expand(self.heads_q, -1)
        far = self.number[document, self.head]
        place = self.order[document, self.head, (draw["query"].repeat(self.heads_kv, 1) * far).long()]
        row = ((document * self.heads_q + self.head) * self.per_document + place).flatten()
        queries = self.queries.index_select(0, row).float().reshape(self.heads_kv, -1, self.queries.shape[1])
        target = self.mass.index_select(0, row).float().reshape(self.heads_kv, -1, self.mass.shape[1])
        target = target / target.sum(-1, keepdim=True).clamp(min=1e-6)
        return {"loss": bucket_kl(self.router(queries), target)}

    def validate(self) -> Tensor:
        """1 − the share of the mid mass reached at 5 % of the context, by KV head."""
        found = []
        for request, router, share in self.watched:
            router.layer = router.layer._replace(weights=self.router.fold())
            router.weights = router.query_model(request.view)
            found.append(mass_read(share, router.select(request.view, request.queries)).mean(0))
        return 1 - torch.stack(found).mean(0).reshape(self.heads_kv, -1).mean(1)


def targets(pool: Pool, centroids: Tensor, space: str, advance: Any) -> Tensor:
    """The share of every captured query's mid attention in every bucket: `[D, Lq, T, C]` float16, zero where a query
    has no mid key."""
    mass = torch.empty(*pool.queries.shape[:3], centroids.shape[1], dtype=torch.float16, device=pool.keys.device)
    for document in range(pool.documents):
        bucket = assign_buckets(pool.keys_in(space, slice(document, document + 1)), centroids)[0]
        positions = pool.positions[document].expand(pool.heads_q, -1)
        mass[document] = bucket_mass(pool.queries[document], pool.keys[document], bucket, positions, centroids.shape[1],
                                     scale=pool.scale, sink_size=pool.sink_size, window_size=pool.window_size,
                                     dtype=torch.float16)
        advance(1)
    return mass


def quality(pool: Pool, layer: RouterLayer) -> dict[str, Tensor]:
    """The card, from held-out windows: per query head the share of the mid mass reached at every budget, by buckets
    alone and with sketches of the artifact's own basis, and an oracle's on the same buckets; per KV head the imbalance
    `C · Σ share²` and the largest bucket's share of the keys."""
    found: dict[str, list[Tensor]] = {}
    for document in range(pool.documents):
        for request in requests(pool.window(document), CARD_REQUESTS):
            made = {"": Router(token_budget=max(BUDGETS), layer=layer)}
            if layer.sketch is not None:
                made["sketch_"] = SketchRouter(token_budget=max(BUDGETS), layer=layer, fit="fixed")
            for selector in made.values():
                request.build(selector, None)
            router = made[""]
            share, sizes = mid_share(request), router.bucket_sizes[0]
            tables = {"imbalance": imbalance(sizes), "largest_bucket": sizes.amax(1) / sizes.sum(1).clamp(min=1)}
            for budget in BUDGETS:
                for name, selector in made.items():
                    selector.token_budget = budget
                    selector.prepare(request.prefill)
                    read = selector.select(request.view, request.queries)
                    tables[f"{name}mass_share@{budget}"] = mass_read(share, read).mean(0)
                best = best_buckets(request, router, share, budget)
                tables[f"oracle_mass_share@{budget}"] = mass_read(share, best).mean(0)
            for name, table in tables.items():
                found.setdefault(f"quality.{name}", []).append(table)
    return {name: torch.stack(values).mean(0) for name, values in found.items()}


def _card(tables: dict[str, Tensor]) -> dict[str, Any]:
    order = sorted(tables, key=lambda n: ("mass" not in n, "oracle" in n, n))
    card: dict[str, Any] = {name: float(tables[name].mean()) for name in order}
    card["per_head"] = {name: [[round(x, 4) for x in row] for row in tables[name].tolist()] for name in order}
    return card
