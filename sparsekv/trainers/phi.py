"""`sparsekv train-phi`: positive feature maps of every head, in one batched program (completion paper §5)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sparsekv.artifacts.format import prepare_output
from sparsekv.artifacts.phi import PhiArtifact, PhiArtifactConfig
from sparsekv.capture.store import CaptureStore
from sparsekv.config import option
from sparsekv.models.feature_map import FeatureMap, FeatureMapWeights, log_kernel, log_phi
from sparsekv.models.losses import KLHuber
from sparsekv.models.offline import Scene, make_scene, output, relative_error, top_k
from sparsekv.trainers.fit import cosine, fit, write_metrics
from sparsekv.trainers.pool import Pool, layer_groups, load_pool, split_documents

SHIFTS = (-1.5, -1.0, -0.6, -0.3, -0.15, 0.0, 0.15, 0.3)
CASES: dict[str, float | None] = {"sink_tail": None, "topk@0.01": 0.01, "topk@0.05": 0.05}


@dataclass(frozen=True)
class PhiConfig:
    capture: str = option(help="Capture store to train on (folder).")
    output: str = option(help="Folder of the new artifact.")
    num_features: int = option(0, help="Features r of a map; 0 takes the head dimension [features].", min=0)
    width: int = option(128, help="Hidden width of a map [units].", min=8)
    max_steps: int = option(2000, help="Training steps [steps].", min=1)
    batch_size: int = option(64, help="Queries per head and step [queries].", min=1)
    keys_per_step: int = option(512, help="Keys per head and step, drawn from the mid region; 0 takes all [keys].",
                                min=0)
    lr: float = option(3e-3, help="Peak learning rate (Adam, warm-up, cosine to zero).")
    weight_decay: float = option(0.0, help="Decoupled weight decay.")
    temperature: float = option(1.0, help="Temperature T of the KL term.")
    band: float = option(3.0, help="τ: keys within this of the best are matched in absolute scale [nats].")
    far: float = option(6.0, help="τ_far: keys further below than this must stay out of the band [nats].")
    top_weight: float = option(0.1, help="λ of the top band's Huber term.")
    far_weight: float = option(0.1, help="λ of the far region's Huber term.")
    partition_weight: float = option(0.2, help="λ of the Huber term on overestimated mass.")
    under_weight: float = option(0.2, help="λ of the Huber term on underestimated mass (not in the paper; 0 = off).")
    validation_documents: int = option(1, help="Last windows of the capture, kept for calibration [windows].", min=1)
    calibrate: bool = option(True, help="Fit a shift per head on the validation windows, and switch completion off "
                                        "for heads it does not help.")
    layer_group: int = option(0, help="Layers trained at once; 0 takes all [layers].", min=0)
    checkpoint_every: int = option(0, help="Keep a checkpoint every so many steps; 0 keeps none [steps].", min=0)
    device: str = option("auto", help="auto, cpu or cuda.")
    seed: int = option(0, help="Seed of initial weights and batches.")
    overwrite: bool = option(False, help="Replace an existing artifact.")


def train_phi(config: PhiConfig) -> PhiArtifact:
    """Train, calibrate on held-out windows, save. Raises SparseKVError for a bad store, options or output."""
    from sparsekv.hub import resolve_device

    store = CaptureStore.open(config.capture)
    train, validation = split_documents(store, config.validation_documents)
    out = prepare_output(config.output, config.overwrite)
    device = resolve_device(config.device)
    query_maps, key_maps, shifts, gates = [], [], [], []
    errors: dict[str, list[Tensor]] = {}
    history: dict[str, list[float]] = {}
    groups = layer_groups(store.layers, config.layer_group)
    for index, layers in enumerate(groups):
        pool = load_pool(store, layers, train, space="rot", device=device, values=False)
        module = _module(config, store, pool, len(layers))
        name = "train phi" if len(groups) == 1 else f"phi {index + 1}/{len(groups)}"
        history = fit(module, steps=config.max_steps, output=out, description=name, device=device,
                      checkpoint_every=config.checkpoint_every, seed=config.seed)
        del pool
        query_map, key_map = (FeatureMapWeights(*(w.detach().to(device) for w in m.weights()))
                              for m in (module.query_maps, module.key_maps))
        held = load_pool(store, layers, validation, space="rot", device=device)
        shift, gate, found = calibrate(config, store, held, query_map, key_map)
        for case, value in found.items():
            errors.setdefault(case, []).append(value.reshape(len(layers), -1).cpu())
        query_maps.append(_by_layer(query_map, len(layers)))
        key_maps.append(_by_layer(key_map, len(layers)))
        shifts.append(shift.reshape(len(layers), -1).cpu())
        gates.append(gate.reshape(len(layers), -1).cpu())
    write_metrics(out / "metrics.csv", history)
    per_head = {case: torch.cat(parts) for case, parts in errors.items()}
    quality: dict[str, Any] = {case: float(v.mean()) for case, v in per_head.items()}
    quality["per_head"] = {case: [[round(x, 4) for x in row] for row in v.tolist()] for case, v in per_head.items()}
    artifact = PhiArtifact(
        PhiArtifactConfig(
            model=store.model, layers=store.layers, num_features=query_maps[0].b_out.shape[-1], width=config.width,
            sink_size=store.config["sink_size"], window_size=store.config["window_size"],
            provenance=provenance(store, asdict(config), train, validation), quality=quality),
        _stack(query_maps), _stack(key_maps), torch.cat(shifts), torch.cat(gates), out)
    artifact.save(out)
    return artifact


def provenance(store: CaptureStore, options: dict[str, Any], train: list[int], validation: list[int]) -> dict[str, Any]:
    """Where an artifact comes from: corpus, options, code version and the hashes of the windows it was made with."""
    from sparsekv import __version__

    return {"sparsekv": __version__, "corpus": store.config["corpus"], "split": store.config["split"],
            "context_length": store.context_length, "options": options,
            "train_documents": [store.documents[i]["sha256"] for i in train],
            "validation_documents": [store.documents[i]["sha256"] for i in validation]}


def _by_layer(weights: FeatureMapWeights, layers: int) -> FeatureMapWeights:
    return FeatureMapWeights(*(w.reshape(layers, -1, *w.shape[1:]).cpu() for w in weights))


def _stack(parts: list[FeatureMapWeights]) -> FeatureMapWeights:
    return FeatureMapWeights(*(torch.cat(ws) for ws in zip(*parts, strict=True)))


def _module(config: PhiConfig, store: CaptureStore, pool: Pool, layers: int) -> Any:
    import lightning

    torch.manual_seed(config.seed)
    features = config.num_features or store.head_dim
    sink, window = store.config["sink_size"], store.config["window_size"]
    heads_q, heads_kv = layers * store.num_query_heads, layers * store.num_kv_heads
    length = pool.keys.shape[2]

    class PhiModule(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.query_maps = FeatureMap(heads_q, store.head_dim, features, config.width)
            self.key_maps = FeatureMap(heads_kv, store.head_dim, features, config.width)
            self.query_maps.whiten(pool.queries[0].float().cpu())
            self.key_maps.whiten(pool.keys[0].float().cpu())
            self.loss = KLHuber(config.temperature, config.band, config.far, 1.0, config.top_weight, config.far_weight,
                                config.partition_weight, config.under_weight)

        def training_step(self, step: Any) -> Tensor:
            queries, keys, teacher, mask = self.batch(int(self.global_step))
            log_q, log_k = self.query_maps(queries), self.key_maps(keys)
            batch = queries.shape[1]
            grouped = log_q.reshape(heads_kv, -1, features)
            student = log_kernel(grouped, log_k).reshape(heads_q, batch, -1)
            terms = self.loss(teacher, student, mask)
            self.log_dict({k: v.mean() for k, v in terms.items()}, logger=False)
            return terms["loss"].sum() / 100

        def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            generator = torch.Generator().manual_seed(config.seed * 7_919 + step)
            document = int(torch.randint(pool.documents, (1,), generator=generator))
            chosen = torch.randint(pool.queries.shape[2], (config.batch_size,), generator=generator)
            count = length - sink - window
            size = min(config.keys_per_step or count, count)
            columns = torch.randperm(count, generator=generator)[:size] + sink
            chosen, columns = chosen.to(pool.keys.device), columns.to(pool.keys.device)
            queries = pool.queries[document].index_select(1, chosen).float()
            keys = pool.keys[document].index_select(1, columns).float()
            positions = pool.positions[document].index_select(1, chosen)
            teacher = (queries.reshape(heads_kv, -1, queries.shape[-1]) @ keys.mT) * pool.scale
            mask = columns <= positions[..., None] - window
            return queries, keys, teacher.reshape(heads_q, len(chosen), -1), mask

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=config.lr, weight_decay=config.weight_decay,
                                          betas=(0.9, 0.99), fused=True)
            return {"optimizer": optimizer, "lr_scheduler": cosine(optimizer, config.max_steps)}

    return PhiModule()


def calibrate(
    config: PhiConfig, store: CaptureStore, pool: Pool, query_map: FeatureMapWeights, key_map: FeatureMapWeights,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Shift and gate of every head from held-out windows: the shift with the least mean output error over sink + tail,
    top-k at 1 % and at 5 %; gate 0 where even that is worse than no completion. Returns `[Lq]` each and the errors."""
    heads_kv = store.num_kv_heads
    layers = pool.keys.shape[1] // heads_kv
    plain: dict[str, list[Tensor]] = {case: [] for case in CASES}
    completed: dict[str, list[Tensor]] = {case: [] for case in CASES}
    shifts = torch.tensor(SHIFTS if config.calibrate else (0.0,))
    for layer in range(layers):
        kv = slice(layer * heads_kv, (layer + 1) * heads_kv)
        q = slice(kv.start * pool.group, kv.stop * pool.group)
        maps = (FeatureMapWeights(*(w[q] for w in query_map)), FeatureMapWeights(*(w[kv] for w in key_map)))
        none = {case: torch.zeros(heads_kv * pool.group) for case in CASES}
        with_phi = {case: torch.zeros(len(shifts), heads_kv * pool.group) for case in CASES}
        for document in range(pool.documents):
            scene, logits = _held_out_scene(store, pool, document, q, kv, maps)
            for case, fraction in CASES.items():
                read = None if fraction is None else top_k(scene, fraction)
                none[case] += relative_error(scene, output(scene, read)).cpu() / pool.documents
                for i, shift in enumerate(shifts.tolist()):
                    error = relative_error(scene, output(scene, read, logits + shift))
                    with_phi[case][i] += error.cpu() / pool.documents
        for case in CASES:
            plain[case].append(none[case])
            completed[case].append(with_phi[case])
    none_all = {case: torch.cat(v) for case, v in plain.items()}
    phi_all = {case: torch.cat(v, dim=1) for case, v in completed.items()}
    # relative to no completion, so that the large error of sink + tail does not decide alone
    objective = torch.stack([phi_all[c] / none_all[c].clamp(min=1e-6) for c in CASES]).mean(0)
    best = objective.argmin(0)
    gate = torch.ones(best.shape)
    if config.calibrate:
        gate = (objective.gather(0, best[None])[0] < 1.0).float()
    found: dict[str, Tensor] = {}
    for case in CASES:
        found[f"{case} error"] = none_all[case]
        chosen = phi_all[case].gather(0, best[None])[0]
        found[f"{case} + phi error"] = torch.where(gate > 0, chosen, none_all[case])
    return shifts[best], gate, found


def _held_out_scene(
    store: CaptureStore, pool: Pool, document: int, q: slice, kv: slice,
    maps: tuple[FeatureMapWeights, FeatureMapWeights], limit: int = 64,
) -> tuple[Scene, Tensor]:
    count = pool.queries.shape[2]
    some = torch.linspace(count // 3, count - 1, min(limit, count), device=pool.keys.device).long()
    queries, keys = pool.queries[document, q][:, some].float(), pool.keys[document, kv].float()
    scene = make_scene(queries, keys, pool.values[document, kv].float(), pool.positions[document, q][:, some],
                       scale=pool.scale, sink_size=store.config["sink_size"], window_size=store.config["window_size"])
    log_q, log_k = log_phi(queries, maps[0]), log_phi(keys, maps[1])
    logits = log_kernel(log_q.reshape(keys.shape[0], -1, log_q.shape[-1]), log_k)
    return scene, logits.reshape(scene.scores.shape)
