"""`sparsekv train-router`: buckets of keys, and the query model that predicts where attention falls (Saap §4)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsekv.artifacts.format import prepare_output
from sparsekv.artifacts.router import RouterArtifact, RouterArtifactConfig
from sparsekv.capture.store import CaptureStore
from sparsekv.config import option
from sparsekv.errors import SparseKVError
from sparsekv.kernels.reference import RouterWeights
from sparsekv.models.losses import bucket_kl
from sparsekv.models.offline import bucket_mass, make_scene, mass_share, top_buckets
from sparsekv.models.router import BucketRouter
from sparsekv.progress import progress
from sparsekv.trainers.fit import cosine, fit, write_metrics
from sparsekv.trainers.kmeans import imbalance, spherical_kmeans
from sparsekv.trainers.phi import provenance
from sparsekv.trainers.pool import Pool, layer_groups, load_pool, split_documents

LONG_CONTEXT = 65_536
RECALL_AT = 0.05
KMEANS_HEADS = 8


@dataclass(frozen=True)
class RouterConfig:
    capture: str = option(help="Capture store to train on (folder).")
    output: str = option(help="Folder of the new artifact.")
    num_buckets: int = option(1024, help="Buckets C per KV head [buckets].", min=2)
    key_space: str = option("auto", help="Keys that are clustered: pre (RoPE removed, as the paper), rot (with RoPE), "
                                         "or auto: pre from 65536 tokens of context on, rot below.")
    scores: str = option("mlp", help="How a query scores buckets: mlp (the paper's query model), mean_key (untrained, "
                                     "from each request's own bucket means) or hybrid (mean_key plus a trained one).")
    router_scope: str = option("kv_head", help="One query model per kv_head (shared by its group) or per query_head.")
    hidden_size: int = option(1024, help="Hidden width of the query model [units].", min=8)
    max_steps: int = option(2000, help="Training steps [steps].", min=1)
    batch_size: int = option(256, help="Queries per query head and step [queries].", min=2)
    lr: float = option(2e-3, help="Peak learning rate (Adam, warm-up, cosine to zero).")
    long_range: int = option(1024, help="Train on queries whose best key is further away than this; where a head has "
                                        "too few, its furthest-looking ones [tokens].", min=0)
    kmeans_iterations: int = option(10, help="Iterations of spherical k-means [iterations].", min=1)
    kmeans_engine: str = option("auto", help="auto, faiss or torch.")
    validation_documents: int = option(1, help="Last windows of the capture, kept for validation [windows].", min=1)
    layer_group: int = option(0, help="Layers trained at once; 0 takes all [layers].", min=0)
    checkpoint_every: int = option(0, help="Keep a checkpoint every so many steps; 0 keeps none [steps].", min=0)
    device: str = option("auto", help="auto, cpu or cuda.")
    seed: int = option(0, help="Seed of k-means, initial weights and batches.")
    overwrite: bool = option(False, help="Replace an existing artifact.")


def train_router(config: RouterConfig) -> RouterArtifact:
    """k-means, targets, training, quality card, save. Raises SparseKVError for a bad store, options or output."""
    from sparsekv.hub import resolve_device

    store = CaptureStore.open(config.capture)
    train, validation = split_documents(store, config.validation_documents)
    space = _check(config, store)
    out = prepare_output(config.output, config.overwrite)
    device = resolve_device(config.device)
    centroids, weights, quality = [], [], []
    history: dict[str, list[float]] = {}
    groups = layer_groups(store.layers, config.layer_group)
    for index, layers in enumerate(groups):
        name = "" if len(groups) == 1 else f" {index + 1}/{len(groups)}"
        pool = load_pool(store, layers, train, space=space, device=device, values=False)
        heads = pool.keys.shape[1]
        with progress(f"k-means{name}", heads, "heads") as advance:
            # a few heads at a time: their keys are gathered from all documents, which copies them
            found = torch.cat([
                spherical_kmeans(pool.keys[:, a:a + KMEANS_HEADS].transpose(0, 1).flatten(1, 2), config.num_buckets,
                                 iterations=config.kmeans_iterations, seed=config.seed, engine=config.kmeans_engine,
                                 advance=advance)
                for a in range(0, heads, KMEANS_HEADS)])
        folded = None
        if config.scores != "mean_key":
            targets, base = _targets(config, store, pool, layers, train, space, found, name)
            pool = replace(pool, keys=pool.keys[:, :, :0].clone())  # from here on the targets stand for the keys
            folded, history = _train_query_model(config, store, pool, targets, base, out, device, name)
            del targets, base
        held = load_pool(store, layers, validation, space=space, device=device)
        del pool
        quality.append(_quality(config, store, held, layers, validation, space, found, folded))
        centroids.append(found.reshape(len(layers), -1, *found.shape[1:]).cpu())
        if folded is not None:
            weights.append(RouterWeights(*(w.reshape(len(layers), -1, *w.shape[1:]).cpu() for w in folded)))
    write_metrics(out / "metrics.csv", history)
    artifact = RouterArtifact(
        RouterArtifactConfig(
            model=store.model, layers=store.layers, num_buckets=config.num_buckets, key_space=space,
            scores=config.scores, router_scope=config.router_scope, sink_size=store.config["sink_size"],
            window_size=store.config["window_size"],
            provenance=provenance(store, asdict(config), train, validation), quality=_card(quality)),
        torch.cat(centroids),
        RouterWeights(*(torch.cat(ws) for ws in zip(*weights, strict=True))) if weights else None, out)
    artifact.save(out)
    return artifact


def _check(config: RouterConfig, store: CaptureStore) -> str:
    for name, value, allowed in (("key space", config.key_space, ("auto", "pre", "rot")),
                                 ("scores", config.scores, ("mlp", "mean_key", "hybrid")),
                                 ("router scope", config.router_scope, ("kv_head", "query_head"))):
        if value not in allowed:
            raise SparseKVError(f"unknown {name} {value!r}: expected one of {', '.join(allowed)}")
    if store.context_length * (store.num_documents - config.validation_documents) < config.num_buckets:
        raise SparseKVError(f"the capture has fewer keys a head than the {config.num_buckets} buckets asked for; use "
                            "fewer buckets or a larger capture")
    if config.key_space == "auto":
        return "pre" if store.context_length >= LONG_CONTEXT else "rot"
    return config.key_space


def _train_query_model(
    config: RouterConfig, store: CaptureStore, pool: Pool, targets: Tensor, base: Tensor | None, out: Any, device: str,
    name: str,
) -> tuple[RouterWeights, dict[str, list[float]]]:
    import lightning

    chosen = _long_range(config, pool)
    group = 1 if config.router_scope == "query_head" else pool.group
    torch.manual_seed(config.seed)
    heads_q = pool.queries.shape[1]

    class RouterModule(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.router = BucketRouter(heads_q // group, store.head_dim, config.num_buckets, config.hidden_size)
            if config.scores == "hybrid":
                torch.nn.init.zeros_(self.router.w2)

        def training_step(self, step: Any) -> Tensor:
            generator = torch.Generator().manual_seed(config.seed * 104_729 + int(self.global_step))
            draw = torch.randint(chosen.shape[1], (heads_q, config.batch_size), generator=generator).to(chosen.device)
            index = chosen.gather(1, draw)
            document, place = index // pool.queries.shape[2], index % pool.queries.shape[2]
            head = torch.arange(heads_q, device=index.device)[:, None]
            queries = pool.queries[document, head, place].float()
            target = targets[document, head, place].float()
            logits = self.router(queries.reshape(heads_q // group, -1, queries.shape[-1]))
            logits = logits.reshape(heads_q, -1, config.num_buckets)
            if base is not None:
                logits = logits + base[document, head, place].float()
            loss = bucket_kl(logits, target / target.sum(-1, keepdim=True).clamp(min=1e-6))
            self.log("loss", loss.mean(), logger=False)
            return loss.sum() / 100

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=config.lr, fused=True)
            return {"optimizer": optimizer, "lr_scheduler": cosine(optimizer, config.max_steps)}

    module = RouterModule()
    history = fit(module, steps=config.max_steps, output=out, description=f"train router{name}", device=device,
                  checkpoint_every=config.checkpoint_every, seed=config.seed)
    folded = RouterWeights(*(w.to(device) for w in module.router.fold()))
    return folded, history


def _targets(
    config: RouterConfig, store: CaptureStore, pool: Pool, layers: list[int], documents: list[int], space: str,
    centroids: Tensor, name: str,
) -> tuple[Tensor, Tensor | None]:
    """Attention mass per bucket of every captured query, `[D, Lq, T, C]` float16, once per k-means; for `hybrid` also
    the mean-key logits of the same shape."""
    shape = (*pool.queries.shape[:3], config.num_buckets)
    targets = torch.empty(shape, dtype=torch.float16, device=pool.queries.device)
    base = torch.empty_like(targets) if config.scores == "hybrid" else None
    heads_kv = store.num_kv_heads
    heads_q = heads_kv * pool.group
    with progress(f"targets{name}", len(documents) * len(layers), "layers") as advance:
        for row, document in enumerate(documents):
            for i, layer in enumerate(layers):
                q, kv = slice(i * heads_q, (i + 1) * heads_q), slice(i * heads_kv, (i + 1) * heads_kv)
                scene, bucket, means, counts = _scene(store, pool, row, document, layer, q, kv, centroids[kv], space)
                targets[row, q] = bucket_mass(scene, bucket, config.num_buckets).to(torch.float16)
                if base is not None:
                    base[row, q] = _mean_key(scene, means, counts, pool, store, document, layer).to(torch.float16)
                advance()
    return targets, base


def _scene(
    store: CaptureStore, pool: Pool, row: int, document: int, layer: int, q: slice, kv: slice, centroids: Tensor,
    space: str, limit: int | None = None,
) -> Any:
    """The layer's attention, the bucket of every key, and the buckets' mean rotated keys and sizes."""
    device = pool.keys.device
    item = store.read(layer, document)
    keys_rot, queries_rot = item.keys_rot().to(device), item.queries_rot().to(device)
    positions = item.query_positions.to(device)
    if limit is not None and limit < positions.shape[1]:
        some = torch.linspace(positions.shape[1] // 3, positions.shape[1] - 1, limit, device=device).long()
        queries_rot, positions = queries_rot[:, some], positions[:, some]
    scene = make_scene(queries_rot, keys_rot, item.values.to(device).float(), positions, scale=item.scale,
                       sink_size=store.config["sink_size"], window_size=store.config["window_size"])
    bucket = (pool.keys[row, kv].float() @ centroids.mT).argmax(-1)
    member = torch.nn.functional.one_hot(bucket, centroids.shape[1]).float()
    counts = member.sum(1)
    means = (member.mT @ keys_rot) / counts.clamp(min=1)[..., None]
    return scene, bucket, means, (counts, queries_rot)


def _mean_key(scene: Any, means: Tensor, counts: Any, pool: Pool, store: CaptureStore, document: int, layer: int,
              ) -> Tensor:
    sizes, queries_rot = counts
    heads_q, count, dim = queries_rot.shape
    logits = (queries_rot.reshape(means.shape[0], -1, dim) @ means.mT).reshape(heads_q, count, -1) * pool.scale
    return logits + sizes.clamp(min=1e-3).log().repeat_interleave(pool.group, 0)[:, None]


def _long_range(config: RouterConfig, pool: Pool) -> Tensor:
    """Indices into `D·T` of the queries to train on, `[Lq, n]`: those that look far, the furthest where too few do."""
    distance = (pool.positions - pool.best).transpose(0, 1).flatten(1)
    far = (distance > config.long_range).sum(1)
    if int(far.max()) == 0:
        raise SparseKVError(f"no captured query looks further back than {config.long_range} tokens; lower --long-range "
                            "or capture longer contexts")
    wanted = max(int(far.float().median()), distance.shape[1] // 4)
    return distance.argsort(1, descending=True)[:, :wanted]


def _quality(
    config: RouterConfig, store: CaptureStore, pool: Pool, layers: list[int], documents: list[int], space: str,
    centroids: Tensor, weights: RouterWeights | None,
) -> dict[str, Tensor]:
    """Share of the mid mass reached at 5 % of the context on held-out windows, the oracle's, and the buckets' balance:
    `[L, H]` each."""
    heads_kv = store.num_kv_heads
    heads_q = heads_kv * pool.group
    rows: dict[str, list[Tensor]] = {"mass_share": [], "oracle_mass_share": [], "imbalance": []}
    for i, layer in enumerate(layers):
        q, kv = slice(i * heads_q, (i + 1) * heads_q), slice(i * heads_kv, (i + 1) * heads_kv)
        sums = {name: torch.zeros(heads_q if "share" in name else heads_kv) for name in rows}
        for row, document in enumerate(documents):
            scene, bucket, means, extra = _scene(store, pool, row, document, layer, q, kv, centroids[kv], space, 64)
            mass = bucket_mass(scene, bucket, config.num_buckets)
            sizes = extra[0].clamp(min=1)[:, None]
            oracle = mass.reshape(heads_kv, pool.group, *mass.shape[1:]).sum(1)
            logits = None
            if config.scores != "mlp":
                logits = _mean_key(scene, means, extra, pool, store, document, layer)
            if weights is not None:
                residual = _query_model_logits(config, store, pool, row, q, weights, mass.shape[1], i)
                logits = residual if logits is None else logits + residual
            assert logits is not None
            guess = logits.softmax(-1).reshape(heads_kv, pool.group, *mass.shape[1:]).sum(1)
            for name, score in (("mass_share", guess / sizes), ("oracle_mass_share", oracle / sizes)):
                sums[name] += mass_share(scene, top_buckets(scene, bucket, score, RECALL_AT)).cpu() / len(documents)
            sums["imbalance"] += imbalance(extra[0]).cpu() / len(documents)
        for name, value in sums.items():
            rows[name].append(value)
    return {name: torch.stack(values) for name, values in rows.items()}


def _query_model_logits(
    config: RouterConfig, store: CaptureStore, pool: Pool, row: int, q: slice, weights: RouterWeights, count: int,
    layer: int,
) -> Tensor:
    from sparsekv.kernels.reference import router_logits

    queries = pool.queries[row, q].float()
    total = queries.shape[1]
    some = torch.linspace(total // 3, total - 1, count, device=queries.device).long() if count < total else slice(None)
    per_layer = weights.w1.shape[0] // (pool.queries.shape[1] // (q.stop - q.start))
    part = RouterWeights(*(w[layer * per_layer:(layer + 1) * per_layer] for w in weights))
    return router_logits(queries[:, some].transpose(0, 1), part).transpose(0, 1)


def _card(parts: list[dict[str, Tensor]]) -> dict[str, Any]:
    whole = {name: torch.cat([p[name] for p in parts]) for name in parts[0]}
    card: dict[str, Any] = {f"{name}@{RECALL_AT}" if "share" in name else name: float(v.mean())
                            for name, v in whole.items()}
    card["per_head"] = {name: [[round(x, 4) for x in r] for r in v.tolist()] for name, v in whole.items()}
    return card
