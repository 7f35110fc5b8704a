"""docs/results/decode.md and generate.md, with a figure each, from decode.json and generate.json. A table is of one
card and one commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks._first_page import card
from sparsekv.evaluation.canvas import INK, Drawing, canvas, drawn, written
from sparsekv.evaluation.tables import markdown

Rows = Sequence[dict[str, Any]]

STEPS = {
    "sdpa_cudnn": "full attention, cuDNN", "sdpa_flash": "full attention, FlashAttention",
    "flashinfer": "full attention, FlashInfer", "flex": "full attention, FlexAttention",
    "sparse": "buckets, 3.1 %", "sparse_phi": "buckets, 3.1 % + φ", "sparse_mlp": "buckets by a query model, 3.1 %",
    "sparse_probes": "32 buckets, whole", "sparse_sketch": "sketch, 1 %", "sparse_sketch_phi": "sketch, 1 % + φ",
    "sparse_sketch_tenth": "sketch, codes of a tenth", "sparse_sketch_all": "sketch, all codes",
    "sparse_sketch_flat": "sketch, equal scores", "floor": "bytes alone",
    "route_only": "choice of buckets alone", "attention_only": "attention alone", "buckets_only": "buckets' attention"}
"""What decode.json calls a step, and what it is; full attention first."""
DENSE = {"ours": "ours", "sdpa_cudnn": "cuDNN", "flashinfer": "FlashInfer", "sdpa_flash": "FlashAttention",
         "floor": "bytes alone"}
OPERATIONS = {
    "prefill": "the layer's own prefill", "assign": "a bucket for every key", "build_index": "list of every bucket",
    "extend_index": "tokens that join later", "soft_vote": "TokenSelect's vote", "phi_summary": "φ's whole summary",
    "sketch_fitted": "codes, basis of the request", "sketch_fixed": "codes, basis of the artifact"}
"""What decode.json calls a part of a prefill, and what it is; `_torch`: in plain torch."""
EARLIER = ("e7d6883", "8b2d5e3", "b7124e2", "54aa91f", "5d3afc0")
"""Commits of decode.json that have other kernels than those that ship."""
GROWTH = ("sdpa_cudnn", "sparse_sketch", "sparse_sketch_phi", "sparse")
TOKENS = {"dense": "full attention", "router": "buckets, 3.1 %", "router_phi": "buckets, 3.1 % + φ",
          "sketch": "sketch, 1 %", "sketch_phi": "sketch, 1 % + φ",
          "default": "`attach` by itself, 5 %", "transformers": "transformers",
          "transformers_compiled": "transformers, compiled"}
METRICS = {"loop_ms": "a token, lean loop [ms]", "generate_ms": "a token, `generate` [ms]",
           "first_token_s": "first token [s]", "longest_gap_ms": "longest pause [ms]",
           "cold_gap_ms": "the same, cold [ms]", "index_s": "index [s]", "capture_ms": "a capture [ms]",
           "peak_gb": "most memory [GB]"}


def shape(case: str) -> tuple[str, str, str]:
    """`32x8-128k-b4`: heads, context, rows."""
    heads, context, rows, *more = case.split("-")
    return heads.replace("x", " / "), context + "".join(f", {m}" for m in more), rows.removeprefix("b")


def size(context: str) -> float:
    """`128k` in tokens."""
    number = context.partition(",")[0]
    return float(number[:-1]) * {"k": 2**10, "M": 2**20}[number[-1]]


def runs(rows: Rows) -> list[list[dict[str, Any]]]:
    """The rows of one card and one commit each, the largest run first."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for r in rows:
        found.setdefault((r["machine"], r["commit"]), []).append(r)
    return sorted(found.values(), key=len, reverse=True)


def words(*lines: tuple[str, str]) -> str:
    """A table of two columns of words; the first line is its header."""
    return "\n".join([f"| {' | '.join(lines[0])} |", "| --- | --- |", *(f"| {a} | {b} |" for a, b in lines[1:])])


def number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def steps(rows: Rows) -> str:
    """Microseconds a step, a line a method, a column a shape."""
    values = {(r["case"], r["method"]): r["value"] for r in rows}
    cases = sorted({r["case"] for r in rows}, key=lambda c: (shape(c)[0], size(shape(c)[1]), int(shape(c)[2]), c))
    heads = [f"{heads}, {context}, {n} request{'' if n == '1' else 's'}" for heads, context, n in map(shape, cases)]
    lines = [[STEPS[m], *(number(values.get((case, m))) for case in cases)]
             for m in STEPS if any(r["method"] == m for r in rows)]
    return markdown(["a step [µs]", *heads], lines)


def dense(rows: Rows) -> str:
    """Microseconds of full attention, a line a shape, and the ratio to the faster of cuDNN and FlashInfer."""
    values = {(r["case"], r["method"]): r["value"] for r in rows}
    lines = []
    for case in dict.fromkeys(r["case"] for r in rows):
        _, heads, dim, context, count = case.split("-")
        peers = [values[case, m] for m in ("sdpa_cudnn", "flashinfer") if (case, m) in values]
        lines.append([heads.replace("x", " / "), dim[1:], context, count[1:],
                      *(number(values.get((case, m))) for m in DENSE),
                      f"{values[case, 'ours'] / min(peers):.2f} ×" if peers else "–"])
    return markdown(["query / KV heads", "head dimension", "context [tokens]", "requests",
                     *(f"{name} [µs]" for name in DENSE.values()), "ours, of the faster of two"], lines)


def earlier(run: Rows) -> list[str]:
    """What the page says of a run whose kernels are not those that ship."""
    if run[0]["commit"] not in EARLIER:
        return []
    kept = any(r["case"].endswith("-kept") for r in run)
    return ["What ships has other kernels for index, codes and steps than this commit." + (
        " In columns “kept” φ's features are kept beside the keys. What ships keeps none." if kept else "")]


def decode(rows: Rows) -> str:
    """docs/results/decode.md."""
    layer = [r for r in rows if r["case"].startswith("layer-")]
    timed = [r for r in rows if r["case"][0].isdigit()]
    parts = [
        "# How long does a step of one layer take?",
        "One decode step of one attention layer: one new token for each request of the batch. Everything runs in one "
        "CUDA graph, over rotated copies of the cache, so that nothing is found in the GPU's L2 cache.",
        "![Time of a step by context](decode-growth.png)",
        words(("fixed here", "value"), ("precision, head dimension", "bfloat16, 128"),
              ("sink, local window [tokens]", "1, 2047"), ("buckets", "1024"),
              ("budget of buckets", "3.125 % of the mid region"),
              ("budget of sketches", "1 % of the context, chosen among the codes of a tenth"),
              ("φ", "128 features, half of them centred, capped")),
        "A column is a shape: query / KV heads, context in tokens, requests of the batch. “Bytes alone” is the time "
        "that the chosen keys and values, the anchors and the bucket means take at 4.3 TB/s. “Equal scores” is the "
        "case in which all keys score the same. A table is of one card and one commit; decode.json has the command of "
        "every row. [The log](../log/decode.md) says what was tried."]
    for run in runs(timed):
        parts += [f"## {card(run[0]).replace('one ', '')}", *earlier(run), steps(run)]
    for run in runs([r for r in rows if r["case"].startswith("dense-")]):
        parts += [f"## Full attention, {card(run[0]).replace('one ', '')}",
                  "The kernel that layers with full attention decode with, against its peers. The ratio is to the "
                  "faster of cuDNN and FlashInfer. “–”: a peer did not run. “Bytes alone” is at the bandwidth of the "
                  "card's data sheet.", dense(run)]
    if layer:
        parts.append("## What a prefill adds, one layer")
    for run in runs(layer):
        parts += [f"{card(run[0]).replace('one ', '')}.", *earlier(run), markdown(
            ["operation", "tokens", "time [ms]"],
            [[OPERATIONS.get(r["method"].removesuffix("_torch"), r["method"])
              + (", in plain torch" if r["method"].endswith("_torch") else ""),
              r["case"].removeprefix("layer-").replace("-12x2", ", 12 query and 2 KV heads"), f"{r['value']:.2f}"]
             for r in run])]
    return "\n\n".join(parts) + "\n"


def growth(rows: Rows) -> Drawing:
    """The time of a step by context, one row of 32 query and 8 KV heads, of the newest run that has all of it."""
    chosen = next(r for r in runs([r for r in rows if r["case"][0].isdigit()])
                  if {"sdpa_cudnn", "sparse_sketch"} <= {x["method"] for x in r})
    figure, axes = canvas()
    for method, colour in zip(GROWTH, ("#7f7f7f", "#882255", "#CC79A7", "#D55E00"), strict=True):
        line = sorted((size(shape(r["case"])[1]), r["value"]) for r in chosen
                      if r["method"] == method and r["case"].startswith("32x8") and r["case"].endswith("-b1"))
        axes.plot([x for x, _ in line], [y for _, y in line], color=colour, marker="o", markersize=3.5, linewidth=1.7,
                  label=STEPS[method])
    return context_axes(figure, axes, "a step of one layer [µs]")


def context_axes(figure: Any, axes: Any, what: str, scale: str = "log") -> Drawing:
    """By context, doubling evenly; values on a scale of ratios, or from zero on a linear one."""
    axes.set_xscale("log", base=2)
    axes.set_yscale(scale)
    ticks = [2**13, 2**15, 2**17, 2**19, 2**20]
    low, high = axes.get_xlim()
    ticks = [t for t in ticks if low <= t <= high]
    axes.set_xticks(ticks, [f"{t // 1024}k" if t < 2**20 else "1M" for t in ticks])
    axes.minorticks_off()
    if scale == "log":
        axes.yaxis.set_major_formatter(written)
        low, high = axes.get_ylim()
        marks = [v for v in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000) if low <= v <= high]
        axes.set_yticks(marks, [written(v) for v in marks])
    else:
        axes.set_ylim(bottom=0.0)
    axes.set_xlabel("context [tokens]")
    axes.set_ylabel(what)
    axes.legend(fontsize=8, frameon=False, labelcolor=INK, ncols=4, loc="lower left", bbox_to_anchor=(0.0, 1.0))
    return drawn(figure)


def generate(rows: Rows) -> str:
    """docs/results/generate.md."""
    values = {(r["case"], r["method"], r["metric"], r["machine"], r["commit"]): r["value"] for r in rows}
    budgets = {(r["case"], r["method"], r["machine"], r["commit"]): r.get("budget") for r in rows}
    parts = [
        "# How long does a token of a whole model take?",
        "Models in bfloat16, with random weights, except “coder”. “8b” has the shape of Llama 3.1 8B, “smollm2” "
        "that of SmolLM2-135M, and “coder” is Qwen2.5-Coder-1.5B with its own weights. The quality of answers plays no "
        "part here.",
        "![Time of a token by model, context and requests](generate.png)",
        words(("column", "what it is"),
              ("a token, lean loop", "median of the last 96 of 400 tokens by `attachment.generate`; transformers: a "
               "plain loop, the last 24 of 48"),
              ("a token, `generate`", "the same by `model.generate`"),
              ("first token", "from the call to the first token, prompt and index included"),
              ("longest pause", "between two tokens, the first and the second included; cold: in a method's first "
               "answer of its process, kernels of earlier processes on disk"),
              ("index", "making index and estimate, kernels already loaded; where there is no first token the cache "
               "was drawn and not read, and copying φ's maps is in the index too"),
              ("a capture", "mean of the captures"),
              ("most memory", "the GPU's, weights and cache included")),
        "“`attach` by itself” is what artifacts give without an option: it retrieves 5 % where the lines above it "
        "retrieve 1 %, and decodes densely where that is timed to be faster. The ratio is of a token in the lean loop "
        "to the fastest full attention of the same table. “–”: it was not run, or found no memory. Every row of "
        "generate.json has its command."]
    groups: dict[tuple[str, str, str], list[str]] = {}
    for r in rows:
        groups.setdefault((r["case"].partition(",")[0], r["machine"], r["commit"]), []).append(r["case"])
    for case in dict.fromkeys(c for c, *_ in groups):
        name, context, batch = case.rsplit("-", 2)
        parts.append(f"## {name}, {context} tokens, {batch.removeprefix('b')} request{'s' if batch != 'b1' else ''}")
        for (of, machine, commit), titles in groups.items():
            if of != case:
                continue

            def value(method: str, metric: str, place: Any = (titles[0], machine, commit)) -> float | None:
                return values.get((place[0], method, metric, *place[1:]))

            dense = [v for m in ("dense", "transformers", "transformers_compiled") if (v := value(m, "loop_ms"))
                     if value("dense", "loop_ms")]
            shown = [x for x in METRICS if any(value(m, x) is not None for m in TOKENS)]
            said = {m: name.replace("3.1 %", "1 %") if budgets.get((titles[0], m, machine, commit)) == 0.01 else name
                    for m, name in TOKENS.items()}
            lines = [[said[m], *(number(value(m, x), 2) for x in shown),
                      f"{min(dense) / v:.2f} ×" if dense and (v := value(m, "loop_ms")) else "–"]
                     for m in TOKENS if value(m, "loop_ms") is not None]
            prefill = value("dense", "prefill_s")
            origin = f"{card({'machine': machine, 'commit': commit}).replace('one ', '')}."
            parts += [origin + (f" Prefill {prefill:.2f} s." if prefill else ""),
                      markdown(["method", *(METRICS[x] for x in shown), "ratio"], lines)]
    return "\n\n".join(parts) + "\n"


def tokens(rows: Rows) -> Drawing:
    """Milliseconds a token by case, a bar a method, of the run that has most cases."""
    run = max(runs([r for r in rows if r["metric"] == "loop_ms"]), key=lambda r: len({x["case"] for x in r}))
    cases = list(dict.fromkeys(r["case"] for r in run))
    methods = [m for m in TOKENS if any(r["method"] == m for r in run)]
    few = {r["method"] for r in run if r.get("budget") == 0.01}
    colours = dict(zip(TOKENS, ("#7f7f7f", "#D55E00", "#E69F00", "#CC79A7", "#882255", "#117733", "#56B4E9", "#0072B2"),
                       strict=True))
    figure, axes = canvas()
    wide = 0.8 / len(methods)
    for i, method in enumerate(methods):
        found = [(cases.index(r["case"]) + wide * (i - (len(methods) - 1) / 2), r["value"]) for r in run
                 if r["method"] == method]
        axes.bar([x for x, _ in found], [y for _, y in found], wide, color=colours[method],
                 label=TOKENS[method].replace("`", "").replace("3.1 %", "1 %" if method in few else "3.1 %"))
    axes.set_xticks(range(len(cases)), [
        "{}\n{}\n{}".format(name, context, f"{batch[1:]} request{'s' * (batch != 'b1')}")
        for name, context, batch in (c.rsplit("-", 2) for c in cases)], fontsize=8)
    axes.set_ylabel("a token [ms]")
    axes.legend(fontsize=8, frameon=False, labelcolor=INK, ncols=4, loc="lower left", bbox_to_anchor=(0.0, 1.0))
    return drawn(figure)
