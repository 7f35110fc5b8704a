"""docs/results/training.md, sketch.md and the figure of capture.md, from the rows beside them: errors of routers,
feature maps and other estimators on a small model, and what each part of a sketch brings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks._first_page import card
from benchmarks._speed_page import words
from sparsekv.evaluation.canvas import Drawing, canvas, drawn, legend
from sparsekv.evaluation.tables import markdown

Rows = Sequence[dict[str, Any]]

METHODS = {
    "none": "nothing", "phi_gated": "φ", "phi": "φ, all heads on", "centroid": "bucket centroids",
    "moments": "bucket moments", "sampling": "importance sampling", "sampling_uniform": "uniform sampling",
    "prf": "random features", "hedgehog": "identity softmax", "centroid_256": "256 centroids",
}
SHOWN = {"none": "#7f7f7f", "centroid": "#56B4E9", "phi_gated": "#882255"}
"""What the figure has, and its colours."""
READ = {"sink_tail": "sink + tail", "topk": "exact top-k", "topk_group": "exact top-k, group", "router": "buckets",
        "router_mean_key": "buckets by means", "router_mlp": "buckets by a query model", "oracle": "best buckets",
        "kmeans": "nearest buckets"}
"""What the rows call what is read, and what it is."""
READS = {"sink_tail": "sink + tail", "topk@0.01": "exact top-k 1 %", "topk@0.05": "exact top-k 5 %",
         "router@0.05": "buckets 5 %"}


def cell(values: dict[Any, float], *key: Any) -> str:
    return f"{values[key]:.3f}" if key in values else "–"


def in_words(case: str) -> str:
    """`topk_group@0.01`: what is read exactly, and its budget."""
    name, _, budget = case.partition("@")
    return READ.get(name, name) + (f" {float(budget) * 100:g} %" if budget else "")


def page(rows: Rows) -> str:
    """docs/results/training.md."""
    quality = [r for r in rows if r["metric"] != "seconds"]
    values = {(r["case"], r["method"], r["metric"]): r["value"] for r in rows}
    reads = {r["method"]: r["tokens"] for r in quality if "tokens" in r}
    methods = [m for m in METHODS if any(r["method"] == m and r["metric"] == "rel_err" for r in quality)]
    same = all(cell(values, c, "phi", "rel_err") == cell(values, c, "phi_gated", "rel_err")
               for c in dict.fromkeys(r["case"] for r in quality))
    if same:
        methods.remove("phi")
    one = quality[0]
    parts = [
        "# How near do learned maps come, against other estimates?",
        f"SmolLM2-135M at 8192 tokens, six layers, {card(one)}. The error is the relative L2 distance of a head's "
        "output to full attention's. A line is what is read exactly; a column is what stands for the rest.",
        "![Error by what is read and what stands for the rest](training.png)",
        words(("term", "what it is"),
              ("mass", "share of the mid region's attention that is read"),
              ("buckets", "of the router, scored by the means of the request's own keys"),
              ("best buckets", "those with the most attention: an oracle"),
              ("nearest buckets", "those whose trained centroids are nearest to the query"),
              ("sketch", "its second stage, on the artifact's own basis"),
              ("exact top-k, group", "one list a group of heads"),
              ("φ", "calibrated and gated a head on training text"
               + (" (with all heads on the same to three digits)" if same else "")),
              ("bucket centroids", "unread keys weigh what the mean key of their bucket weighs; as many buckets as φ's "
               f"cache has tokens, {reads['phi_gated']:.0f}"),
              ("bucket moments", "the same, and half the variance of the scores in the bucket"),
              ("importance sampling", "half of the reads choose by mean keys where to look, half are drawn there"),
              ("random features", "positive random features (FAVOR+), orthogonal"),
              ("identity softmax", "softmax of the plain query and key: twice φ's features"),
              ("256 centroids", "several times φ's bytes")),
        "Trained on the first 80 % of a text. Measured on its last 20 % and, out of domain, on Python's documentation. "
        "Anchors are 4 + 16 tokens, queries lie past 4096. Routers and oracles share 4096 buckets, two keys each: "
        "buckets this fine show what a partition can reach, not what it costs.",
        f"Options: {one['options']}."]
    for prefix, title in (("", "Held-out text"), ("ood:", "Out of domain")):
        cases = [c for c in dict.fromkeys(r["case"] for r in quality) if (c, "none", "rel_err") in values
                 and c.startswith("ood:") == bool(prefix)]
        table = [[in_words(c.removeprefix("ood:")), cell(values, c, "none", "mass_share"),
                  *(cell(values, c, m, "rel_err") for m in methods)] for c in cases]
        parts += [f"## {title}", markdown(["read exactly", "mass", *(METHODS[m] for m in methods)], table)]
    metrics = list(dict.fromkeys(r["metric"] for r in quality if r["case"] == "calibration"))
    table = [[p + "calibration", *(cell(values, p + "calibration", "phi", m) for m in metrics)] for p in ("", "ood:")]
    times = [r for r in rows if r["metric"] == "seconds"]
    parts += ["## Calibration of φ", "Quantiles of `ŝ − s` over the mid keys [nats], its mean under the true "
              "attention, and `Σŵ / Σw`; means over heads.", markdown(["", *metrics], table),
              "## Time of a layer", f"{card(times[0])}. One layer of the 8B shape (8 KV heads, 32 query heads of 128), "
              "one prompt of synthetic keys, the whole command: reading, training, card, artifact. These are no "
              "default settings: the default trains no query model, and smaller steps of φ.",
              markdown(["", "seconds", "options"], [[r["case"], f"{r['value']:.1f}", r["options"]] for r in times])]
    return "\n\n".join(parts) + "\n"


def bars(rows: Rows) -> Drawing:
    """The error of what is read, with nothing, centroids and φ for the rest."""
    values = {(r["case"], r["method"]): r["value"] for r in rows if r["metric"] == "rel_err"}
    cases = [c for c in READS if (c, "none") in values]
    figure, axes = canvas()
    for i, (method, colour) in enumerate(SHOWN.items()):
        axes.bar([x + 0.26 * (i - 1) for x in range(len(cases))], [values[c, method] for c in cases], 0.24,
                 color=colour, label=f"{METHODS[method]} for the rest")
    axes.set_xticks(range(len(cases)), [READS[c] for c in cases])
    axes.set_ylabel("relative error of the attention output")
    legend(axes)
    return drawn(figure)


BUDGETS = ("0.01", "0.02", "0.05")


def sketch(rows: Rows) -> str:
    """docs/results/sketch.md."""
    texts = list(dict.fromkeys(r["case"] for r in rows))
    values = {(r["case"], r["method"], r["metric"]): r["value"] for r in rows}
    one = rows[0]
    names = {t: "UUIDs" if t.startswith("uuid") else "language reference" for t in texts}
    header = ["read by", *(f"{names[t]}: {float(b) * 100:g} %" if i == 0 else f"{float(b) * 100:g} %"
                           for t in texts for i, b in enumerate(BUDGETS))]
    lines = [[method.replace("router", "buckets alone", 1) if method.startswith("router") else method,
              *(cell(values, t, method, f"mass_share@{b}") for t in texts for b in BUDGETS)]
             for method in dict.fromkeys(r["method"] for r in rows)]
    return "\n\n".join([
        "# What does each part of a sketch bring?",
        f"Share of exact top-k's attention mass (by group) that is read, by the share of the context that is read. "
        f"{one['machine'].partition(',')[0]}, two cores, commit {one['commit']}.",
        "![Mass read, by part](sketch.png)",
        words(("here", "what it is"),
              ("model", "SmolLM2-135M tuned to retrieve over 32k tokens, six layers"),
              ("trained on", "six windows of 4096 tokens of addresses"),
              ("measured on", "held-out windows of 8192 tokens: pairs of UUIDs, Python's language reference; two "
               "windows and two requests each"),
              ("buckets as trained", "they do not move to the request (`adapt` off)"),
              ("fixed, fitted", "whose basis the codes have: the artifact's, or the request's"),
              ("16 bytes, 2 of 8 bits", "size of a code, and how many of its channels have 8 bits, the others 4"),
              ("10%, 20%, all", "candidates, a share of the context")),
        markdown(header, lines),
        "The fixed basis finds less here: it was trained on windows half as long as the requests. 24 bytes bring two "
        "thirds of that back at 1 %. By default a code of this model has 16 bytes. What the parts bring in points of "
        "RULER: [quality](quality.md). What was tried and left out: [the log](../log/sketches.md).",
    ]) + "\n"


def sketch_bars(rows: Rows) -> Drawing:
    """Mass read at 1 % of the context, by part."""
    shown = ("router, buckets as trained", "router", "fixed, 16 bytes, 2 of 8 bits, 10%",
             "fixed, 24 bytes, 3 of 8 bits, 10%", "fitted, 16 bytes, 2 of 8 bits, 10%",
             "fitted, 16 bytes, 2 of 8 bits, all")
    names = ("buckets as trained", "buckets, moved", "fixed, 16 bytes", "fixed, 24 bytes", "fitted, 16 bytes",
             "fitted, all codes")
    values = {(r["case"], r["method"]): r["value"] for r in rows if r["metric"] == "mass_share@0.01"}
    figure, axes = canvas()
    for i, text in enumerate(dict.fromkeys(r["case"] for r in rows)):
        axes.bar([x + 0.38 * (i - 0.5) for x in range(len(shown))], [values[text, m] for m in shown], 0.36,
                 color=("#0072B2", "#D55E00")[i], label="UUIDs" if text.startswith("uuid") else "language reference")
    axes.set_xticks(range(len(shown)), names, fontsize=8)
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("share of top-k's mass read at 1 %")
    legend(axes)
    return drawn(figure)


def capture_bars(rows: Rows) -> Drawing:
    """Seconds of a prefill in chunks and of a capture, by case."""
    values = {(r["case"], r["method"]): r["value"] for r in rows if r["metric"] == "seconds"}
    cases = [c for c in dict.fromkeys(c for c, _ in values) if {(c, "prefill_chunked"), (c, "capture")} <= set(values)]
    figure, axes = canvas()
    for i, (method, name, colour) in enumerate((("prefill_chunked", "prefill in chunks", "#7f7f7f"),
                                                ("capture", "capture", "#0072B2"))):
        axes.bar([x + 0.38 * (i - 0.5) for x in range(len(cases))], [values[c, method] for c in cases], 0.36,
                 color=colour, label=name)
    axes.set_yscale("log")
    axes.set_xticks(range(len(cases)), [c.replace(" 8 layers", "\n8 layers,").replace("smollm2 ", "smollm2,\n")
                                        for c in cases], fontsize=8)
    axes.set_ylabel("seconds")
    legend(axes)
    return drawn(figure)
