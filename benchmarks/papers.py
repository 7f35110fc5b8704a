"""The papers' systems as published, and the rivals' settings: the rows of docs/results/papers.json, told in
docs/papers.md.

    python benchmarks/papers.py --part saap,completion --model MODEL --text FILE.txt [--length 8192] [--quick]
    python benchmarks/papers.py --part lfps --model MODEL --text FILE.txt [--length 4096]
    python benchmarks/papers.py --part faiss --model MODEL --requests FILE [--lengths 4096]
    python benchmarks/papers.py --part chunk [--lengths 32768,131072]
    python benchmarks/papers.py --part extrapolate --model MODEL --requests FILE [--lengths 16384]
    python benchmarks/papers.py --part sweep --cells FOLDER --name MODEL

FILE of requests is made by `benchmarks/quality.py --make-prompts FILE`; FOLDER of cells by `benchmarks/quality.py
--methods sweep --output FOLDER`. Parts that are named together share one capture. Rows of earlier runs stay in
`--output`, but for those of the same case, method, metric and machine; several processes may write there.
"""

from __future__ import annotations

import argparse
import contextlib
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
from benchmarks._rows import RESULTS, add_rows, row
from benchmarks._training import BUDGETS, errors, measured, nearest_centroids, router_of, side_by_side, spend
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.capture.run import CaptureConfig, run_capture
from sparsekv.core.estimators import Estimator, PhiEstimator
from sparsekv.core.layer import LayerView, Selection
from sparsekv.core.offline import best_buckets, mass_read, mid_share
from sparsekv.core.prefill import prefill_chunks
from sparsekv.core.regions import Regions
from sparsekv.core.selectors.token_select import TokenSelect
from sparsekv.evaluation.cells import collect
from sparsekv.evaluation.methods import parse_methods
from sparsekv.evaluation.requests import first_of_each, load_requests, score
from sparsekv.evaluation.scores import score_rows
from sparsekv.kernels import dense_attention
from sparsekv.runtime.attach import RunOptions
from sparsekv.sources.hub import load_model, resolve_device
from sparsekv.store.manifest import MANIFEST
from sparsekv.store.store import CaptureStore
from sparsekv.trainers.calibrate import reader
from sparsekv.trainers.phi import PhiConfig, train_phi
from sparsekv.trainers.router import RECIPES, RouterConfig, train_router

Rows = list[dict[str, Any]]
SHAPE = {"heads_q": 32, "heads_kv": 8, "dim": 128}
"""Of a layer of an 8B model."""
SAAP = RECIPES["saap"]


def yarn(length: int) -> str | None:
    """Rope scaling of a model of 8192 positions to a longer context."""
    return json.dumps({"rope_type": "yarn", "factor": float(-(-length // 8192))}) if length > 8192 else None


def stores(options: argparse.Namespace, names: tuple[str, ...]) -> dict[str, CaptureStore]:
    """Captures of the text's training part, of its held-out part, and of other text (`ood`), in `--keep`; those that
    are there already are opened."""
    wanted = [name for name in names if not (options.keep / name / MANIFEST).is_file()]
    if wanted:
        model, tokenizer = load_model(options.model, device=options.device,
                                      rope_scaling=yarn(options.length) if options.yarn else None)
        for name in wanted:
            run_capture(CaptureConfig(
                model=options.model, corpus="embedded" if name == "ood" else options.text,
                split="all" if name == "ood" else name, output=str(options.keep / name), layers=options.layers,
                context_length=options.length, queries_per_document=options.queries, chunk_size=1024, seed=1,
                num_documents=options.documents if name == "train" else options.heldout), model=model,
                tokenizer=tokenizer)
    return {name: CaptureStore.open(options.keep / name) for name in names}


def saap(options: argparse.Namespace) -> Rows:
    """Share of the mid region's attention that is read, by budget and by ℓ: the paper's query model on the paper's
    buckets, mean keys, nearest centroids, the oracle, exact top-k, and buckets of random directions (Reformer's
    hashing)."""
    device, captured = resolve_device(options.device), stores(options, ("train", "heldout"))
    per_head = -(-1000 // captured["train"].group)  # 1000 queries a step of every query model
    name, given = "as published", {"max_steps": options.steps, "lr": 1e-5}
    if options.quick:
        name, given = "shorter training", {"max_steps": 8000, "lr": 1e-4}
    case = f"saap, {name_of(options.model)}, {options.length} tokens"
    said = {"length": options.length, "options": f"layers={options.layers} documents={options.documents} "
            f"queries={options.queries} sink=1 window={options.tail} measured={options.measured} "
            f"queries_a_step={per_head * captured['train'].group}"}
    given |= {"num_buckets": options.buckets, "hidden_size": options.hidden, "batch_size": per_head}
    with tempfile.TemporaryDirectory() as place:
        began = time.perf_counter()
        made = train_router(
            RouterConfig(capture=str(captured["train"].path), output=place, preset="saap", validation_documents=1,
                         device=device, overwrite=True),
            replace(SAAP, window_size=options.tail, **given)).to(device)
        spent = round(time.perf_counter() - began, 1)
    rows = [row(case, name, "train_seconds", spent, "seconds", **said,
                training=" ".join(f"{k}={v}" for k, v in given.items()))]
    print(f"{case}: {name} in {spent} s", flush=True)
    found = saap_masses(captured["heldout"], name, made, device, options)
    return rows + [row(case, method, metric, round(value, 4), "share", **said)
                   for (method, metric), value in found.items()]


def saap_masses(store: CaptureStore, name: str, artifact: RouterArtifact, device: str, options: argparse.Namespace,
                ) -> dict[tuple[str, str], float]:
    """Means over layers, heads and queries of the second half of held-out windows."""
    sums: dict[tuple[str, str], list[float]] = {}
    documents, buckets = list(range(store.num_documents)), artifact.config.num_buckets
    place = f"C = {buckets}, " + ("with RoPE" if artifact.config.key_space == "rot" else "without RoPE")
    generator = torch.Generator().manual_seed(1)
    directions = torch.randn(artifact.centroids.shape, generator=generator).to(artifact.centroids)
    hashing = RouterArtifact(artifact.config, torch.nn.functional.normalize(directions, dim=-1), artifact.weights)
    mean_key = RouterArtifact(replace(artifact.config, scores="mean_key"), artifact.centroids, None)
    # a capture's own sink and window are not the paper's
    for request in measured(store, documents, device, options.measured, artifact.config.sink_size,
                            artifact.config.window_size):
        share, view, queries = mid_share(request), request.view, request.queries

        def note(method: str, metric: str, selection: Selection) -> None:
            sums.setdefault((method, metric), []).append(float(mass_read(share, selection).mean()))  # noqa: B023

        for budget in BUDGETS:
            note("topk", f"mass_share@{budget}", request.build(reader(budget), None)[0].select(view, queries))
        model, untrained, hashed = (router_of(a, request) for a in (artifact, mean_key, hashing))
        for budget in BUDGETS:
            for what, selection in (
                    (name, spend(model, view, queries, budget)),
                    (f"mean_key, {place}", spend(untrained, view, queries, budget)),
                    (f"centroids, {place}", nearest_centroids(request, model, budget)),
                    (f"hashing, {place}", nearest_centroids(request, hashed, budget)),
                    (f"oracle, {place}", best_buckets(request, model, share, budget))):
                note(what, f"mass_share@{budget}", selection)
        model.token_budget = None
        for probes in (buckets // 128, buckets // 32, buckets // 8):
            model.probes = max(1, probes)
            whole = model.select(view, queries)
            note(name, f"mass_share@{model.probes} buckets", whole)
            sums.setdefault((name, f"selectivity@{model.probes} buckets"), []).append(
                float(whole.counts().float().mean()) / int(view.regions.mid_sizes[0]))
    return {key: statistics.mean(values) for key, values in sums.items()}


def completion(options: argparse.Namespace) -> Rows:
    """Relative error of the output with the paper's own maps (`phi_paper`) beside ours (`phi`), both trained on one
    capture for as many steps: sink and tail alone, and exact top-k by budget."""
    device, captured, maps, rows = resolve_device(options.device), stores(options, ("train", "heldout", "ood")), {}, []
    case = f"completion, {name_of(options.model)}, {options.length} tokens"
    said = {"length": options.length, "options": f"layers={options.layers} documents={options.documents} "
            f"steps={options.phi_steps} measured={options.measured}"}
    for name, preset in (("phi_paper", "completion"), ("phi", "default")):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as place:
            made = train_phi(PhiConfig(capture=str(captured["train"].path), output=place, preset=preset, device=device,
                                       max_steps=options.phi_steps, validation_documents=options.heldout,
                                       overwrite=True))
        maps[name] = side_by_side(made.to(device), gated=False)
        rows.append(row(case, name, "train_seconds", round(time.perf_counter() - began, 1), "seconds", **said))
        print(f"{case}: {name} in {rows[-1]['value']} s", flush=True)
    for domain in ("heldout", "ood"):
        store, found = captured[domain], dict[tuple[str, str], list[float]]()
        for request in measured(store, list(range(store.num_documents)), device, options.measured):
            estimators: dict[str, Estimator] = {name: PhiEstimator(layer) for name, layer in maps.items()}
            for estimator in estimators.values():
                estimator.build(request.prefill)
            for budget in (None, *BUDGETS):
                selection = request.build(reader(budget), None)[0].select(request.view, request.queries)
                for name, error in errors(request, selection, estimators, budget or 0.0).items():
                    what = "sink + tail" if budget is None else f"topk@{budget}"
                    found.setdefault((what, name), []).append(float(error))
        rows += [row(f"{case}, {domain}, {what}", name, "rel_err", round(statistics.mean(x), 4), "relative L2", **said)
                 for (what, name), x in found.items()]
    return rows


def lfps(options: argparse.Namespace) -> Rows:
    """Share of the keys that are scored, by α (the paper's table 4), and of the heads not searched (its table 3)."""
    model, tokenizer = load_model(options.model, device=options.device)
    text = Path(options.text).read_text(encoding="utf-8")
    ids = torch.tensor([tokenizer(text[len(text) // 2:][:12 * options.length]).input_ids[:options.length]],
                       device=model.device)
    with sparsekv.attach(model, selector="dense") as dense:
        cache = dense.prefill(ids[:, :-1], chunk_size=4096)
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


def sweep(options: argparse.Namespace) -> Rows:
    """Every rival with every setting at equal budgets, from the cells of `quality.py --methods sweep`: RULER's score,
    how much of full attention's answers is given before the first character that differs, bytes read."""
    rows = [r for r in score_rows(collect(options.cells)) if r["case"].startswith("ruler@")]
    if not rows:
        raise SystemExit(f"{options.cells} lacks cells of some tasks; run `quality.py --methods sweep` to its end")
    rows = [r for r in rows if r["metric"] in ("score", "agreement") and r["value"] is not None]
    return [{**r, "case": f"sweep, {options.name}, {r['length']} tokens"} for r in rows]


def extrapolate(options: argparse.Namespace) -> Rows:
    """Prompts longer than the model's trained context: dense, and read by TokenSelect as published, with the model's
    own positions and with contiguous ones; means over all tasks of a length."""
    model, tokenizer = load_model(options.model, device=options.device)
    ways: dict[str, dict[str, Any]] = {"dense": {"selector": "dense"}}
    for name, contiguous in (("token_select", False), ("token_select, contiguous", True)):
        ways[name] = {"selector": "token_select", "extrapolate": contiguous, **TokenSelect.PUBLISHED}
    found: dict[tuple[int, str, str], list[float]] = {}
    tasks: dict[int, dict[str, None]] = {}
    for request in first_of_each(load_requests(options.requests), options.samples, options.lengths or ()):
        tasks.setdefault(request.length, {})[request.task] = None
        ids = torch.tensor([request.tokens(tokenizer)], device=model.device)
        for name, given in ways.items():
            with sparsekv.attach(model, dense_below=0, dense_layers=(), **given) as attachment:
                began = time.perf_counter()
                cache = attachment.prefill(ids[:, :-1])
                settle(ids)
                spent = time.perf_counter() - began
                out = attachment.generate(ids[:, -1:], torch.ones_like(ids), cache=cache,
                                          max_new_tokens=request.answer_tokens)
            answer = text_of(tokenizer, out[0, 1:])
            for metric, value in (("score", 100 * score(request, answer)), ("prefill_s", spent)):
                found.setdefault((request.length, name, metric), []).append(value)
        print(f"{request.case} {request.index}", flush=True)
    units = {"score": "points of 100", "prefill_s": "seconds"}
    return [row(f"extrapolate, {name_of(options.model)}, {length} tokens", name, metric, round(statistics.mean(x), 3),
                units[metric], samples=len(x), length=length, tasks=",".join(tasks[length]))
            for (length, name, metric), x in found.items()]


def faiss(options: argparse.Namespace) -> Rows:
    """Score, error of the attention's output, share of tokens and bytes read, and time a token, of exact and
    approximate indices in CPU memory (top-k paper, §4): means over the requests of all tasks of a length."""
    model, tokenizer = load_model(options.model, device=options.device)
    methods = parse_methods([f"faiss:factory={f}:per_query_head=true" for f in ("flat", "ivf", "hnsw")],
                            options.budgets)
    found: dict[tuple[int, str, float | None, str], list[float]] = {}
    for request in first_of_each(load_requests(options.requests), options.samples, options.lengths or ()):
        ids = torch.tensor([request.tokens(tokenizer)], device=model.device)
        with sparsekv.attach(model, selector="dense") as dense:
            cache = dense.prefill(ids[:, :-1], chunk_size=4096)
        for method in methods:
            with sparsekv.attach(model, selector=method.selector, token_budget=method.budget, dense_below=0,
                                 sink_size=4, window_size=16, run=RunOptions(compares=True),
                                 **dict(method.options)) as attachment:
                began = time.perf_counter()
                out = attachment.generate(ids[:, -1:], torch.ones_like(ids), cache=cache.fork(),
                                          max_new_tokens=request.answer_tokens)
                settle(ids)
                spent = time.perf_counter() - began
                report = attachment.report()
            values = {"rel_err": report["rel_err"], "read": report["selectivity_sparse"],
                      "bytes_share": report["bytes_share"], "index_s": report["index_seconds"],
                      "ms_a_token": 1e3 * (spent - report["index_seconds"]) / max(1, out.shape[1] - 1),
                      "score": 100 * score(request, text_of(tokenizer, out[0, 1:]))}
            for metric, value in values.items():
                found.setdefault((request.length, method.name, method.budget, metric), []).append(value)
        print(f"{request.case} {request.index}", flush=True)
    units = {"score": "points of 100", "rel_err": "relative L2", "ms_a_token": "milliseconds", "index_s": "seconds"}
    return [row(f"faiss, {name_of(options.model)}, {length} tokens", method, metric, round(statistics.mean(x), 4),
                units.get(metric, "share"), budget=budget, samples=len(x), length=length)
            for (length, method, budget, metric), x in found.items()]


def chunk(options: argparse.Namespace) -> Rows:
    """`chunk_after` at every length."""
    return [r for length in options.lengths or [options.length] for r in chunk_after(length, options)]


def chunk_after(length: int, options: argparse.Namespace) -> Rows:
    """A layer of an 8B shape, all of the attention and read by TokenSelect as published: one chunk of 512 tokens of a
    prompt after a cache (its figure 7); and, up to `--whole` tokens, the prompt from its first token to its last."""
    device, rows = resolve_device(options.device), []
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    g = torch.Generator(device).manual_seed(0)
    k, v = (torch.randn(1, SHAPE["heads_kv"], length, SHAPE["dim"], generator=g, device=device, dtype=dtype)
            for _ in range(2))
    published = TokenSelect.PUBLISHED
    count = published["prefill_chunk"]
    regions = Regions.at_prefill_end(torch.zeros(1, dtype=torch.long, device=device), length, published["sink_size"],
                                     published["window_size"])
    view = LayerView(k, v, regions, SHAPE["dim"]**-0.5, SHAPE["heads_q"])
    selector = TokenSelect(token_budget=published["token_budget"], prefill_chunk=count)
    for new in (count, *((length,) if length <= options.whole else ())):
        q = torch.randn(1, SHAPE["heads_q"], new, SHAPE["dim"], generator=g, device=device, dtype=dtype)
        ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "dense": lambda q: dense_attention(q, k, v, scale=view.scale),
            "token_select": lambda q: prefill_chunks(view, q, selector, published["window_size"])}
        what = f"chunk of {count} after" if new == count else "prompt of"
        for name, work in ways.items():
            work(q)
            times = []
            for _ in range(options.repeats):
                settle(q)
                began = time.perf_counter()
                work(q)
                settle(q)
                times.append(1e3 * (time.perf_counter() - began))
            rows.append(row(f"{what} {length} tokens, 32/8 heads of 128", name, "ms",
                            round(statistics.median(times), 4), "milliseconds", length=length))
    return rows


PARTS: dict[str, tuple[Callable[[argparse.Namespace], Rows], tuple[str, ...]]] = {
    "saap": (saap, ("model", "text")), "completion": (completion, ("model", "text")), "lfps": (lfps, ("model", "text")),
    "faiss": (faiss, ("model", "requests")), "chunk": (chunk, ()),
    "extrapolate": (extrapolate, ("model", "requests")), "sweep": (sweep, ("cells", "name"))}
"""What every part calls, and the options that it cannot do without."""


def text_of(tokenizer: Any, tokens: torch.Tensor) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def name_of(model: str) -> str:
    """What a model is called in rows."""
    return Path(model.removeprefix("package:")).name


def settle(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def numbers(kind: type) -> Callable[[str], list[Any]]:
    return lambda text: [kind(x) for x in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=lambda text: text.split(","), default=[], help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--model")
    parser.add_argument("--text")
    parser.add_argument("--requests")
    parser.add_argument("--cells", type=Path, help="sweep: the output of `quality.py --methods sweep`")
    parser.add_argument("--name", help="sweep: what the model is called in rows")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--lengths", type=numbers(int), help="of the requests, only these; chunk: these")
    parser.add_argument("--samples", type=int, default=16, help="requests of a task and length")
    parser.add_argument("--budgets", type=numbers(float), default=[0.02])
    parser.add_argument("--new", type=int, default=128, help="lfps: tokens of an answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--whole", type=int, default=131_072, help="chunk: longest prompt that is read from its start")
    trained = parser.add_argument_group("saap and completion")
    trained.add_argument("--keep", type=Path, help="folder of the captures, which the next run finds there")
    trained.add_argument("--layers", default="6,16,26")
    trained.add_argument("--documents", type=int, default=32, help="windows to train on, those for validation with "
                                                                   "them")
    trained.add_argument("--heldout", type=int, default=2, help="windows to measure on, and as many to validate φ on")
    trained.add_argument("--queries", type=int, default=2048, help="captured of a window")
    trained.add_argument("--measured", type=int, default=24, help="queries measured of a held-out window")
    trained.add_argument("--yarn", action="store_true", help="stretch a model of 8192 positions to the length")
    trained.add_argument("--phi-steps", type=int, default=4000)
    trained.add_argument("--steps", type=int, default=40_000, help="of the query model as published")
    trained.add_argument("--quick", action="store_true", help="saap: 8000 steps at 1e-4 instead, for a CPU")
    trained.add_argument("--buckets", type=int, default=1024)
    trained.add_argument("--hidden", type=int, default=1024)
    trained.add_argument("--tail", type=int, default=2047, help="local window, whose tokens no target counts")
    options = parser.parse_args()
    for part in options.part or [""]:
        if part not in PARTS:
            parser.error(f"--part is some of {', '.join(PARTS)}, found {part!r}")
        for name in PARTS[part][1]:
            if getattr(options, name) is None:
                parser.error(f"--part {part} needs --{name}")
    with contextlib.ExitStack() as stack:
        options.keep = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for part in options.part:
            began = time.perf_counter()
            rows = PARTS[part][0](options)
            path = add_rows("papers", rows, options.output)
            print(f"{part}: {path}, {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
