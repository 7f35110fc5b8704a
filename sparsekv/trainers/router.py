"""`sparsekv train-router`: buckets of keys, and the query model that predicts where attention falls (Saap §4)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsekv.artifacts.router import WEIGHT_DTYPES, RouterArtifact, RouterArtifactConfig
from sparsekv.config import option
from sparsekv.errors import SparseKVError
from sparsekv.kernels import QueryModel, router_logits
from sparsekv.models.losses import bucket_kl
from sparsekv.models.router import BucketRouter
from sparsekv.progress import progress
from sparsekv.store.store import CaptureStore
from sparsekv.trainers.fit import Task, by_head, fit
from sparsekv.trainers.kmeans import ENGINES, INITS, imbalance, spherical_kmeans
from sparsekv.trainers.options import TrainingOptions
from sparsekv.trainers.pool import Part, Pool, load_pool, provenance, split_documents
from sparsekv.trainers.targets import HeldOut, Targets, held_out, make_targets, recall
from sparsekv.trainers.work import Run

LONG_CONTEXT = 65_536
BUDGETS = (0.01, 0.02, 0.05, 0.1)
JUDGED_AT = 0.05
KMEANS_HEADS = 8


@dataclass(frozen=True)
class RouterConfig(TrainingOptions):
    batch_size: int = option(256, help="Queries per query head and step [queries].", min=2)
    num_buckets: int = option(1024, help="Buckets C per KV head [buckets].", min=2)
    key_space: str = option("auto", help="Keys that are clustered: pre (RoPE removed, as the paper), rot (with RoPE), "
                                         "or auto: pre from 65536 tokens of context on, rot below.")
    scores: str = option("mlp", help="How a query scores buckets: mlp (the paper's query model), mean_key (untrained, "
                                     "from each request's own bucket means) or hybrid (mean_key plus a trained one).")
    router_scope: str = option("kv_head", help="One query model per kv_head (shared by its group) or per query_head.")
    hidden_size: int = option(1024, help="Hidden width of the query model [units].", min=8)
    output_rank: int = option(0, help="Rank R of the query model's output matrix, trained as a product of two and "
                                      "multiplied out when saved: fewer weights to fit, the same size and speed; "
                                      "0 = full.", min=0)
    validate_every: int = option(250, help="Measure the mass reached at 5 % on validation windows before training, "
                                           "every so many steps and after it, and keep every head's best weights: a "
                                           "hybrid starts as mean_key and cannot end below it there; 0 keeps the "
                                           "last weights [steps].", min=0)
    weights_dtype: str = option("float32", help="How the query model is saved: float32, bfloat16 or float8 (e4m3, one "
                                                "scale a column; loaded as bfloat16).")
    long_range: int = option(1024, help="Train on queries whose best key is further away than this; where a head has "
                                        "too few, its furthest-looking ones [tokens].", min=0)
    init: str = option("random", help="Where k-means starts: random keys, or kmeans++.")
    kmeans_iterations: int = option(10, help="Iterations of spherical k-means [iterations].", min=1)
    kmeans_engine: str = option("auto", help="auto, faiss or torch.")


def train_router(config: RouterConfig) -> RouterArtifact:
    """k-means, targets, training, quality card, save. Raises SparseKVError for a bad store, options or output."""
    config.check()
    store = CaptureStore.open(config.capture)
    train, validation = split_documents(store, config.validation_documents)
    space = _check(config, store, len(train))
    run = Run(config, store)
    for index, parts in enumerate(run.groups):
        if run.finished(parts):
            continue
        name = "" if len(run.groups) == 1 else f" {index + 1}/{len(run.groups)}"
        pool = load_pool(store, parts, train, space=space, device=run.device, values=False)
        check_long_range(config, pool)
        run.start()
        started = run.held(f"kmeans-{parts[0].name}")
        if started is None:
            started = {"centroids": cluster(config, pool, space, name)}
            run.save(f"kmeans-{parts[0].name}", {k: v.cpu().contiguous() for k, v in started.items()})
        centroids = started["centroids"].to(run.device)
        held = load_pool(store, parts, validation, space=space, device=run.device, values=False)
        folded = None
        if config.scores != "mean_key":
            folded, history = train_query_model(config, pool, held, centroids, space, parts, run.out, run.device,
                                                label=name, quiet=run.ranks.rank > 0,
                                                max_seconds=run.seconds_left(index))
            run.log(index, history)
        del pool
        result = {"centroids": centroids, **quality(config, held, centroids, space, folded)}
        if folded is not None:
            result |= {f"query_model.{k}": w for k, w in folded._asdict().items()}
        run.keep(parts, result)
        del held
    made: list[RouterArtifact] = []

    def assemble(tensors: dict[str, Tensor]) -> None:
        card = {k.removeprefix("quality."): v for k, v in tensors.items() if k.startswith("quality.")}
        weights = None
        if config.scores != "mean_key":
            weights = QueryModel(*(tensors[f"query_model.{k}"] for k in QueryModel._fields))
        made.append(RouterArtifact(
            RouterArtifactConfig(
                model=store.model, layers=store.layers, num_buckets=config.num_buckets, key_space=space,
                scores=config.scores, router_scope=config.router_scope, sink_size=store.config["sink_size"],
                window_size=store.config["window_size"], weights_dtype=config.weights_dtype,
                provenance=provenance(store, asdict(config), train, validation), quality=_card(card)),
            tensors["centroids"], weights, run.out))
        made[0].save(run.out)

    run.finish(assemble)
    return made[0] if made else RouterArtifact.load(run.out)


def _check(config: RouterConfig, store: CaptureStore, documents: int) -> str:
    for name, value, allowed in (("key space", config.key_space, ("auto", "pre", "rot")),
                                 ("scores", config.scores, ("mlp", "mean_key", "hybrid")),
                                 ("router scope", config.router_scope, ("kv_head", "query_head")),
                                 ("weights dtype", config.weights_dtype, WEIGHT_DTYPES),
                                 ("k-means engine", config.kmeans_engine, ENGINES), ("init", config.init, INITS)):
        if value not in allowed:
            raise SparseKVError(f"unknown {name} {value!r}: expected one of {', '.join(allowed)}")
    if store.context_length * documents < config.num_buckets:
        raise SparseKVError(f"the capture has fewer keys a head than the {config.num_buckets} buckets asked for; use "
                            "fewer buckets or a larger capture")
    if config.output_rank >= min(config.hidden_size, config.num_buckets):
        raise SparseKVError(f"--output-rank {config.output_rank} does not limit a matrix of {config.hidden_size} "
                            f"hidden units by {config.num_buckets} buckets; use a lower rank, or 0 for none")
    if config.key_space == "auto":
        return "pre" if store.context_length >= LONG_CONTEXT else "rot"
    return config.key_space


def check_long_range(config: RouterConfig, pool: Pool) -> None:
    """Raises SparseKVError where no captured query looks far back."""
    if not bool((pool.positions - pool.best > config.long_range).any()):
        raise SparseKVError(f"no captured query looks further back than {config.long_range} tokens; lower --long-range "
                            "or capture longer contexts")


def cluster(config: RouterConfig, pool: Pool, space: str, name: str = "") -> Tensor:
    """Spherical k-means over the keys of all documents: `[Lk, C, d]` unit centroids."""
    keys = pool.clustered(space)
    with progress(f"k-means{name}", pool.heads_kv, "heads") as advance:
        # a few heads at a time: their keys are gathered from all documents, which copies them
        return torch.cat([
            spherical_kmeans(keys[:, a:a + KMEANS_HEADS].transpose(0, 1).flatten(1, 2), config.num_buckets,
                             iterations=config.kmeans_iterations, seed=config.seed, engine=config.kmeans_engine,
                             init=config.init, advance=advance)
            for a in range(0, pool.heads_kv, KMEANS_HEADS)])


def train_query_model(
    config: RouterConfig, pool: Pool, held: Pool, centroids: Tensor, space: str, parts: list[Part], output: Path,
    device: str, *, label: str = "", quiet: bool = False, max_seconds: float | None = None,
) -> tuple[QueryModel, dict[str, list[float]]]:
    """Targets, then training: the query models `[Lk or Lq, ...]`, batch norm folded in, and the metrics. `held` is the
    pool of the validation windows."""
    hybrid = config.scores == "hybrid"
    with progress(f"targets{label}", pool.documents, "windows") as advance:
        targets = make_targets(pool, centroids, space, mean_key=hybrid, advance=advance)
    watched = []
    if config.validate_every:
        watched = held_out(held, centroids, space, scores=config.scores)
    # from here on the targets stand for the keys
    pool = replace(pool, keys=pool.keys[:, :, :0].clone(), keys_pre=None)
    task = RouterTask(config, pool, targets, space, parts, watched, held)
    history = fit(task, config, output=output, description=f"train router{label}", device=device,
                  name=f"router-{parts[0].name}", max_seconds=max_seconds, quiet=quiet)
    return QueryModel(*(w.detach() for w in task.router.fold())), history


class RouterTask(Task):
    """Bucket KL of one query model a KV head (or query head), all heads in one batch."""

    def __init__(self, config: RouterConfig, pool: Pool, targets: Targets, space: str, parts: list[Part],
                 watched: list[HeldOut], held: Pool):
        super().__init__()
        self.pool, self.watched, self.held, self.space = pool, watched, held, space
        self.seed, self.batch, self.buckets = config.seed, config.batch_size, config.num_buckets
        per_kv = pool.group if config.router_scope == "query_head" else 1
        self.models = pool.heads_kv * per_kv
        seeds = [(config.seed * 997 + part.layer) * 4096 + (part.first + h) * per_kv + g
                 for part in parts for h in range(part.heads) for g in range(per_kv)]
        dim = pool.queries.shape[3]
        self.router = by_head(lambda heads: BucketRouter(heads, dim, config.num_buckets, config.hidden_size,
                                                         config.output_rank), seeds)
        if config.scores == "hybrid":
            torch.nn.init.zeros_(self.router.w2)
        distance = (pool.positions - pool.best).transpose(0, 1).flatten(1)
        far = (distance > config.long_range).sum(1)
        self.order = distance.argsort(1, descending=True)
        self.number = far.clamp(min=distance.shape[1] // 4).float()
        self.asked = pool.asked(space).flatten(0, 2)
        self.mass = targets.mass.flatten(0, 2)
        self.base = None if targets.base is None else targets.base.flatten(0, 2)
        self.head = torch.arange(pool.heads_q, device=pool.queries.device)[:, None]

    def draws(self, first: int, count: int) -> dict[str, Tensor]:
        """Uniform numbers `[count, group, batch]`: which of a head's long-range queries; the same for every KV head."""
        generators = [torch.Generator().manual_seed(self.seed * 104_729 + first + i) for i in range(count)]
        shape = (self.pool.group, self.batch)
        return {"query": torch.stack([torch.rand(shape, generator=g) for g in generators])}

    def losses(self, draw: dict[str, Tensor]) -> dict[str, Tensor]:
        pool = self.pool
        heads_q, per_document = pool.heads_q, pool.queries.shape[2]
        uniform = draw["query"].repeat(pool.heads_kv, 1)
        place = self.order.gather(1, (uniform * self.number[:, None]).long())
        document, token = place // per_document, place % per_document
        row = ((document * heads_q + self.head) * per_document + token).flatten()
        queries = self.asked.index_select(0, row).float().reshape(self.models, -1, self.asked.shape[1])
        target = self.mass.index_select(0, row).float().reshape(heads_q, -1, self.buckets)
        logits = self.router(queries).float().reshape(heads_q, -1, self.buckets)
        if self.base is not None:
            logits = logits + self.base.index_select(0, row).float().reshape(logits.shape)
        return {"loss": bucket_kl(logits, target / target.sum(-1, keepdim=True).clamp(min=1e-6))}

    def validate(self) -> Tensor:
        """1 − the share of the mid mass reached at 5 % of the context, by KV head."""
        weights = self.router.fold()
        found = [recall(h, probability(self.held, h, self.space, weights), self.pool.group, (JUDGED_AT,))[0]
                 for h in self.watched]
        return 1 - torch.stack(found).mean(0).reshape(self.pool.heads_kv, -1).mean(1)


def probability(pool: Pool, held: HeldOut, space: str, weights: QueryModel | None) -> Tensor:
    """What a router expects, `[Lq, T, C]`: the mean-key logits, the query model's, or their sum, after softmax."""
    logits = held.base
    if weights is not None:
        asked = pool.asked(space)[held.document][:, held.some].float()
        trained = router_logits(asked.transpose(0, 1), weights).transpose(0, 1)
        logits = trained if logits is None else logits + trained
    assert logits is not None
    return logits.softmax(-1)


def quality(config: RouterConfig, pool: Pool, centroids: Tensor, space: str, weights: QueryModel | None,
            ) -> dict[str, Tensor]:
    """The card, from held-out windows: per query head the share of the mid mass reached at every budget and an oracle's
    on the same buckets; per KV head the imbalance `C · Σ share²` and the largest bucket's share of the keys."""
    windows = held_out(pool, centroids, space, scores=config.scores)
    sums: dict[str, Tensor] = {}
    for held in windows:
        found = {"imbalance": imbalance(held.counts), "largest_bucket": held.counts.amax(1) / held.counts.sum(1)}
        guesses = {"mass_share": probability(pool, held, space, weights), "oracle_mass_share": held.mass}
        for name, guess in guesses.items():
            found |= {f"{name}@{budget}": share for budget, share in zip(
                BUDGETS, recall(held, guess, pool.group, BUDGETS), strict=True)}
        for name, value in found.items():
            sums[f"quality.{name}"] = sums.get(f"quality.{name}", torch.zeros_like(value)) + value / len(windows)
    return sums


def _card(tables: dict[str, Tensor]) -> dict[str, Any]:
    order = sorted(tables, key=lambda n: ("mass" not in n, "oracle" in n, n))
    card: dict[str, Any] = {name: float(tables[name].mean()) for name in order}
    card["per_head"] = {name: [[round(x, 4) for x in row] for row in tables[name].tolist()] for name in order}
    return card
