"""The papers' systems as published, and the rivals' settings: the rows of docs/results/papers.json, told in
docs/papers.md.

    python benchmarks/papers.py --part saap --model MODEL --text FILE.txt [--length 8192] [--steps 40000] [--lr 1e-5]
    python benchmarks/papers.py --part completion --keep FOLDER [--steps 22000]
    python benchmarks/papers.py --part lfps --model MODEL --text FILE.txt [--length 4096]
    python benchmarks/papers.py --part faiss --model MODEL --requests FILE
    python benchmarks/papers.py --part million [--length 1048576]
    python benchmarks/papers.py --part chunk [--length 131072]
    python benchmarks/papers.py --part extrapolate --model MODEL --requests FILE
    python benchmarks/papers.py --part sweep --model MODEL --requests FILE [--budgets 0.02]

FILE of requests is made by `sparsekv eval --tasks ruler-offline --lengths … --save-requests FILE` (`--tasks needle` for
faiss); FOLDER is what `benchmarks/training.py --keep FOLDER` left, its stores and maps. Rows of earlier runs stay, but
for those of the same case, method, metric and machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sparsekv
from benchmarks._peers import SWEEP
from benchmarks._rows import RESULTS, machine, row, write_rows
from benchmarks._training import BUDGETS, errors, measured, nearest_centroids, router_of, side_by_side, spend
from benchmarks.partitions import yarn
from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.capture.run import CaptureConfig, run_capture
from sparsekv.core.estimators import Estimator, PhiEstimator
from sparsekv.core.layer import LayerView, Queries
from sparsekv.core.offline import best_buckets, mass_read, mid_share
from sparsekv.core.prefill import prefill_chunks
from sparsekv.core.regions import Regions
from sparsekv.core.selectors import SELECTORS
from sparsekv.core.selectors.token_select import TokenSelect
from sparsekv.evaluation.evaluator import TOKENS_NEEDED
from sparsekv.evaluation.methods import parse_methods
from sparsekv.evaluation.requests import Request, load_requests, score
from sparsekv.hub import load_model, resolve_device
from sparsekv.kernels import dense_attention
from sparsekv.store.store import CaptureStore
from sparsekv.trainers.calibrate import reader
from sparsekv.trainers.phi import PhiConfig, train_phi
from sparsekv.trainers.router import RouterConfig, train_router

Rows = list[dict[str, Any]]
SHAPE = {"heads_q": 32, "heads_kv": 8, "dim": 128}
"""Of a layer of an 8B model."""
PROBES = 32


def saap(options: argparse.Namespace) -> Rows:
    """Share of the mid region's attention that is read, by budget: the paper's query model on the paper's buckets,
    mean keys, nearest centroids, the oracle, exact top-k, and buckets of random directions (Reformer's hashing)."""
    device, length = resolve_device(options.device), options.length
    loaded = load_model(options.model, device=options.device,
                        rope_scaling=yarn(length) if options.yarn else None)
    with tempfile.TemporaryDirectory() as place:
        stores: dict[str, CaptureStore] = {}
        for name, count in (("train", options.documents), ("heldout", 1)):
            stores[name] = run_capture(CaptureConfig(
                model=options.model, corpus=options.text, split=name, output=f"{place}/{name}", layers=options.layers,
                context_length=length, num_documents=count, queries_per_document=options.queries, chunk_size=1024,
                sink_size=1, window_size=options.tail), model=loaded[0], tokenizer=loaded[1])
        del loaded
        began = time.perf_counter()
        mlp = train_router(RouterConfig(
            capture=str(stores["train"].path), output=f"{place}/router", preset="saap", num_buckets=options.buckets,
            hidden_size=options.hidden, max_steps=options.steps, lr=options.lr, key_space=options.space,
            window_size=options.tail, validation_documents=1, device=device)).to(device)
        seconds = time.perf_counter() - began
        found = saap_masses(stores["heldout"], mlp, device, options.measured)
    said = {"length": length, "space": options.space, "options": f"buckets={options.buckets} hidden={options.hidden} "
            f"steps={options.steps} lr={options.lr:g} sink=1 window={options.tail} layers={options.layers} "
            f"documents={options.documents} queries={options.queries} measured={options.measured}"}
    case = f"saap, {name_of(options.model)}, {length} tokens, {options.space}, C = {options.buckets}"
    trained = f"mlp, hidden {options.hidden}, {options.steps} steps at {options.lr:g}"
    rows = [row(case, method.replace("mlp", trained), metric, round(value, 4), "share", **said)
            for (method, metric), value in found.items()]
    return [*rows, row(case, trained, "train_seconds", round(seconds, 1), "seconds", **said)]


def saap_masses(store: CaptureStore, mlp: RouterArtifact, device: str, count: int) -> dict[tuple[str, str], float]:
    """Means over layers, heads and queries of the second half of held-out windows."""
    directions = torch.randn(mlp.centroids.shape, generator=torch.Generator().manual_seed(1)).to(mlp.centroids)
    hashing = RouterArtifact(mlp.config, torch.nn.functional.normalize(directions, dim=-1), mlp.weights)
    untrained = RouterArtifact(replace(mlp.config, scores="mean_key"), mlp.centroids, None)
    sums: dict[tuple[str, str], list[float]] = {}
    for request in measured(store, list(range(store.num_documents)), device, count):
        share, view, queries = mid_share(request), request.view, request.queries
        model, means, hashed = (router_of(a, request) for a in (mlp, untrained, hashing))
        for budget in BUDGETS:
            reads = {"mlp": spend(model, view, queries, budget), "mean_key": spend(means, view, queries, budget),
                     "centroids": nearest_centroids(request, model, budget),
                     "hashing": nearest_centroids(request, hashed, budget),
                     "oracle": best_buckets(request, model, share, budget),
                     "topk": request.build(reader(budget), None)[0].select(view, queries)}
            for name, selection in reads.items():
                sums.setdefault((name, f"mass_share@{budget}"), []).append(float(mass_read(share, selection).mean()))
        model.probes, model.token_budget = PROBES, None
        whole = model.select(view, queries)
        sums.setdefault(("mlp, whole buckets", f"mass_share@{PROBES} buckets"), []).append(
            float(mass_read(share, whole).mean()))
        sums.setdefault(("mlp, whole buckets", "selectivity"), []).append(
            float(whole.counts().float().mean()) / int(view.regions.mid_sizes[0]))
    return {key: statistics.mean(values) for key, values in sums.items()}


def completion(options: argparse.Namespace) -> Rows:
    """Relative error of the output with the paper's own maps (`phi_paper`) beside ours (`phi`), trained on the same
    stores: sink and tail alone, and exact top-k by budget."""
    device, folder = resolve_device(options.device), Path(options.keep)
    place, began = folder / "phi_paper", time.perf_counter()
    train_phi(PhiConfig(capture=str(folder / "train"), output=str(place), preset="completion", device=device,
                        max_steps=options.steps, validation_documents=4, resume=place.exists()))
    rows = [row("completion", "phi_paper", "train_seconds", round(time.perf_counter() - began, 1), "seconds")]
    maps = {name: side_by_side(PhiArtifact.load(folder / name).to(device), gated=False)
            for name in ("phi", "phi_paper") if (folder / name).is_dir()}
    for domain in ("heldout", "ood"):
        store, found = CaptureStore.open(folder / domain), dict[tuple[str, str], list[float]]()
        for request in measured(store, list(range(store.num_documents)), device):
            estimators: dict[str, Estimator] = {name: PhiEstimator(layer) for name, layer in maps.items()}
            for estimator in estimators.values():
                estimator.build(request.prefill)
            for budget in (None, *BUDGETS):
                selection = request.build(reader(budget), None)[0].select(request.view, request.queries)
                for name, error in errors(request, selection, estimators, budget or 0.0).items():
                    case = "sink + tail" if budget is None else f"topk@{budget}"
                    found.setdefault((case, name), []).append(float(error))
        rows += [row(f"completion, {domain}, {case}", name, "rel_err", round(statistics.mean(x), 4), "relative L2",
                     steps=options.steps) for (case, name), x in found.items()]
    return rows


def lfps(options: argparse.Namespace) -> Rows:
    """Share of the keys that are scored, by α (the paper's table 4), and of the heads not searched (its table 3)."""
    model, tokenizer = load_model(options.model, device=options.device)
    text = Path(options.text).read_text(encoding="utf-8")
    ids = torch.tensor([tokenizer(text[len(text) // 2:][:12 * options.length]).input_ids[:options.length]],
                       device=model.device)
    cache = prefilled(model, ids)
    case, rows = f"lfps, {name_of(options.model)}, {options.length} tokens", []
    for shared in (False, True):
        for alpha in (0.1, 0.2, 0.3, 0.4):
            with sparsekv.attach(model, selector="lfps", token_budget=1.0, alpha=alpha, per_query_head=not shared,
                                 dense_below=0) as attachment:
                attachment.generate(ids[:, -1:], torch.ones_like(ids), max_new_tokens=options.new, cache=cache.fork())
                found = attachment.report()["selector"]
            method = f"alpha={alpha}" + (", a list a group" if shared else "")
            rows += [row(case, method, name, round(value, 4), "share", length=options.length, alpha=alpha)
                     for name, value in found.items()]
    return rows


def faiss(options: argparse.Namespace) -> Rows:
    """Needles found, output error and milliseconds a token of exact and approximate indices (top-k paper, §4)."""
    methods = [f"faiss:factory={f}:per_query_head=true" for f in ("flat", "ivf", "hnsw")]
    return answers(options, methods, "faiss")


def sweep(options: argparse.Namespace) -> Rows:
    """Every rival with every setting: score and error of the attention's output at equal budgets."""
    return answers(options, [m for tried in SWEEP.values() for m in tried if not options.methods
                             or m.partition(":")[0] in options.methods.split(",")], "sweep")


def extrapolate(options: argparse.Namespace) -> Rows:
    """Prompts longer than the model's trained context: dense, and read by TokenSelect as published, with the model's
    own positions and with contiguous ones."""
    model, tokenizer = load_model(options.model, device=options.device)
    ways: dict[str, dict[str, Any]] = {"dense": {"selector": "dense"}}
    for name, contiguous in (("token_select", False), ("token_select, contiguous", True)):
        ways[name] = {"selector": "token_select", "extrapolate": contiguous, **TokenSelect.PUBLISHED}
    rows = []
    for case, requests in by_case(options).items():
        for name, given in ways.items():
            scores, seconds = [], []
            for request in requests:
                ids = torch.tensor([request.tokens(tokenizer)], device=model.device)
                with sparsekv.attach(model, dense_below=0, dense_layers=(), **given) as attachment:
                    began = time.perf_counter()
                    cache = attachment.prefill(ids[:, :-1])
                    settle(ids)
                    seconds.append(time.perf_counter() - began)
                    out = attachment.generate(ids[:, -1:], torch.ones_like(ids), cache=cache,
                                              max_new_tokens=limit(request))
                scores.append(100 * score(request, text_of(tokenizer, out[0, 1:])))
            rows += [row(f"extrapolate, {name_of(options.model)}, {case}", name, metric, round(statistics.mean(x), 3),
                         unit, samples=len(x), length=requests[0].length)
                     for metric, x, unit in (("score", scores, "points of 100"), ("prefill_s", seconds, "seconds"))]
            print(rows[-2]["case"], name, rows[-2]["value"], flush=True)
    return rows


def answers(options: argparse.Namespace, names: list[str], part: str) -> Rows:
    """Score, relative error of the attention's output, share of tokens and bytes read, and time a token, of methods on
    requests, sink 4 and window 16: means over the requests of all tasks of a length."""
    model, tokenizer = load_model(options.model, device=options.device)
    methods = parse_methods(names, options.budgets)
    found: dict[tuple[int, str, float | None, str], list[float]] = {}
    for requests in by_case(options).values():
        for request in requests:
            ids = torch.tensor([request.tokens(tokenizer)], device=model.device)
            cache = prefilled(model, ids)
            for method in methods:
                with sparsekv.attach(model, selector=method.selector, token_budget=method.budget, dense_below=0,
                                     sink_size=4, window_size=16, **dict(method.options)) as attachment:
                    attachment.compares = True
                    began = time.perf_counter()
                    out = attachment.generate(ids[:, -1:], torch.ones_like(ids), cache=cache.fork(),
                                              max_new_tokens=min(limit(request), options.new))
                    settle(ids)
                    spent = time.perf_counter() - began
                    report = attachment.report()
                answer = text_of(tokenizer, out[0, 1:])
                values = {"rel_err": report["rel_err"], "read": report["selectivity_sparse"],
                          "bytes_share": report["bytes_share"], "ms_a_token": 1e3 * spent / max(1, out.shape[1] - 1)}
                if options.new >= limit(request):
                    values["score"] = 100 * score(request, answer)
                for metric, value in values.items():
                    found.setdefault((request.length, method.name, method.budget, metric), []).append(value)
            print(f"{request.case} {request.index}", flush=True)
    units = {"score": "points of 100", "rel_err": "relative L2", "ms_a_token": "milliseconds"}
    return [row(f"{part}, {name_of(options.model)}, {length} tokens", method, metric, round(statistics.mean(x), 4),
                units.get(metric, "share"), budget=budget, samples=len(x), length=length)
            for (length, method, budget, metric), x in found.items()]


def million(options: argparse.Namespace) -> Rows:
    """One KV head of an 8B shape, keys in host memory under Faiss: recall of the exact best k, milliseconds a step of
    its group (top-k paper, figures 2 and 6). Keys are random ones around random centres, a query is near one."""
    length, dim, group, k = options.length, SHAPE["dim"], SHAPE["heads_q"] // SHAPE["heads_kv"], 256
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(1024, dim, generator=g)
    keys = centres[torch.randint(1024, (length,), generator=g)] + torch.randn(length, dim, generator=g)
    q = 0.5 * (keys[torch.randint(length, (group,), generator=g)] + torch.randn(group, dim, generator=g))
    keys, case, rows, exact = keys[None, None], f"million, {length} tokens, one KV head", [], None
    view = LayerView(keys, keys, Regions.at_prefill_end(torch.zeros(1, dtype=torch.long), length, 4, 16), dim**-0.5,
                     group)
    queries = Queries.last(q[None, :, None], length)
    for factory in ("flat", "ivf", *(("hnsw",) if options.hnsw else ())):
        selector = SELECTORS["faiss"](token_budget=k, factory=factory, per_query_head=True)
        selector.prepare(view)
        began = time.perf_counter()
        selector.build(view)
        built = time.perf_counter()
        lists = [set(x.tolist()) for x in selector.select(view, queries).as_tokens()[0]]
        selected = time.perf_counter()
        exact = exact or lists
        recall = statistics.mean(len(a & b) / k for a, b in zip(lists, exact, strict=True))
        rows += [row(case, factory, metric, round(value, 4), unit, length=length, k=k) for metric, value, unit in (
            ("recall", recall, "share"), ("ms", 1e3 * (selected - built), "milliseconds a group's step"),
            ("build_s", built - began, "seconds"))]
    return rows


def chunk(options: argparse.Namespace) -> Rows:
    """Attention of one chunk of 512 tokens of a prompt after a cache, a layer of an 8B shape: all of it, and read by
    TokenSelect as published (its figure 7)."""
    device, length, rows = resolve_device(options.device), options.length, []
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    g = torch.Generator(device).manual_seed(0)
    k, v = (torch.randn(1, SHAPE["heads_kv"], length, SHAPE["dim"], generator=g, device=device, dtype=dtype)
            for _ in range(2))
    published = TokenSelect.PUBLISHED
    count = published["prefill_chunk"]
    q = torch.randn(1, SHAPE["heads_q"], count, SHAPE["dim"], generator=g, device=device, dtype=dtype)
    regions = Regions.at_prefill_end(torch.zeros(1, dtype=torch.long, device=device), length, published["sink_size"],
                                     published["window_size"])
    view = LayerView(k, v, regions, SHAPE["dim"]**-0.5, SHAPE["heads_q"])
    selector = TokenSelect(token_budget=published["token_budget"], prefill_chunk=count)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "dense": lambda: dense_attention(q, k, v, scale=view.scale),
        "token_select": lambda: prefill_chunks(view, q, selector, published["window_size"])}
    for name, work in ways.items():
        work()
        times = []
        for _ in range(options.repeats):
            settle(q)
            began = time.perf_counter()
            work()
            settle(q)
            times.append(1e3 * (time.perf_counter() - began))
        rows.append(row(f"chunk of {count} after {length} tokens, 32/8 heads of 128", name, "ms",
                        round(statistics.median(times), 4), "milliseconds", length=length))
    return rows


PARTS: dict[str, tuple[Callable[[argparse.Namespace], Rows], tuple[str, ...]]] = {
    "saap": (saap, ("model", "text")), "completion": (completion, ("keep",)), "lfps": (lfps, ("model", "text")),
    "faiss": (faiss, ("model", "requests")), "million": (million, ()), "chunk": (chunk, ()),
    "extrapolate": (extrapolate, ("model", "requests")), "sweep": (sweep, ("model", "requests"))}
"""What every part calls, and the options that it cannot do without."""


def prefilled(model: Any, ids: torch.Tensor) -> Any:
    """A cache of all tokens but the last, read densely."""
    with sparsekv.attach(model, selector="dense") as dense:
        return dense.prefill(ids[:, :-1], chunk_size=4096)


def by_case(options: argparse.Namespace) -> dict[str, list[Request]]:
    """The first `--samples` requests of every task and length."""
    found: dict[str, list[Request]] = {}
    for request in load_requests(options.requests):
        wanted = found.setdefault(request.case, [])
        if len(wanted) < options.samples:
            wanted.append(request)
    return found


def limit(request: Request) -> int:
    return TOKENS_NEEDED.get(request.task, request.max_new_tokens)


def text_of(tokenizer: Any, tokens: torch.Tensor) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def name_of(model: str) -> str:
    """What a model is called in rows."""
    return Path(model.removeprefix("package:")).name


def settle(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def kept(rows: Rows, folder: Path) -> Rows:
    """Rows of earlier runs that these do not replace."""
    file = folder / "papers.json"
    here = {(r["case"], r["method"], r["metric"], r.get("budget")) for r in rows}
    earlier = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    return [r for r in earlier
            if r["machine"] != machine() or (r["case"], r["method"], r["metric"], r.get("budget")) not in here]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", required=True, choices=PARTS)
    parser.add_argument("--model")
    parser.add_argument("--text")
    parser.add_argument("--requests")
    parser.add_argument("--keep", help="completion: the folder of `benchmarks/training.py --keep`")
    parser.add_argument("--steps", type=int, help="of training [default: the preset's]")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=16, help="requests of a task and length")
    parser.add_argument("--budgets", type=lambda t: [float(x) for x in t.split(",")], default=[0.02])
    parser.add_argument("--methods", help="rivals of the sweep; all without it")
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer, at most")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hnsw", action="store_true", help="million: HNSW too, whose building takes long")
    saaps = parser.add_argument_group("saap")
    saaps.add_argument("--layers", default="6,16,26")
    saaps.add_argument("--documents", type=int, default=32, help="windows to train on, one for validation with them")
    saaps.add_argument("--queries", type=int, default=2048, help="captured of a window")
    saaps.add_argument("--measured", type=int, default=64, help="queries measured of a held-out window")
    saaps.add_argument("--buckets", type=int, default=1024)
    saaps.add_argument("--hidden", type=int, default=1024)
    saaps.add_argument("--lr", type=float, default=1e-5)
    saaps.add_argument("--space", choices=("pre", "rot"), default="pre")
    saaps.add_argument("--tail", type=int, default=2047, help="local window, and as many tokens that no target counts")
    saaps.add_argument("--yarn", action="store_true", help="stretch a model of 8192 positions to the length")
    options = parser.parse_args()
    options.steps = options.steps or {"saap": 40_000, "completion": 22_000}.get(options.part)
    part, needed = PARTS[options.part]
    for name in needed:
        if getattr(options, name) is None:
            parser.error(f"--part {options.part} needs --{name}")
    began = time.perf_counter()
    rows = part(options)
    path = write_rows("papers", [*kept(rows, options.output), *rows], options.output)
    for r in rows:
        print(f"{r['case']}: {r['method']} {r['metric']} {r['value']}")
    print(f"{path}, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
