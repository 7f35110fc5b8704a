"""Quality of trained routers and feature maps on held-out text, in the form of the completion paper's offline tables.

    python benchmarks/training.py --model MODEL --text FILE.txt [--phi-steps N] [--output FOLDER]

Trains on the first 80 % of the file's characters, measures on its last 20 % and (`ood:` rows) on the embedded corpus.
Six layers, anchors 4 + 16, queries in the second half of 8192 tokens; relative L2 error of the heads' output and share
of the mid region's attention mass, means over heads and queries.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, row, write_rows
from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.capture.run import CaptureConfig, run_capture
from sparsekv.capture.store import CaptureStore
from sparsekv.hub import load_model
from sparsekv.kernels.reference import router_logits
from sparsekv.models import offline
from sparsekv.models.feature_map import log_kernel
from sparsekv.trainers.phi import PhiConfig, train_phi
from sparsekv.trainers.router import RouterConfig, train_router

LAYERS, LENGTH, MEASURED_QUERIES = "1,6,11,16,21,26", 8192, 64
BUDGETS = (0.01, 0.02, 0.05, 0.10)


def capture(options: argparse.Namespace, folder: Path) -> dict[str, CaptureStore]:
    model, tokenizer = load_model(options.model, dtype="bfloat16", device=options.device)
    stores = {}
    for name, corpus, split, count, queries in (
            ("train", options.text, "train", options.documents, options.queries),
            ("heldout", options.text, "heldout", 8, 256), ("ood", "embedded", "all", 8, 256)):
        stores[name] = run_capture(
            CaptureConfig(model=options.model, corpus=corpus, split=split, output=str(folder / name), layers=LAYERS,
                          context_length=LENGTH, num_documents=count, queries_per_document=queries, seed=1),
            model=model, tokenizer=tokenizer)
    return stores


def measure(store: CaptureStore, phi: PhiArtifact, routers: dict[str, RouterArtifact], device: str) -> dict[Any, float]:
    """(case, method, metric) -> mean over layers, heads, documents and queries."""
    sums: dict[Any, list[float]] = {}
    for layer in store.layers:
        maps = phi.layer(layer)
        assert maps is not None
        for document in range(store.num_documents):
            item = store.read(layer, document)
            keys = item.keys_rot().to(device)
            late = item.query_positions >= LENGTH // 2
            count = min(MEASURED_QUERIES, int(late.sum(1).min()))
            pick = torch.stack([r.nonzero()[:, 0][torch.linspace(0, int(r.sum()) - 1, count).long()] for r in late])
            queries = item.queries_rot().gather(1, pick[..., None].expand(-1, -1, store.head_dim)).to(device)
            scene = offline.make_scene(queries, keys, item.values.float().to(device),
                                       item.query_positions.gather(1, pick).to(device), scale=item.scale, sink_size=4,
                                       window_size=16)
            log_q, log_k = maps.log_phi_q(queries[None])[0], maps.log_phi_k(keys[None])[0]
            logits = log_kernel(log_q.reshape(keys.shape[0], -1, log_q.shape[-1]), log_k).reshape(scene.scores.shape)
            reads: dict[str, torch.Tensor | None] = {"sink_tail": None}
            reads |= {f"topk@{b}": offline.top_k(scene, b) for b in BUDGETS}
            for name, router in routers.items():
                for case, read in routed(router, layer, scene, queries, keys, item.scale).items():
                    reads[f"{case}_{name}@0.05"] = read
            for case, read in reads.items():
                for method, estimate in (("none", None), ("phi_gated", logits)):
                    error = offline.relative_error(scene, offline.output(scene, read, estimate))
                    sums.setdefault((case, method, "rel_err"), []).append(float(error.mean()))
                if read is not None:
                    share = float(offline.mass_share(scene, read).mean())
                    sums.setdefault((case, "none", "mass_share"), []).append(share)
    return {key: sum(v) / len(v) for key, v in sums.items()}


def routed(
    router: RouterArtifact, layer: int, scene: offline.Scene, queries: torch.Tensor, keys: torch.Tensor, scale: float,
) -> dict[str, torch.Tensor]:
    """What the router and an oracle over its buckets read at 5 %."""
    trained = router.layer(layer)
    assert trained is not None and trained.key_space == "rot"
    centroids = trained.centroids.to(keys.device)
    bucket = (keys @ centroids.mT).argmax(-1)
    member = torch.nn.functional.one_hot(bucket, centroids.shape[1]).float()
    sizes = member.sum(1)
    logits = 0.0
    if trained.scores != "mlp":
        means = (member.mT @ keys) / sizes.clamp(min=1)[..., None]
        logits = offline.grouped(queries, means) * scale + sizes.clamp(min=1e-3).log().repeat_interleave(
            scene.group, 0)[:, None]
    if trained.weights is not None:
        weights = type(trained.weights)(*(w.to(keys.device) for w in trained.weights))
        logits = logits + router_logits(queries.transpose(0, 1), weights).transpose(0, 1)
    mass = offline.bucket_mass(scene, bucket, centroids.shape[1])
    read = {}
    for case, p in (("router", logits.softmax(-1)), ("oracle", mass)):
        shared = p.reshape(keys.shape[0], scene.group, *p.shape[1:]).sum(1)
        read[case] = offline.top_buckets(scene, bucket, shared / sizes.clamp(min=1)[:, None], 0.05)
    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--documents", type=int, default=120)
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--phi-steps", type=int, default=6000)
    parser.add_argument("--router-steps", type=int, default=2000)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--keys", type=int, default=2048)
    parser.add_argument("--buckets", type=int, default=1024)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    rows = []
    chosen = {k: str(v) for k, v in vars(options).items() if k not in ("output", "model", "text")}
    with tempfile.TemporaryDirectory() as place:
        folder, began = Path(place), time.perf_counter()
        stores = capture(options, folder)
        print(f"captured in {time.perf_counter() - began:.0f} s", flush=True)
        routers = {}
        for scores in ("mlp", "mean_key", "hybrid"):
            began = time.perf_counter()
            routers[scores] = train_router(RouterConfig(
                capture=str(stores["train"].path), output=str(folder / scores), scores=scores, key_space="rot",
                num_buckets=options.buckets, hidden_size=512, max_steps=options.router_steps, validation_documents=4,
                layer_group=1, device=options.device, long_range=0))
            print(f"{scores} in {time.perf_counter() - began:.0f} s", flush=True)
        began = time.perf_counter()
        phi = train_phi(PhiConfig(
            capture=str(stores["train"].path), output=str(folder / "phi"), max_steps=options.phi_steps,
            batch_size=options.batch, keys_per_step=options.keys, width=options.width, num_features=options.features,
            lr=options.lr, weight_decay=0.01, validation_documents=4, device=options.device))
        print(f"phi in {time.perf_counter() - began:.0f} s", flush=True)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        phi = phi.to(device)
        for prefix, name in (("", "heldout"), ("ood:", "ood")):
            for (case, method, metric), value in measure(stores[name], phi, routers, device).items():
                rows.append(row(prefix + case, method, metric, round(value, 4),
                                "relative L2" if metric == "rel_err" else "share of the mid mass",
                                options=chosen))
                print(f"{prefix + case:28} {method:10} {metric:10} {value:.4f}")
    print(write_rows("training", rows, options.output))


if __name__ == "__main__":
    main()
