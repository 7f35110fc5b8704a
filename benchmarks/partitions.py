"""The ceiling of any router is its partition: mass that an oracle and the untrained mean-key score reach on buckets of
keys, by what is clustered, number of buckets, context length and width of the dense tail.

    python benchmarks/partitions.py --model MODEL --text FILE.txt [--lengths 4096 8192 16384 32768] [--output FOLDER]

Buckets are found on windows of the first 80 % of the text and judged on its last 20 %; past the model's 8192 positions
with yarn. Partitions: `pre`, `rot`: spherical k-means of keys without and with RoPE; `own`: k-means of the request's
own rotated keys; `segments16`, `segments64`: content buckets (without RoPE) within 16 or 64 segments of the positions;
and variants of the first two: `centred` (the mean key is taken off first), `balanced` (a bias per bucket evens the
sizes), `split` (buckets above twice the mean size are cut into runs of positions), `weighted` (keys drawn for k-means
by the attention they receive).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, row, write_rows
from sparsekv.capture.run import CaptureConfig, run_capture
from sparsekv.core import offline
from sparsekv.hub import load_model, resolve_device
from sparsekv.store.store import CaptureStore, LayerCapture
from sparsekv.trainers.kmeans import imbalance, spherical_kmeans

BUCKETS = (512, 1024, 2048, 4096)
TAILS = (16, 64, 256, 1024)
BUDGETS = (0.01, 0.02, 0.05, 0.1)
AT, MIDDLE = 0.05, 1024
SINK, NATIVE = 4, 8192
BASE = ("pre", "rot", "own", "segments16", "segments64")
VARIANTS = tuple(f"{space}_{how}" for space in ("pre", "rot") for how in ("centred", "balanced", "split", "weighted"))


class Pool(NamedTuple):
    """Keys of the training windows of one layer, by space `[Hkv, n, d]`, and the attention each received `[Hkv, n]`."""

    keys: dict[str, Tensor]
    received: Tensor


class Partition(NamedTuple):
    """How keys are assigned: largest `cos(k − centre, centroid) + bias` in a space, within position segments, large
    buckets cut. centroids `[Hkv, C, d]`, centre `[Hkv, 1, d]`, bias `[Hkv, C]`."""

    space: str
    centroids: Tensor
    centre: Tensor
    bias: Tensor
    segments: int = 1
    split: bool = False

    def assign(self, keys: dict[str, Tensor]) -> tuple[Tensor, int]:
        """Bucket of every key `[Hkv, N]` and the number of buckets."""
        found = torch.nn.functional.normalize(keys[self.space] - self.centre, dim=-1)
        bucket = (found @ self.centroids.mT + self.bias[:, None]).argmax(-1)
        length, buckets = bucket.shape[1], self.centroids.shape[1]
        if self.segments > 1:
            bucket += torch.arange(length, device=bucket.device) * self.segments // length * buckets
            buckets *= self.segments
        return cut(bucket, buckets) if self.split else (bucket, buckets)


def cut(bucket: Tensor, buckets: int) -> tuple[Tensor, int]:
    """Buckets of more than twice the mean size in runs of at most that: new numbers `[H, N]`, and how many."""
    heads, length = bucket.shape
    limit = max(1, 2 * length // buckets)
    order = bucket.argsort(dim=1, stable=True)
    ordered = bucket.gather(1, order)
    place = torch.arange(length, device=bucket.device).expand(heads, -1)
    start = torch.searchsorted(ordered, ordered)
    run = (place - start) // limit
    new = (run > 0) & ((place - start) % limit == 0)
    # a run that opens a new bucket takes the next free number
    number = torch.where(run > 0, buckets + new.long().cumsum(1) - 1, ordered)
    return torch.empty_like(bucket).scatter_(1, order, number), buckets + int(new.sum(1).max())


def segments(name: str) -> int:
    return int(name.removeprefix("segments")) if name.startswith("segments") else 1


def find(name: str, pool: Pool, own: dict[str, Tensor], buckets: int, seed: int) -> Partition:
    """The partition of that name; `own` are the keys of the request (only `own` looks at them)."""
    space, _, how = name.partition("_")
    parts = segments(space)
    keys = own["rot"] if space == "own" else pool.keys["rot" if space == "rot" else "pre"]
    centre = keys.mean(1, keepdim=True) if how == "centred" else torch.zeros_like(keys[:, :1])
    points = keys - centre
    if how == "weighted":
        chance = 0.5 * pool.received / pool.received.sum(1, keepdim=True) + 0.5 / keys.shape[1]
        generator = torch.Generator(device=keys.device).manual_seed(seed)
        drawn = torch.multinomial(chance, keys.shape[1], replacement=True, generator=generator)
        points = points.gather(1, drawn[..., None].expand_as(points))
    centroids = spherical_kmeans(points, buckets // parts, seed=seed, engine="torch",
                                 max_points_per_centroid=128)
    bias = balance(points, centroids) if how == "balanced" else torch.zeros_like(centroids[..., 0])
    return Partition("rot" if space in ("rot", "own") else "pre", centroids, centre, bias, parts, how == "split")


def balance(keys: Tensor, centroids: Tensor, rounds: int = 20, most: int = 100_000) -> Tensor:
    """A bias per bucket that evens the sizes: raised where too few keys fall, lowered where too many, ever less."""
    keys = keys[:, torch.linspace(0, keys.shape[1] - 1, min(most, keys.shape[1]), device=keys.device).long()]
    scores = torch.nn.functional.normalize(keys, dim=-1) @ centroids.mT
    spread = scores.amax(-1).std(1, keepdim=True)
    bias = torch.zeros_like(centroids[..., 0])
    for i in range(rounds):
        bucket = (scores + bias[:, None]).argmax(-1)
        sizes = torch.zeros_like(bias).scatter_add_(1, bucket, torch.ones_like(bucket, dtype=bias.dtype))
        bias -= 0.3 * (1 - i / rounds) * spread * ((sizes + 1) * bias.shape[1] / keys.shape[1]).log().clamp(-1, 1)
    return bias


def shares(scene: offline.Scene, bucket: Tensor, buckets: int, budgets: tuple[float, ...]) -> dict[str, Tensor]:
    """Mass share at each budget `[len(budgets)]` by an oracle and by the mean key, mean over heads and queries. Buckets
    are read whole from the best down, the last one in part: its share of what is left."""
    heads_kv, group = bucket.shape[0], scene.group
    index = bucket.repeat_interleave(group, 0)[:, None].expand(scene.scores.shape)

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:2], buckets).scatter_add_(-1, index, x)

    def shared(x: Tensor) -> Tensor:
        return x.reshape(heads_kv, group, *x.shape[1:]).sum(1)

    mid = scene.mid.expand(scene.scores.shape)
    mass = total(scene.scores.masked_fill(~mid, offline.NEG_INF).softmax(-1).nan_to_num(0.0))
    count = total(mid.to(mass.dtype))
    logits = total(torch.where(mid, scene.scores, 0.0)) / count.clamp(min=1) + count.log()
    sizes = shared(count) / group
    found = {}
    for name, score in (("oracle", shared(mass)), ("mean_key", shared(logits.softmax(-1)))):
        order = (score / sizes.clamp(min=1)).argsort(-1, descending=True)
        size = sizes.gather(-1, order)
        held = mass.gather(-1, order.repeat_interleave(group, 0))
        before = size.cumsum(-1) - size
        result = []
        for budget in budgets:
            allowed = torch.ceil(scene.context * budget)[..., None]
            part = ((allowed - before) / size.clamp(min=1)).clamp(0, 1)
            result.append((held * part.repeat_interleave(group, 0)).sum(-1).mean())
        found[name] = torch.stack(result)
    return found


def late_scenes(item: LayerCapture, tails: tuple[int, ...], count: int) -> dict[int, offline.Scene]:
    """By tail, the attention of `count` queries of the second half."""
    places = item.query_positions
    late = (places >= item.keys_pre.shape[1] // 2).nonzero()[:, 0]
    some = late[torch.linspace(0, len(late) - 1, min(count, len(late))).long()]
    queries, keys = item.queries_rot()[:, some], item.keys_rot()
    values = item.values[..., :1].float()  # the shares need no values
    return {tail: offline.make_scene(queries, keys, values, places[some][None], scale=item.scale,
                                     sink_size=SINK, window_size=tail) for tail in tails}


def received(item: LayerCapture, count: int = 64) -> Tensor:
    """Attention that each key receives from the sampled queries, `[Hkv, N]`, sink and a tail of 16 left out."""
    scene = late_scenes(item, (16,), count)[16]
    weights = scene.scores.softmax(-1).masked_fill(~scene.mid, 0.0).sum(1)
    return weights.reshape(item.keys_pre.shape[0], -1, weights.shape[-1]).sum(1)


def spaces(item: LayerCapture) -> dict[str, Tensor]:
    return {"pre": item.keys_pre.float(), "rot": item.keys_rot()}


def study(train: CaptureStore, heldout: CaptureStore, options: argparse.Namespace, device: str) -> dict[Any, float]:
    """(partition, C, tail, method, metric) -> mean over layers, heads, documents and queries."""
    sums: dict[Any, list[Tensor]] = {}
    length = train.context_length
    tails = tuple(t for t in TAILS if t < length // 4)
    middle = MIDDLE if MIDDLE in options.buckets else max(options.buckets)
    for layer in train.layers:
        items = [train.read(layer, document).to(device) for document in range(train.num_documents)]
        held = [spaces(item) for item in items]
        pool = Pool({s: torch.cat([h[s] for h in held], 1) for s in ("pre", "rot")},
                    torch.cat([received(item) for item in items], 1))
        del held
        known: dict[tuple[str, int], Partition] = {}
        for document in range(heldout.num_documents):
            item = heldout.read(layer, document).to(device)
            keys = spaces(item)
            scenes = late_scenes(item, tails, options.queries)
            for tail, scene in scenes.items():
                exact = torch.stack([offline.mass_share(scene, offline.top_k(scene, b)).mean() for b in BUDGETS])
                share = torch.where(scene.mid, scene.scores.softmax(-1), 0.0).sum(-1).mean()
                for budget, value in zip(BUDGETS, exact, strict=True):
                    sums.setdefault(("topk", 0, tail, "topk", f"mass_share@{budget}"), []).append(value)
                sums.setdefault(("topk", 0, tail, "none", "mid share of all attention"), []).append(share)
            for name in (*BASE, *VARIANTS):
                for buckets in options.buckets if name in BASE else [b for b in options.buckets if b == middle]:
                    if buckets > length // 2 or buckets < 2 * segments(name):
                        continue
                    if name == "own" or (name, buckets) not in known:
                        known[name, buckets] = find(name, pool, keys, buckets, options.seed)
                    bucket, number = known[name, buckets].assign(keys)
                    sizes = torch.zeros(bucket.shape[0], number, device=bucket.device).scatter_add_(
                        1, bucket, torch.ones_like(bucket, dtype=torch.float32))
                    sums.setdefault((name, buckets, 0, "none", "imbalance"), []).append(imbalance(sizes).mean())
                    curve = BUDGETS if buckets == middle and name in BASE else (AT,)
                    for tail, scene in scenes.items():
                        for method, values in shares(scene, bucket, number, curve).items():
                            for budget, value in zip(curve, values, strict=True):
                                key = (name, buckets, tail, method, f"mass_share@{budget}")
                                sums.setdefault(key, []).append(value)
    return {key: float(torch.stack(v).mean()) for key, v in sums.items()}


def check() -> None:
    """Before anything is measured: the shares of whole buckets are those that `offline.top_buckets` reads, and cutting
    keeps every key once in a bucket within the limit."""
    torch.manual_seed(0)
    queries, (keys, values) = torch.randn(4, 5, 16), torch.randn(2, 2, 200, 16)
    scene = offline.make_scene(queries, keys, values, torch.tensor([[199, 190, 180, 170, 160]]), scale=0.5, sink_size=4,
                               window_size=16)
    bucket = torch.arange(200).expand(2, -1)
    mass = offline.bucket_mass(scene, bucket, 200).reshape(2, 2, 5, 200).sum(1)
    want = offline.mass_share(scene, offline.top_buckets(scene, bucket, mass, AT)).mean()
    assert abs(float(shares(scene, bucket, 200, (AT,))["oracle"]) - float(want)) < 1e-5
    many, number = cut(torch.randint(10, (3, 200)) ** 2 // 10, 10)
    sizes = torch.nn.functional.one_hot(many, number).sum(1)
    assert int(sizes.max()) <= 40 and bool((sizes.sum(1) == 200).all())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--buckets", type=int, nargs="+", default=list(BUCKETS))
    parser.add_argument("--layers", default="6,16,26")
    parser.add_argument("--tokens", type=int, default=131072, help="clustered, a layer and length")
    parser.add_argument("--heldout-documents", type=int, default=3)
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    device = resolve_device(options.device)
    check()
    rows = []
    for length in options.lengths:
        began = time.perf_counter()
        rope = yarn(length)
        model, tokenizer = load_model(options.model, dtype="bfloat16", device=options.device, rope_scaling=rope)
        with tempfile.TemporaryDirectory() as place:
            stores = [run_capture(
                CaptureConfig(model=options.model, corpus=options.text, split=split, output=str(Path(place) / split),
                              layers=options.layers, context_length=length, num_documents=count, rope_scaling=rope,
                              queries_per_document=4 * options.queries, seed=options.seed),
                model=model, tokenizer=tokenizer)
                for split, count in (("train", max(2, options.tokens // length)),
                                     ("heldout", options.heldout_documents))]
            del model
            means = study(*stores, options, device)
        for (name, buckets, tail, method, metric), value in means.items():
            rows.append(row(f"{length} tokens, {name}" + (f", C = {buckets}" if buckets else "")
                            + (f", tail {tail}" if tail else ""), method, metric, round(value, 4),
                            "C · Σ share²" if metric == "imbalance" else "share", length=length, partition=name,
                            buckets=buckets, tail=tail, seed=options.seed))
        print(f"{length} tokens in {time.perf_counter() - began:.0f} s", flush=True)
    print_table(rows)
    print(write_rows("partitions", rows, options.output))


def yarn(length: int) -> str | None:
    """Rope scaling of a context past the model's own positions."""
    return json.dumps({"rope_type": "yarn", "factor": float(-(-length // NATIVE))}) if length > NATIVE else None


def print_table(rows: list[dict[str, Any]]) -> None:
    values = {(r["length"], r["partition"], r["buckets"], r["tail"], r["method"], r["metric"]): r["value"]
              for r in rows}
    tails = sorted({r["tail"] for r in rows} - {0})
    print(f"share at 5 %: oracle/mean_key by tail\n{'length':>6} {'partition':14}{'C':>5}"
          + "".join(f"{t:>12}" for t in tails))
    for length, name, buckets in dict.fromkeys((r["length"], r["partition"], r["buckets"]) for r in rows):
        methods = ("topk",) if name == "topk" else ("oracle", "mean_key")
        cells = ["/".join(f"{values.get((length, name, buckets, t, m, f'mass_share@{AT}'), float('nan')):.3f}"
                          for m in methods) for t in tails]
        print(f"{length:>6} {name:14}{buckets:>5}" + "".join(f"{c:>12}" for c in cells))


if __name__ == "__main__":
    main()
