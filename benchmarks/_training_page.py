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


def options(row: dict[str, Any]) -> str:
    """A table of a row's options (`phi: a=1 b=2; router: …; length=8192`), a line a command."""
    lines = []
    for part in row["options"].split("; "):
        command, apart, those = part.rpartition(": ")
        lines += [(f"`train-{command}`" if apart else "capture", f"`{o.replace('=', ' = ')}`") for o in those.split()]
    return words(("of", "option"), *lines)


def terms(methods: Sequence[str], same: bool, size: float) -> list[tuple[str, str]]:
    """The words of the page's tables, of the estimates that they have. same: whether gates change nothing; size: of
    φ's cache [tokens]."""
    reads = [("mass", "share of the mid region's attention that is read"),
             ("buckets", "of the router, scored by the means of the request's own keys"),
             ("best buckets", "those with the most attention: an oracle"),
             ("nearest buckets", "those whose trained centroids are nearest to the query"),
             ("sketch", "its second stage, on the artifact's own basis"),
             ("exact top-k, group", "one list a group of heads")]
    estimates = {"phi_gated": "calibrated and gated a head on training text"
                 + (" (with all heads on the same to three digits)" if same else ""),
                 "centroid": "unread keys weigh what the mean key of their bucket weighs; as many buckets as φ's cache "
                             f"has tokens, {size:.0f}",
                 "moments": "the same, and half the variance of the scores in the bucket",
                 "sampling": "half of the reads choose by mean keys where to look, half are drawn there",
                 "prf": "positive random features (FAVOR+), orthogonal",
                 "hedgehog": "softmax of the plain query and key: twice φ's features",
                 "centroid_256": "several times φ's bytes"}
    return reads + [(METHODS[m], estimates[m]) for m in methods if m in estimates]


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
        words(("term", "what it is"), *terms(methods, same, reads["phi_gated"])),
        "Trained on the first 80 % of a text. Measured on its last 20 % and, out of domain, on Python's documentation. "
        "Anchors are 4 + 16 tokens. Queries lie past token 4096. Routers and oracles share 4096 buckets of two keys "
        "each. Buckets this fine show what a partition can reach, not what it costs.",
        "Options:", options(one)]
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
              "## Time of a layer", f"Measured on {card(times[0])}: one layer of the 8B shape, one prompt of synthetic "
              "keys. It is the time of the whole command: reading, training, card, artifact. These are no default "
              "settings. The default trains no query model, and has smaller steps of φ.",
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
TEXTS = {"sotu": "addresses", "embedded": "language reference"}
"""What sketch.json calls a text, and what it is."""
CODES = {"router": "buckets alone", "fixed, 10%": "the artifact's basis, codes of a tenth", "fixed, all": "… all codes",
         "fitted, 10%": "the request's basis, codes of a tenth", "fitted, all": "… all codes"}
"""What it calls what reads, and what it is; all beside exact top-k."""


WANTED, APART = (0.965, 0.97, 0.98), 0.01
"""Of exact top-k's mass at these budgets, and what the artifact's basis may lose against the request's."""


def by_model(rows: Rows) -> dict[str, dict[tuple[str, str, str], dict[str, Any]]]:
    """The rows of every model, by text, method and metric."""
    found: dict[str, dict[tuple[str, str, str], dict[str, Any]]] = {}
    for r in rows:
        found.setdefault(r["model"], {})[r["text"], r["method"], r["metric"]] = r
    return found


def sketch(rows: Rows) -> str:
    """docs/results/sketch.md."""
    one = rows[0]
    parts = [
        "# What do codes keep?",
        "Share of exact top-k's attention mass that sketches read on held-out text, when 1, 2 and 5 % of the context "
        f"are read. Exact top-k reads one list a group of heads. {one['machine'].partition(',')[0]}, commit "
        f"{' and '.join(dict.fromkeys(r['commit'] for r in rows))}.",
        "![Mass read, by basis and candidates](sketch.png)",
        words(("here", "what it is"),
              ("addresses, language reference", "the last fifth of the addresses to Congress; Python's manual"),
              ("buckets alone", "the best buckets of the request are read (`selector=\"router\"`)"),
              ("the artifact's basis", "codes depend on the key alone (`fit=\"fixed\"`, the default)"),
              ("the request's basis", "codes are fitted to each request's keys and last queries (`fit=\"fitted\"`)"),
              ("codes of a tenth", "those of the best buckets, a tenth of the context (the default of long contexts)"))]
    for model, found in by_model(rows).items():
        some = next(iter(found.values()))
        texts = [t for t in TEXTS if (t, "topk", f"mass_share@{BUDGETS[0]}") in found]
        header = ["read by", *(f"{TEXTS[t]}: 1 %" if i == 0 else f"{float(b) * 100:g} %"
                               for t in texts for i, b in enumerate(BUDGETS))]
        layers = ", ".join(map(str, some["layers"]))
        measured = [[TEXTS[t], f"{r['windows']}", f"{r['length']:,}", f"{r['requests']}"]
                    for t in texts for r in [found[t, "topk", f"mass_share@{BUDGETS[0]}"]]]
        parts += [f"## {model}", f"Trained on {some['trained']}. A code has {some['bytes']} bytes, {some['wide']} of "
                  f"its channels 8 bits. Layers: {layers}. Measured on:",
                  markdown(["text", "windows", "length [tokens]", "requests"], measured), "Share of the mass:",
                  markdown(header, [[name, *(f"{found[t, m, f'mass_share@{b}']['value']:.3f}"
                                             for t in texts for b in BUDGETS)] for m, name in CODES.items()])]
    parts.append("In points of RULER: [quality](quality.md). Other sizes of a code, and what was tried and left out: "
                 "[the log](../log/sketches.md).")
    return "\n\n".join(parts) + "\n"


def masses(rows: Rows) -> list[list[str]]:
    """A line a target of mass that a model misses: target, model, what was found at 1, 2 and 5 % (the least of all
    texts)."""
    lines: list[list[str]] = []

    def line(target: str, model: str, values: list[float]) -> None:
        lines.append([target, model, f"[{', '.join(f'{v:.3f}' for v in values)}](sketch.md)"])

    for model, found in by_model(rows).items():
        values = {m: [[r["value"] for (_, method, metric), r in found.items()
                       if (method, metric) == (m, f"mass_share@{b}")] for b in BUDGETS] for m in CODES}
        for share, words_of in (("10%", "codes of a tenth"), ("all", "all codes")):
            of = {fit: values[f"{fit}, {share}"] for fit in ("fixed", "fitted")}
            for fit, known in of.items():
                least = [min(v) for v in known]
                if any(round(v, 3) < wanted for v, wanted in zip(least, WANTED, strict=True)):
                    line(f"{', '.join(map(str, WANTED))} of exact top-k's mass at 1, 2, 5 %: {fit} basis, {words_of}",
                         model, least)
            apart = [max(b - a for a, b in zip(fixed, fitted, strict=True)) for fixed, fitted in zip(*of.values(),
                                                                                                  strict=True)]
            if any(round(v, 3) > APART for v in apart):
                line(f"fixed basis at most {APART} below fitted basis at 1, 2, 5 %: {words_of}", model, apart)
        last = min(values["fitted, 10%"][-1])
        if round(last, 3) < 0.99:
            line("0.99 of exact top-k's mass at 5 %: fitted basis, codes of a tenth", model, [last])
    return lines


def sketch_bars(rows: Rows) -> Drawing:
    """Mass read at 1 % of the context, by model and what reads; the mean of the texts."""
    figure, axes = canvas()
    models = by_model(rows)
    for i, (model, found) in enumerate(models.items()):
        values = [[r["value"] for (_, method, metric), r in found.items() if (method, metric) == (m, "mass_share@0.01")]
                  for m in CODES]
        axes.bar([x + 0.38 * (i - (len(models) - 1) / 2) for x in range(len(CODES))],
                 [sum(v) / len(v) for v in values], 0.36, color=("#0072B2", "#D55E00")[i], label=model)
    axes.set_xticks(range(len(CODES)), ["buckets", "fixed,\na tenth", "fixed,\nall codes", "fitted,\na tenth",
                                        "fitted,\nall codes"], fontsize=8)
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
        axes.barh([x + 0.38 * (i - 0.5) for x in range(len(cases))], [values[c, method] for c in cases], 0.36,
                  color=colour, label=name)
    axes.set_xscale("log")
    axes.set_yticks(range(len(cases)), [c.replace(" 8 layers", ", 8 layers,") for c in cases], fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color="#8888", linewidth=0.5)
    axes.set_xlabel("seconds")
    legend(axes)
    return drawn(figure)
