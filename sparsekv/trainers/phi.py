"""`sparsekv train-phi`: positive feature maps of every head, in one batched program (completion paper §5)."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sparsekv.artifacts.hub.modelcard import write_card
from sparsekv.artifacts.phi import PhiArtifact, PhiArtifactConfig, PhiLayer
from sparsekv.capture.store.store import CaptureStore
from sparsekv.core.baselines.streaming import Streaming
from sparsekv.core.estimators.phi import PhiEstimator
from sparsekv.core.step import two_parts
from sparsekv.kernels import add_centre
from sparsekv.models.feature_map import CentredMap, FeatureMap, FeatureMaps, log_kernel
from sparsekv.models.losses import KLHuber, OutputError
from sparsekv.trainers.anchors import anchor_attention
from sparsekv.trainers.calibrate import (
    CASES,
    SHIFTS,
    by_case,
    calibrate,
    choose_gates,
    shifted_errors,
    watched_requests,
)
from sparsekv.trainers.options import DEFAULT, TrainingOptions, chosen, recipe_option
from sparsekv.trainers.pool import Part, Pool, load_pool, pool_bytes, provenance, split_documents
from sparsekv.trainers.task import Task, by_head
from sparsekv.trainers.work import Run
from sparsekv.util.config import MOST_STEPS, option
from sparsekv.util.errors import SparseKVError, check_choice
from sparsekv.util.progress import progress

WATCHED_WINDOWS = 2
WINDOWS = 2
"""Windows that a step's queries and keys come from: half of the work of one window of twice the size, and no worse."""
OPTIMIZERS = ("muon", "adam")
CENTRES = (0.5, 0.625, 0.75, 0.875, 1.0)
"""Shares of a window whose mean key a centred half is trained with: at run time it is taken anew when the mid region
has doubled."""


@dataclass(frozen=True)
class PhiRecipe:
    """How feature maps are trained. The defaults are what README's first table reports; `completion` is the paper's
    own: a ReZero block of GELUs for queries and keys, its losses, the last weights.

    under_weight: λ of the loss term on underestimated mass, which is not in the paper. turned: chance of a step's
    window to be moved past its end; half of it is the chance of its queries to be moved further from the keys (not in
    the paper; 0 = off). calibrate: cap the estimated mass, and fit per head its shift and gate on the validation
    windows. The form of the maps: features, 0 for as many as a head has dimensions; hidden units and blocks of the map
    of queries, one hidden layer without any; hidden units of the map of keys, one hidden layer, with a centred half as
    many twice, and whether the units of both halves make all features; blocks of the map of keys, which then has no
    centred half and is run outside the attention kernel. last_weights: keep those, and not every head's best of
    five validations. A map of keys runs again for every key that a
    step reads: of 32 units twice and 64 features it takes 25 kFLOP a key at 128 dimensions."""

    max_steps: int = 2500
    width: int = 128
    batch_size: int = 192
    keys_per_step: int = 4096
    optimizer: str = "muon"
    lr: float = 2e-3
    weight_decay: float = 0.01
    centred: bool = True
    output_weight: float = 1.0
    under_weight: float = 0.2
    turned: float = 0.5
    calibrate: bool = True
    features: int = 64
    query_blocks: int = 0
    key_width: int = 32
    key_blocks: int = 0
    shared: bool = True
    last_weights: bool = False


RECIPES = {DEFAULT: PhiRecipe(),
           "completion": PhiRecipe(max_steps=22_000, width=256, optimizer="adam", weight_decay=0.0, centred=False,
                                   output_weight=0.0, under_weight=0.0, turned=0.0, calibrate=False, features=0,
                                   query_blocks=1, key_width=256, key_blocks=1, shared=False, last_weights=True)}


@dataclass(frozen=True)
class PhiConfig(TrainingOptions):
    preset: str = option(DEFAULT, help="default, or completion: the paper's losses and maps alone, which are "
                                       "run outside the attention kernel.")
    max_steps: int | None = recipe_option(RECIPES, "max_steps", help="Training steps [steps].", min=1,
                                          max=MOST_STEPS)
    features: int | None = recipe_option(RECIPES, "features", min=0, help="Features r of a map; 0 takes as many as a "
                                         "head has dimensions [features].")
    width: int | None = recipe_option(RECIPES, "width", help="Hidden width of a map of queries [units].", min=8)
    query_blocks: int | None = recipe_option(RECIPES, "query_blocks", min=0, max=16, help="Residual blocks behind the "
                                             "hidden layer of a map of queries [blocks].")
    key_width: int | None = recipe_option(RECIPES, "key_width", min=8, help="Hidden units of a map of keys, twice as "
                                          "many with a centred half; it runs again for every key that a step reads "
                                          "[units].")
    batch_size: int | None = recipe_option(RECIPES, "batch_size", group="Training", min=2,
                                           help="Queries per query head and step [queries].")
    keys_per_step: int | None = recipe_option(RECIPES, "keys_per_step", group="Training", min=2,
                                              help="Keys per head and step, spread over the mid region, at most all of "
                                                   "it [keys].")
    optimizer: str | None = recipe_option(RECIPES, "optimizer", group="Training",
                                          help="muon: orthogonalised steps for matrices, Adam's for the rest (not in "
                                               "the paper); adam: for all.")
    lr: float | None = recipe_option(RECIPES, "lr", group="Training",
                                     help="Peak learning rate (warm-up, cosine to zero).")
    centred: bool | None = recipe_option(RECIPES, "centred", group="Training",
                                         help="Half of the units of the map of keys see keys without the request's "
                                              "mean key, whose score is added exactly to half of the features (not in "
                                              "the paper).")
    output_weight: float | None = recipe_option(RECIPES, "output_weight", group="Training", min=0.0,
                                                help="λ of the output's own relative error, with sink and tail exact "
                                                     "and with the best 2 % of the keys exact too (not in the paper; "
                                                     "0 = off).")


def train_phi(config: PhiConfig) -> PhiArtifact:
    """Train, calibrate on held-out windows, save. Raises SparseKVError for a bad store, options or output."""
    config.check()
    recipe = chosen(config, RECIPES)
    check_choice("optimizer", recipe.optimizer, OPTIMIZERS)
    if recipe.centred and recipe.key_blocks:
        raise SparseKVError(f"--centred needs maps of keys without blocks, and preset {config.preset} has "
                            f"{recipe.key_blocks}; leave out --centred, or use another preset")
    store = CaptureStore.open(config.capture)
    train, validation = split_documents(store, config.validation_documents)
    sink, window = store.config["sink_size"], store.config["window_size"]
    if store.context_length <= sink + window:
        raise SparseKVError(f"windows of {store.context_length} tokens have nothing between a sink of {sink} and a "
                            f"tail of {window}; capture longer contexts")
    sizes = (f"--width {recipe.width}, --key-width {recipe.key_width}, --batch-size {recipe.batch_size}, "
             f"--keys-per-step {recipe.keys_per_step} and {len(train)} windows")
    with Run("phi", config, recipe, store, lambda heads: phi_memory(recipe, store, len(train), heads), sizes) as run:
        return _train(run, config, recipe, store, train, validation)


def phi_memory(recipe: PhiRecipe, store: CaptureStore, documents: int, heads: int) -> int:
    """Bytes that the training of so many KV heads holds for certain: the captured tensors; weights, gradients and an
    optimiser's moments; one hidden layer of each map, and teacher and student of a step."""
    dim, width, group = store.head_dim, recipe.width, store.group
    features, key_width = recipe.features or dim, recipe.key_width * (2 if recipe.centred else 1)
    keys = min(recipe.keys_per_step, store.context_length - store.config["sink_size"] - store.config["window_size"])
    weights = (group * (width * (dim + features) + 2 * recipe.query_blocks * width**2)
               + key_width * (dim + features) + 2 * recipe.key_blocks * key_width**2)
    step = (group * recipe.batch_size * (width + 2 * keys // min(WINDOWS, documents))
            + keys * key_width * (1 + 2 * recipe.key_blocks))
    return pool_bytes(store, documents, heads) + 4 * heads * (3 * weights + step)


def _train(
    run: Run, config: PhiConfig, recipe: PhiRecipe, store: CaptureStore, train: list[int], validation: list[int],
) -> PhiArtifact:
    sink, window = store.config["sink_size"], store.config["window_size"]
    for index, parts in enumerate(run.groups):
        if run.finished(parts):
            continue
        pool = load_pool(store, parts, train, device=run.device)
        validating = load_pool(store, parts, validation, device=run.device)
        run.start()
        task = PhiTask(recipe, pool, validating, parts, config.seed)
        run.fit(task, index, "phi", "train phi" if len(run.groups) == 1 else f"phi {index + 1}/{len(run.groups)}",
                recipe.max_steps, recipe.lr)
        maps = task.maps().map(Tensor.detach)
        del pool, task
        with progress("calibrate φ on held-out windows"):
            card = calibrate(validating, maps, capped=recipe.calibrate, shifts=SHIFTS if recipe.calibrate else (0.0,))
        run.keep(parts, maps.named() | {f"card.{k}": v for k, v in card.items()})
    made: list[PhiArtifact] = []

    def assemble(tensors: dict[str, Tensor]) -> None:
        card = {k.removeprefix("card."): v for k, v in tensors.items() if k.startswith("card.")}
        shift = by_case(card, "shift")
        gate = choose_gates(card) if recipe.calibrate else torch.ones_like(shift[:, 0])
        if not gate.any():
            print(f"warning: the maps of none of the {gate.numel()} heads lower the error on the held-out windows; "
                  "completion is off in all of them; train longer, or with another --lr", file=sys.stderr)
        for case in CASES:
            card[f"{case} + phi error"] = torch.where(gate > 0, card[f"{case} + phi error"], card[f"{case} error"])
        maps = FeatureMaps.from_named(tensors)
        quality: dict[str, Any] = {name: float(v.mean()) for name, v in card.items()}
        quality["per_head"] = {name: [[round(x, 4) for x in row] for row in v.tolist()]
                               for name, v in {**card, "gate": gate}.items()}
        made.append(PhiArtifact(
            PhiArtifactConfig(
                model=store.model, layers=store.layers, num_features=recipe.features or store.head_dim,
                width=recipe.width, query_blocks=recipe.query_blocks, key_width=recipe.key_width,
                key_blocks=recipe.key_blocks, shared=recipe.shared, centred=recipe.centred,
                read_shares=[share or 0.0 for share in CASES.values()], sink_size=sink, window_size=window,
                capped=recipe.calibrate,
                provenance=provenance(store, asdict(config) | asdict(recipe), train, validation), quality=quality),
            maps, shift, gate, run.out))
        made[0].save(run.out)
        write_card(run.out, {"phi": asdict(made[0].config)})

    run.finish(assemble)
    return made[0] if made else PhiArtifact.load(run.out)


class PhiTask(Task):
    """The KL and Huber loss of every head's pair of maps, all heads in one batch, queries and keys the same places in
    every head."""

    betas = (0.9, 0.99)

    def __init__(self, recipe: PhiRecipe, pool: Pool, validating: Pool, parts: list[Part], seed: int):
        super().__init__()
        self.recipe, self.pool, self.seed = recipe, pool, seed
        self.weight_decay, self.muon = recipe.weight_decay, recipe.optimizer == "muon"
        self.last_weights = recipe.last_weights
        dim = pool.keys.shape[3]
        features = recipe.features or dim
        seeds = [(seed * 997 + part.layer) * 4096 + part.first + h for part in parts for h in range(part.heads)]
        self.query_maps = by_head(lambda heads: FeatureMap(heads, dim, features, recipe.width, recipe.query_blocks),
                                  [s * 64 + 1 + g for s in seeds for g in range(pool.group)])

        def key_maps(heads: int) -> CentredMap | FeatureMap:
            if recipe.centred:
                return CentredMap(heads, dim, features, recipe.key_width, shared=recipe.shared)
            return FeatureMap(heads, dim, features, recipe.key_width, recipe.key_blocks, of_keys=True)

        self.key_maps = by_head(key_maps, [s * 64 for s in seeds])
        self.query_maps.whiten(pool.queries[0].float().cpu())
        self.key_maps.whiten(pool.keys[0].float().cpu())
        self.loss, self.output = KLHuber(recipe.under_weight), OutputError()
        self.mid = pool.keys.shape[2] - pool.sink_size - pool.window_size
        self.centres = _centres(pool, self.mid) if recipe.centred else None
        self.rope = pool.rope if recipe.turned else None
        self.flat = {"queries": pool.queries.flatten(0, 2), "keys": pool.keys.flatten(0, 2)}
        if recipe.output_weight:
            out, lse = anchor_attention(pool)
            self.flat |= {"values": pool.values.flatten(0, 2), "anchor_out": out.flatten(0, 2),
                          "anchor_lse": lse.flatten()}
        self.heads = {n: torch.arange(n, device=pool.keys.device)[None, :, None] for n in (pool.heads_q, pool.heads_kv)}
        self.watched = watched_requests(validating, WATCHED_WINDOWS)

    def maps(self) -> FeatureMaps:
        """The weights as they are."""
        keys = self.key_maps
        if isinstance(keys, CentredMap):
            return FeatureMaps(self.query_maps.weights(), keys.plain.weights(), keys.centred.weights())
        return FeatureMaps(self.query_maps.weights(), keys.weights())

    def draws(self, first: int, count: int) -> dict[str, Tensor]:
        """Windows `[count, D]`, queries `[count, D, B/D]` and keys `[count, D, K/D]` by place."""
        found = [self._draw(first + i) for i in range(count)]
        return {name: torch.stack([f[name] for f in found]) for name in found[0]}

    def _draw(self, step: int) -> dict[str, Tensor]:
        recipe, pool = self.recipe, self.pool
        generator = torch.Generator().manual_seed(self.seed * 7_919 + step)
        documents = min(WINDOWS, pool.documents)
        queries = torch.randint(pool.queries.shape[2], (documents, recipe.batch_size // documents), generator=generator)
        # one key in each of as many equal stretches: spread evenly, none twice
        number = max(1, min(recipe.keys_per_step, self.mid) // documents)
        at = torch.arange(number) + torch.rand((documents, number), generator=generator, dtype=torch.float64)
        columns = (at * (self.mid / number)).long().clamp(max=self.mid - 1)
        draw = {"document": torch.randperm(pool.documents, generator=generator)[:documents], "query": queries,
                "key": columns + pool.sink_size, "log_count": torch.tensor([self.mid / number]).log(),
                "centre": torch.randint(len(CENTRES), (documents,), generator=generator)}
        if self.rope is not None:
            further, onward, *chance = torch.rand((4, documents), generator=generator, dtype=torch.float64)
            room = pool.keys.shape[2] - 1  # what the rotary table has rows for; together they stay below twice a window
            draw["further"] = (further * room * (chance[0] < recipe.turned / 2)).long()
            draw["onward"] = (onward * (room - draw["further"]) * (chance[1] < recipe.turned)).long()
        return draw

    def losses(self, draw: dict[str, Tensor]) -> dict[str, Tensor]:
        pool, document = self.pool, draw["document"]
        documents, count = draw["query"].shape
        queries, keys = self._drawn("queries", draw["query"], document), self._drawn("keys", draw["key"], document)
        queries, keys = self._turned(draw, queries, further=True), self._turned(draw, keys)
        shape = (pool.heads_kv, pool.group, documents, count)
        log_q = self.query_maps(queries.flatten(1, 2))
        # the queries of a group side by side: [Lk, D, group * count, r or d]
        log_q, queries = (x.reshape(*shape, -1).transpose(1, 2).flatten(2, 3) for x in (log_q, queries))
        if self.centres is None:
            log_k = self.key_maps(keys.flatten(1, 2)).reshape(pool.heads_kv, documents, keys.shape[2], -1)
        else:
            centre = self.centres[draw["centre"], document].transpose(0, 1)[:, :, None]  # [Lk, D, 1, d]
            centre = self._turned(draw, centre)[:, :, 0]
            log_k = self.key_maps(keys, centre[:, :, None])
            log_q = add_centre(log_q, queries, pool.scale * centre)
        teacher, student = (queries @ keys.mT) * pool.scale, log_kernel(log_q, log_k)
        places = pool.positions[document[:, None], draw["query"]]
        mask = draw["key"][:, None] <= places[..., None] - pool.window_size  # [D, count, n]
        rows = (-1, count, keys.shape[2])
        mask = mask[None, :, None].expand(*shape[:1], documents, pool.group, *mask.shape[1:]).reshape(rows)
        teacher, student = teacher.reshape(rows), student.reshape(rows)
        terms = self.loss(teacher, student, mask)
        if self.recipe.output_weight:
            out, lse = (self._drawn(name, draw["query"], document) for name in ("anchor_out", "anchor_lse"))
            out, lse = (x.reshape(*shape, *x.shape[3:]).transpose(1, 2).flatten(0, 2) for x in (out, lse))
            values = self._drawn("values", draw["key"], document).flatten(0, 1)
            terms["output"] = self.output(teacher, student, mask, values, out, lse, draw["log_count"])
            terms["loss"] = terms["loss"] + self.recipe.output_weight * terms["output"]
        return {name: value.reshape(pool.heads_kv, documents, pool.group).mean(1) for name, value in terms.items()}

    def _turned(self, draw: dict[str, Tensor], x: Tensor, *, further: bool = False) -> Tensor:
        """Vectors with RoPE `[L, D, n, d]` where the step puts their windows: all `draw["onward"] [D]` positions on,
        queries `draw["further"]` more. Sink and tail, the exact part, count as they were found: they move with the
        queries, only the sink's distance does not grow."""
        if self.rope is None:
            return x
        places = draw["onward"] + draw["further"] if further else draw["onward"]
        return self.rope.turn(x, torch.zeros_like(places)[:, None], places[:, None])

    def _drawn(self, name: str, places: Tensor, document: Tensor) -> Tensor:
        """What a pool tensor has at `places [D, n]` of the windows `document [D]`: `[L, D, n, ...]` float32."""
        of_keys = name in ("keys", "values")
        heads = self.pool.heads_kv if of_keys else self.pool.heads_q
        length = self.pool.keys.shape[2] if of_keys else self.pool.queries.shape[2]
        index = (document[:, None, None] * heads + self.heads[heads]) * length + places[:, None]
        index = index.transpose(0, 1)
        found = self.flat[name].index_select(0, index.flatten())
        return found.reshape(*index.shape, *found.shape[1:]).float()

    def validate(self) -> Tensor:
        """Output error with sink and tail alone, completed, by KV head."""
        maps, found = self.maps(), []
        offsets = torch.zeros(1, self.pool.heads_q, device=self.pool.keys.device)
        for request in self.watched:
            estimator = PhiEstimator(PhiLayer(maps, offsets))
            estimator.build(request.prefill)
            parts = two_parts(request.view, request.queries, Streaming(), estimator)
            found.append(shifted_errors(parts, request.full, offsets[0, :1])[0].mean(0))
        return torch.stack(found).mean(0).reshape(self.pool.heads_kv, -1).mean(1)


def _centres(pool: Pool, mid: int) -> Tensor:
    """Mean keys of the first parts of every window's mid region, `[len(CENTRES), D, Lk, d]` float32."""
    ends = [pool.sink_size + max(1, round(share * mid)) for share in CENTRES]
    # window by window: a mean in float32 holds its input in float32
    return torch.stack([torch.stack([keys[:, pool.sink_size:end].mean(1, dtype=torch.float32) for keys in pool.keys])
                        for end in ends])
