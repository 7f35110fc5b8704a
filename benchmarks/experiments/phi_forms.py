"""Forms of the feature maps, trained alike and measured on held-out windows of a capture store.

    PYTHONPATH=CHECKOUT python forms.py STORE OUT.json [--layers 2,6,10,14,18,22,26] [--steps 1200] [--seconds 330]
        [--forms base,shared64,...] [--calibration 2] [--heldout 1]

Windows of the store: the last `heldout` are measured, those before them calibrate (shift and cap, every head on), all others train. Forms are run
in the order below until the seconds are used up; OUT.json is written after each.
"""
import argparse, gc, json, sys, tempfile, time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sparsekv.artifacts.phi import PhiLayer
from sparsekv.core.estimators.phi import PhiEstimator
from sparsekv.core.offline import relative_error, requests, scores
from sparsekv.core.step import two_parts
from sparsekv.kernels import add_centre, log_phi
from sparsekv.models.feature_map import log_kernel
from sparsekv.store.store import CaptureStore
from sparsekv.trainers import phi as trainer
from sparsekv.trainers.calibrate import CASES, by_case, calibrate, reader, shifted_errors
from sparsekv.trainers.fit import fit
from sparsekv.trainers.metrics import FILE, read_metrics
from sparsekv.trainers.pool import Part, load_pool

ONE = {"key_blocks": 0}
FORMS = {
    "base": {},
    "shared64": {**ONE, "shared": True, "key_width": 64},
    "sep64": {**ONE, "key_width": 64},
    "shared64 q512": {**ONE, "shared": True, "key_width": 64, "width": 512},
    "shared64 q2blocks": {**ONE, "shared": True, "key_width": 64, "query_blocks": 2},
    "shared32": {**ONE, "shared": True, "key_width": 32},
    "shared48 r192": {**ONE, "shared": True, "key_width": 48, "features": 192},
    "shared64 r64": {**ONE, "shared": True, "key_width": 64, "features": 64},
    "sep256": {**ONE, "key_width": 256},
    "shared128": {**ONE, "shared": True, "key_width": 128},
    "shared80 r96": {**ONE, "shared": True, "key_width": 80, "features": 96},
    "plain128": {**ONE, "centred": False, "key_width": 128},
}
SHOWN = ("sink_tail", "topk@0.01", "topk@0.02", "topk@0.05")


def flop(recipe, dim: int) -> tuple[int, int]:
    """FLOP of a key (both halves) and of a query."""
    r, w = recipe.features or dim, recipe.key_width or recipe.width
    parts = [r] if not recipe.centred else [r, r] if recipe.shared else [r - r // 2, r // 2]
    # a block's second product is one with the output's, as a key's map is run
    key = sum(2 * (dim * w + w * n + getattr(recipe, "key_blocks", 0) * (w * w + w * n)) for n in parts)
    q = recipe.width
    return key, 2 * (dim * q + recipe.query_blocks * 2 * q * q + q * r)


@torch.no_grad()
def measure(pool, maps, shift: Tensor, capped: bool, count: int) -> dict:
    """Means over heads and queries: error of the output, KL(full || completed) of the weights [nats]; by case."""
    found: dict = {}
    step = max(1, 150_000_000 // (pool.group * 64 * pool.keys.shape[2]))
    for document in range(pool.documents):
        for a in range(0, pool.heads_kv, step):
            kv = slice(a, min(a + step, pool.heads_kv))
            qs = slice(kv.start * pool.group, kv.stop * pool.group)
            layer = PhiLayer(maps.heads(qs, kv), shift[qs].T.contiguous(), tuple(s or 0.0 for s in CASES.values()), capped)
            for request in requests(pool.window(document, kv), count, span=64, first=2 / 3):
                estimator = PhiEstimator(layer)
                estimator.build(request.prefill)
                view, queries = request.view, request.queries
                s = scores(view, queries)  # [T, Hq, N]
                first, last = int(view.regions.mid_first[0]), int(view.regions.mid_last[0])
                full = s.log_softmax(-1)
                log_q = log_phi(queries.rot, layer.query_map)
                centre = None if estimator.centre is None else view.scale * estimator.centre
                log_q = add_centre(log_q, queries.rot, centre)[0]
                log_k = layer.maps.log_phi_k(view.keys[:, :, first:last], estimator.centre)[0]
                guess = log_kernel(log_q.reshape(log_k.shape[0], -1, log_q.shape[-1]), log_k)
                guess = guess.reshape(*log_q.shape[:2], -1).transpose(0, 1)
                for case, share in CASES.items():
                    if case not in SHOWN:
                        continue
                    selector, _ = request.build(reader(share), None)
                    estimator.reads(request.prefill, share or 0.0)
                    parts = two_parts(view, queries, selector, estimator)
                    zero = parts.exact_lse.new_zeros(1)
                    errors = shifted_errors(parts, request.full, zero)[0]
                    moved = s.clone()
                    offset = layer.at(share or 0.0).offset
                    rest = guess + offset[:, None]
                    read = torch.zeros_like(rest, dtype=torch.bool)
                    tokens = parts.selection.as_tokens().long()
                    if tokens.shape[-1]:
                        tokens = tokens.repeat_interleave(s.shape[1] // tokens.shape[1], 1)
                        read = torch.zeros(*rest.shape[:2], last - first + 1, dtype=torch.bool, device=s.device)
                        read.scatter_(-1, torch.where(tokens >= 0, tokens - first, last - first), True)
                        read = read[..., :-1]
                    # the mass as it is capped in the step
                    rest = rest + (parts.rest_lse - rest.masked_fill(read, float("-inf")).logsumexp(-1))[..., None]
                    moved[..., first:last] = torch.where(read, s[..., first:last], rest)
                    there = torch.isfinite(full)
                    log = moved.masked_fill(~there, float("-inf")).log_softmax(-1)
                    kl = torch.where(there, full.exp() * (full - log), 0.0).sum(-1)
                    alone = relative_error(parts.exact_out, request.full)
                    for name, value in (("error", errors), ("kl", kl), ("alone", alone)):
                        total = found.setdefault((case, name), [0.0, 0])
                        total[0] += float(value.double().sum())
                        total[1] += value.numel()
    return {f"{case} {name}": total / n for (case, name), (total, n) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", default="2,6,10,14,18,22,26")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seconds", type=float, default=330)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--recipe", default="{}", help="JSON over the default recipe, for every form")
    parser.add_argument("--calibration", type=int, default=2)
    parser.add_argument("--heldout", type=int, default=1)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    o = parser.parse_args()
    began = time.perf_counter()
    store = CaptureStore.open(o.store)
    layers = [i for i in map(int, o.layers.split(",")) if i in store.layers]
    parts = [Part(layer, 0, store.num_kv_heads) for layer in layers]
    cut, end = store.num_documents - o.heldout - o.calibration, store.num_documents
    pools = [load_pool(store, parts, docs, device=o.device) for docs in (
        list(range(cut)), list(range(cut, cut + o.calibration)), list(range(cut + o.calibration, end)))]
    train, calibration, heldout = pools
    # the same for every form
    once = trainer.anchor_attention(train)
    trainer.anchor_attention = lambda pool: once
    centres = {}
    make_centres = trainer._centres
    trainer._centres = lambda pool, mid: centres.setdefault("x", make_centres(pool, mid))
    print(f"loaded {cut} + {o.calibration} + {o.heldout} windows of {store.context_length}, layers {layers}, d {store.head_dim}: "
          f"{time.perf_counter() - began:.1f} s", flush=True)
    device = torch.cuda.get_device_name() if o.device.startswith("cuda") else "cpu"
    about = {"steps": o.steps, "layers": layers, "windows": cut, "length": store.context_length, "device": device, "torch": torch.__version__,
             "seed": o.seed, "recipe": json.loads(o.recipe), "model": store.config.get("model")}
    rows: list = []
    for name in o.forms.split(","):
        if rows and time.perf_counter() - began + rows[-1]["seconds"] > o.seconds:
            print(f"no time left for {name} and those after it", flush=True)
            break
        start = time.perf_counter()
        row, given = {"form": name}, {"key_width": 256, "shared": False, **json.loads(o.recipe), **FORMS[name]}
        if not hasattr(trainer.PhiRecipe(), "key_blocks"):  # maps of keys have one hidden layer from then on
            if given.pop("key_blocks", 1):
                print(f"{name}: needs the trainer of tree-a", flush=True)
                continue
        recipe = replace(trainer.PhiRecipe(), **given)
        try:
            task = trainer.PhiTask(recipe, train, calibration, parts, o.seed)
            with tempfile.TemporaryDirectory() as folder:
                fit(task, steps=o.steps, lr=recipe.lr, output=Path(folder), name="phi", description=name, device=o.device)
                table = read_metrics(Path(folder) / FILE)
            trained = time.perf_counter() - start
            spent = sorted(x for x in table["ms_per_step"] if x == x)  # blocks; validations' rows have none
            maps = task.maps().map(Tensor.detach)
            del task
            card = calibrate(calibration, maps, capped=True)
            after = time.perf_counter()
            found = measure(heldout, maps, by_case({k: v[None] for k, v in card.items()}, "shift")[0].T, True, o.requests)
            key, query = flop(recipe, store.head_dim)
            row |= {"kflop_key": key / 1e3, "kflop_query": query / 1e3, "r": recipe.features or store.head_dim, **found,
                    "validation": {c: float(card[f"{c} + phi error"].mean()) for c in CASES},
                    "steps_s": 1000 / spent[len(spent) // 2], "train_s": trained, "measure_s": time.perf_counter() - after,
                    "seconds": time.perf_counter() - start}
        except Exception as error:  # the next form may do
            import traceback
            traceback.print_exc()
            row |= {"error": repr(error), "seconds": time.perf_counter() - start}
        rows.append(row)
        gc.collect()
        if o.device.startswith("cuda"):
            torch.cuda.empty_cache()
        o.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
        print(json.dumps(row), flush=True)
    heads = ["form", "kFLOP/key", "kFLOP/q", "r", *(f"{c} {w}" for w in ("err", "KL") for c in ("tail", "1%", "2%", "5%")), "steps/s"]
    print("| " + " | ".join(heads) + " |")
    for row in rows:
        if "error" in row:
            print("|", row["form"], "|", row["error"])
            continue
        cells = [row["form"], f"{row['kflop_key']:.0f}", f"{row['kflop_query']:.0f}", str(row["r"]),
                 *(f"{row[f'{c} {w}']:.4f}" for w in ("error", "kl") for c in SHOWN), f"{row['steps_s']:.1f}"]
        print("| " + " | ".join(cells) + " |")
    alone = next((r for r in rows if "error" not in r), None)
    if alone:
        print("without phi: " + ", ".join(f"{c} {alone[f'{c} alone']:.4f}" for c in SHOWN))


if __name__ == "__main__":
    main()
