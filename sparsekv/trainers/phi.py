"""`sparsekv train-phi`: positive feature maps of every head, in one batched program (completion paper §5)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsekv.artifacts.phi import PhiArtifact, PhiArtifactConfig
from sparsekv.config import option
from sparsekv.core.offline import mass_errors
from sparsekv.errors import SparseKVError
from sparsekv.kernels import add_centre
from sparsekv.models.feature_map import CentredMap, FeatureMap, Maps, log_kernel
from sparsekv.models.losses import KLHuber, OutputError
from sparsekv.store.store import CaptureStore
from sparsekv.trainers.anchors import anchor_attention
from sparsekv.trainers.calibrate import CASES, SHIFTS, by_case, calibrate, choose_gates, pick_scene
from sparsekv.trainers.fit import Task, by_head, fit
from sparsekv.trainers.options import TrainingOptions
from sparsekv.trainers.pool import Part, Pool, load_pool, provenance, split_documents
from sparsekv.trainers.work import Run

WATCHED_DOCUMENTS, WATCHED_QUERIES = 2, 16
SHORTEST_WINDOW = 1 / 16
OPTIMIZERS = ("muon", "adam")
CENTRES = (0.5, 0.625, 0.75, 0.875, 1.0)
"""Shares of a window whose mean key a centred half is trained with: at run time it is taken anew when the mid region
has doubled."""


@dataclass(frozen=True)
class PhiConfig(TrainingOptions):
    num_features: int = option(0, help="Features r of a map; 0 takes the head dimension [features].", min=0)
    width: int = option(128, help="Hidden width of a map [units].", min=8)
    centred: bool = option(True, help="Half of the features see keys without the request's mean key, whose score is "
                                      "added exactly (not in the paper).")
    keys_per_step: int = option(512, help="Keys per head and step, spread over the mid region; 0 takes all [keys].",
                                min=0)
    documents_per_step: int = option(1, help="Windows that a step's queries and keys come from [windows].", min=1)
    random_windows: float = option(0.0, help="Share of the steps whose keys come from a part of the mid region of "
                                             "random place and length.", min=0.0, max=1.0)
    position_shift: int = option(0, help="Move all positions of a step by a random number of at most this, queries "
                                         "and keys alike: attention stays, what the maps see does not; 0 = off "
                                         "[tokens].", min=0)
    optimizer: str = option("muon", help="muon: orthogonalised steps for matrices, Adam's for the rest (not in the "
                                         "paper); adam: for all.")
    lr: float = option(3e-3, help="Peak learning rate (warm-up, cosine to zero).")
    weight_decay: float = option(0.0, help="Decoupled weight decay.")
    ema: float = option(0.0, help="Average the weights with this decay a step and keep the average; 0 keeps the last "
                                  "weights.", min=0.0, max=0.99999)
    temperature: float = option(1.0, help="Temperature T of the KL term.")
    band: float = option(3.0, help="τ: keys within this of the best are matched in absolute scale [nats].")
    far: float = option(6.0, help="τ_far: keys further below than this must stay out of the band [nats].")
    top_weight: float = option(0.1, help="λ of the top band's Huber term.")
    far_weight: float = option(0.1, help="λ of the far region's Huber term.")
    partition_weight: float = option(0.2, help="λ of the Huber term on overestimated mass.")
    under_weight: float = option(0.2, help="λ of the Huber term on underestimated mass (not in the paper; 0 = off).")
    output_weight: float = option(0.0, help="λ of the output's own relative error, with sink and tail exact and with "
                                            "the best 2 % of the keys exact too (not in the paper; 0 = off).", min=0.0)
    calibrate: bool = option(True, help="Fit per head on the validation windows, for every share of the context that "
                                        "is read, a shift of the mass; and switch completion off for heads it "
                                        "does not help.")


def train_phi(config: PhiConfig) -> PhiArtifact:
    """Train, calibrate on held-out windows, save. Raises SparseKVError for a bad store, options or output."""
    config.check()
    if config.optimizer not in OPTIMIZERS:
        raise SparseKVError(f"unknown optimizer {config.optimizer!r}: expected one of {', '.join(OPTIMIZERS)}")
    store = CaptureStore.open(config.capture)
    train, validation = split_documents(store, config.validation_documents)
    if store.context_length <= store.config["sink_size"] + store.config["window_size"]:
        raise SparseKVError(f"windows of {store.context_length} tokens have nothing between a sink of "
                            f"{store.config['sink_size']} and a tail of {store.config['window_size']}; capture longer "
                            "contexts")
    if config.documents_per_step > config.batch_size:
        raise SparseKVError(f"--documents-per-step {config.documents_per_step} is more than the {config.batch_size} "
                            "queries of a step")
    run = Run(config, store)
    for index, parts in enumerate(run.groups):
        if run.finished(parts):
            continue
        pool = load_pool(store, parts, train, device=run.device, values=config.output_weight > 0)
        held = load_pool(store, parts, validation, device=run.device)
        run.start()
        maps, history = train_maps(
            config, pool, held, parts, run.out, run.device,
            label="train phi" if len(run.groups) == 1 else f"phi {index + 1}/{len(run.groups)}",
            quiet=run.ranks.rank > 0, max_seconds=run.seconds_left(index))
        run.log(index, history)
        del pool
        card = calibrate(held, maps, shift=config.calibrate)
        run.keep(parts, maps.named() | {f"card.{k}": v for k, v in card.items()})
        del held
    made: list[PhiArtifact] = []

    def assemble(tensors: dict[str, Tensor]) -> None:
        card = {k.removeprefix("card."): v for k, v in tensors.items() if k.startswith("card.")}
        shift, errors = (by_case(card, what) for what in ("shift", "table"))
        card = {k: v for k, v in card.items() if not k.endswith(" table")}
        gate = choose_gates(card) if config.calibrate else torch.ones_like(shift[:, 0])
        for case in CASES:
            card[f"{case} + phi error"] = torch.where(gate > 0, card[f"{case} + phi error"], card[f"{case} error"])
        maps = Maps.from_named(tensors)
        quality: dict[str, Any] = {name: float(v.mean()) for name, v in card.items()}
        quality["per_head"] = {name: [[round(x, 4) for x in row] for row in v.tolist()]
                               for name, v in {**card, "gate": gate}.items()}
        made.append(PhiArtifact(
            PhiArtifactConfig(
                model=store.model, layers=store.layers, num_features=maps.query.b_out.shape[-1], width=config.width,
                centred=config.centred, read_shares=[share or 0.0 for share in CASES.values()],
                sink_size=store.config["sink_size"], window_size=store.config["window_size"],
                shift_grid=list(SHIFTS) if config.calibrate else [], capped=True,
                provenance=provenance(store, asdict(config), train, validation), quality=quality),
            maps, shift, gate, run.out, errors.mT if config.calibrate else None))
        made[0].save(run.out)

    run.finish(assemble)
    return made[0] if made else PhiArtifact.load(run.out)


def train_maps(
    config: PhiConfig, pool: Pool, held: Pool, parts: list[Part], output: Path, device: str, *,
    label: str = "train phi", quiet: bool = False, max_seconds: float | None = None,
) -> tuple[Maps, dict[str, list[float]]]:
    """The maps of all query heads `[Lq, ...]` and KV heads `[Lk, ...]`, and the metrics. `held` is the pool of the
    validation windows, with values."""
    task = PhiTask(config, pool, held, parts)
    history = fit(task, config, output=output, description=label, device=device, name=f"phi-{parts[0].name}",
                  max_seconds=max_seconds, quiet=quiet)
    return task.maps().map(Tensor.detach), history


class PhiTask(Task):
    """The KL and Huber loss of every head's pair of maps, all heads in one batch, queries and keys the same places in
    every head."""

    betas = (0.9, 0.99)

    def __init__(self, config: PhiConfig, pool: Pool, held: Pool, parts: list[Part]):
        super().__init__()
        self.config, self.pool, self.held = config, pool, held
        self.ema, self.weight_decay, self.muon = config.ema, config.weight_decay, config.optimizer == "muon"
        dim = pool.keys.shape[3]
        features = config.num_features or dim
        seeds = [(config.seed * 997 + part.layer) * 4096 + part.first + h for part in parts for h in range(part.heads)]
        self.query_maps = by_head(lambda heads: FeatureMap(heads, dim, features, config.width),
                                  [s * 64 + 1 + g for s in seeds for g in range(pool.group)])
        kind = CentredMap if config.centred else FeatureMap
        self.key_maps = by_head(lambda heads: kind(heads, dim, features, config.width), [s * 64 for s in seeds])
        self.query_maps.whiten(pool.queries[0].float().cpu())
        self.key_maps.whiten(pool.keys[0].float().cpu())
        self.loss = KLHuber(config.temperature, config.band, config.far, 1.0, config.top_weight, config.far_weight,
                            config.partition_weight, config.under_weight)
        self.output = OutputError()
        self.mid = pool.keys.shape[2] - pool.sink_size - pool.window_size
        device = pool.keys.device
        if config.centred:
            keys, sink = pool.keys, pool.sink_size
            ends = [sink + max(1, round(share * self.mid)) for share in CENTRES]
            # window by window: a mean in float32 holds its input in float32
            self.centres = torch.stack([torch.stack([one[:, sink:end].mean(1, dtype=torch.float32) for one in keys])
                                        for end in ends])
        self.flat = {"queries": pool.queries.flatten(0, 2), "keys": pool.keys.flatten(0, 2),
                     "positions": pool.positions.flatten()}
        if config.output_weight:
            out, lse = anchor_attention(pool)
            self.flat |= {"values": pool.values.flatten(0, 2), "anchor_out": out.flatten(0, 2),
                          "anchor_lse": lse.flatten()}
        self.heads = {n: torch.arange(n, device=device)[None, :, None] for n in (pool.heads_q, pool.heads_kv)}

    def maps(self) -> Maps:
        """The weights as they are."""
        keys = self.key_maps
        if isinstance(keys, CentredMap):
            return Maps(self.query_maps.weights(), keys.plain.weights(), keys.centred.weights())
        return Maps(self.query_maps.weights(), keys.weights())

    def draws(self, first: int, count: int) -> dict[str, Tensor]:
        """Windows `[count, D]`, queries `[count, D, B/D]` and keys `[count, D, K/D]` by place."""
        rows = [self._draw(first + i) for i in range(count)]
        return {name: torch.stack([r[name] for r in rows]) for name in rows[0]}

    def _draw(self, step: int) -> dict[str, Tensor]:
        o, pool = self.config, self.pool
        generator = torch.Generator().manual_seed(o.seed * 7_919 + step)
        documents = min(o.documents_per_step, pool.documents)
        queries = torch.randint(pool.queries.shape[2], (documents, o.batch_size // documents), generator=generator)
        start, span = 0.0, float(self.mid)
        choice, length, place = torch.rand(3, generator=generator).tolist()
        if choice < o.random_windows:
            span *= SHORTEST_WINDOW ** length
            start = place * (self.mid - span)
        # one key in each of as many equal stretches: spread evenly, none twice
        number = max(1, min(o.keys_per_step or self.mid, self.mid) // documents)
        at = torch.arange(number) + torch.rand((documents, number), generator=generator, dtype=torch.float64)
        columns = (start + at * (span / number)).long().clamp(max=self.mid - 1)
        found = {"document": torch.randperm(pool.documents, generator=generator)[:documents], "query": queries,
                 "key": columns + pool.sink_size, "log_count": torch.tensor([span / number]).log()}
        if o.centred:
            found["centre"] = torch.randint(len(CENTRES), (documents,), generator=generator)
        if o.position_shift:
            found["shift"] = (o.position_shift * (2 * torch.rand(documents, generator=generator) - 1)).round()
        return found

    def losses(self, draw: dict[str, Tensor]) -> dict[str, Tensor]:
        pool, documents = self.pool, draw["document"].shape[0]
        queries, keys = self._rows("queries", draw["query"], draw), self._rows("keys", draw["key"], draw)
        centre = None
        if "centre" in draw:
            centre = self.centres[draw["centre"], draw["document"]].transpose(0, 1)[:, :, None]  # [Lk, D, 1, d]
        if "shift" in draw:
            queries, keys = pool.moved(queries, draw["shift"]), pool.moved(keys, draw["shift"])
            centre = None if centre is None else pool.moved(centre, draw["shift"])
        group, count = pool.group, draw["query"].shape[1]
        shape = (pool.heads_kv, group, documents, count)
        log_q = self.query_maps(queries.flatten(1, 2))
        # the queries of a group side by side: [Lk, D, group * count, r or d]
        grouped, asked = (x.reshape(*shape, -1).transpose(1, 2).flatten(2, 3) for x in (log_q, queries))
        if centre is None:
            log_k = self.key_maps(keys.flatten(1, 2)).reshape(pool.heads_kv, documents, keys.shape[2], -1)
        else:
            log_k = self.key_maps(keys, centre)
            grouped = add_centre(grouped, asked, pool.scale * centre[:, :, 0])
        student = log_kernel(grouped, log_k).float()
        with torch.autocast(queries.device.type, enabled=False):
            teacher = (asked @ keys.mT) * pool.scale
        positions = self._rows("positions", draw["query"], draw).reshape(shape).transpose(1, 2).flatten(2, 3)
        mask = draw["key"][None, :, None] <= positions[..., None] - pool.window_size
        rows = (-1, count, keys.shape[2])
        teacher, student, mask = teacher.reshape(rows), student.reshape(rows), mask.reshape(rows)
        terms = self.loss(teacher, student, mask)
        if self.config.output_weight:
            out, lse = (self._rows(name, draw["query"], draw) for name in ("anchor_out", "anchor_lse"))
            out, lse = (x.reshape(*shape, *x.shape[3:]).transpose(1, 2).flatten(0, 2) for x in (out, lse))
            values = self._rows("values", draw["key"], draw).flatten(0, 1)
            with torch.autocast(queries.device.type, enabled=False):
                terms["output"] = self.output(teacher, student, mask, values, out, lse, draw["log_count"])
            terms["loss"] = terms["loss"] + self.config.output_weight * terms["output"]
        return {name: value.reshape(pool.heads_kv, documents, group).mean(1) for name, value in terms.items()}

    def _rows(self, name: str, places: Tensor, draw: dict[str, Tensor]) -> Tensor:
        """Rows of a flattened pool tensor, `[D, n]` places -> `[L, D, n, ...]`, floats as float32."""
        of_keys = name in ("keys", "values")
        heads = self.pool.heads_kv if of_keys else self.pool.heads_q
        length = self.pool.keys.shape[2] if of_keys else self.pool.queries.shape[2]
        index = (draw["document"][:, None, None] * heads + self.heads[heads]) * length + places[:, None]
        index = index.transpose(0, 1)
        found = self.flat[name].index_select(0, index.flatten())
        found = found.reshape(*index.shape, *found.shape[1:])
        return found.float() if found.is_floating_point() else found

    def validate(self) -> Tensor:
        """Output error with sink and tail alone, completed, by KV head."""
        found = []
        zero = torch.zeros(1, device=self.held.keys.device)
        for document in range(min(WATCHED_DOCUMENTS, self.held.documents)):
            scene, queries, keys = pick_scene(self.held, document, slice(0, self.held.heads_kv), WATCHED_QUERIES)
            logits = self.maps().surrogate(queries, keys, scene.context, scale=self.held.scale,
                                           sink_size=self.held.sink_size)
            found.append(mass_errors(scene, logits, None, zero)[1][0])
        return torch.stack(found).mean(0).reshape(self.held.heads_kv, -1).mean(1)
