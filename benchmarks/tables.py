"""Draw docs/results/*.md from the rows beside them, tables of rows in README.md and in pages of docs/ (`tables`),
and the tables of methods in README.md and docs/runtime.md, which `python benchmarks/tables.py methods` draws alone. No
figure is ever typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, filled
from sparsekv.evaluation.tables import markdown

ROOT = RESULTS.parent.parent


def load(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def steps(rows: list[dict[str, Any]]) -> str:
    """Microseconds a step by shape, of one machine's rows, and how many times faster than the best dense peer."""
    values = {(r["case"], r["method"]): r["value"] for r in rows}
    methods = [m for m in ("floor", "route_only", "attention_only", "buckets_only", "sparse", "sparse_phi",
                           "sparse_mlp", "sparse_probes", "sparse_sketch", "sparse_sketch_tenth", "sparse_sketch_all",
                           "sparse_sketch_phi", "sdpa_flash", "sdpa_cudnn", "flashinfer", "flex")
               if any(r["method"] == m for r in rows)]
    peers = [m for m in methods if m.startswith("sdpa") or m in ("flashinfer", "flex")]

    def faster(case: str) -> str:
        dense = [values[case, m] for m in peers if (case, m) in values]
        return f"{min(dense) / values[case, 'sparse']:.1f} ×" if dense and (case, "sparse") in values else "–"

    return markdown(["shape", *methods, "faster"],
                    [[c, *(_cell(values, c, m, digits=1) for m in methods), faster(c)]
                     for c in dict.fromkeys(r["case"] for r in rows) if c[0].isdigit()])


def decode() -> str:
    """The steps on every machine, and what goes with them."""
    rows = load("decode")
    layer = [r for r in rows if r["case"] == "layer-128k"]
    parts = [
        "# Decode step on a GPU\n\nMicroseconds a "
        "step, bf16, d = 128, C = 1024, a budget of 32 buckets' tokens (3.125 % of the mid region), φ of the trained "
        "shape (r = 128, half centred, capped), sink 1, tail 2047, CUDA graphs over rotated buffers. `floor` counts "
        "the bytes of the chosen keys and values, the dense part and the bucket means at 4.3 TB/s; `sparse` is the "
        "complete step by mean-key scores and the budget rule, `sparse_phi` the same completed by φ, `sparse_mlp` by "
        "the paper's query model (hidden 1024) and the budget rule, `sparse_probes` by the query model and its best "
        "32 buckets, whole; `sparse_sketch` reads the best 1 % by the sketches of the best buckets' 10 %, or "
        "of all where those are fewer bytes (`_tenth`, `_all`: one whatever the length), "
        "`sparse_sketch_phi` the same completed; the ratio is of `sparse` to the fastest dense peer. Every row of "
        "decode.json has its commit and command.\n"]
    for machine in sorted({r["machine"] for r in rows}):
        own = [r for r in rows if r["machine"] == machine and r["case"][0].isdigit()]
        commits = ", ".join(dict.fromkeys(r["commit"] for r in own))
        parts.append(f"## {machine}, at {commits}\n\n{steps(own)}\n")
    parts += [
        "## Growth\n\n![time against length and probes](decode-growth.png)\n",
        f"## What a prefill of 128k tokens adds, one layer\n\n{layer[0]['machine']}, at {layer[0]['commit']}.\n\n"
        + markdown(["operation", "milliseconds"], [[r["method"], f"{r['value']:.2f}"] for r in layer]) + "\n"]
    return "\n".join(parts)


def generate() -> str:
    """Milliseconds a token by case and method, and what is paid before."""
    rows = load("generate")
    values = {(r["case"], r["method"], r["metric"]): r["value"] for r in rows}
    cases, methods = (list(dict.fromkeys(r[k] for r in rows)) for k in ("case", "method"))
    dense = [m for m in methods if not m.startswith("router")]

    def faster(case: str, method: str) -> str:
        peers = [values[case, m, "loop_ms"] for m in dense if (case, m, "loop_ms") in values]
        return f"{min(peers) / values[case, method, 'loop_ms']:.2f} ×" if (case, method, "loop_ms") in values else "–"

    metrics = ("loop_ms", "generate_ms", "first_s", "index_s", "capture_ms", "peak_gb")
    return "\n".join([
        f"# A token in a user's hands\n\n{rows[0]['machine']}; `{rows[0]['command']}` at {rows[0]['commit']}. Models "
        "with random weights, bf16. `loop_ms`: milliseconds a token by `attachment.generate` (transformers: a plain "
        "loop); `generate_ms`: by `model.generate`; both the median of the last 96 of 400 tokens (transformers: 24 of "
        "48). `first_s`: the tokens before, with index, compilation and capture; `index_s`: index and estimates alone; "
        "`capture_ms`: mean of the captures, the compiler's run in the first; the ratio is of `loop_ms` to the fastest "
        "method with full attention. Rows of transformers' eager steps, which the host bounds, are of the quietest "
        "run; every row of generate.json has its commit. Rows of φ are of kept features of the keys, which later "
        "commits do not keep. A case that names a card and a commit is of these. Methods that are left out found no "
        "memory (transformers copies the cache at 512k and in four rows of 128k) or were not run.\n",
        *(f"## {case}" + (f"\n\nPrefill {values[case, 'dense', 'prefill_s']:.2f} s."
                          if (case, "dense", "prefill_s") in values else "") + "\n\n" + markdown(
              ["method", *metrics, "faster"],
              [[m, *(_cell(values, case, m, x, digits=2) for x in metrics), faster(case, m)]
               for m in methods if (case, m, "loop_ms") in values]) + "\n"
          for case in cases)])


METHODS = {
    "none": "nothing", "phi_gated": "φ", "phi": "φ, all heads on", "centroid": "bucket centroids",
    "moments": "bucket moments", "sampling": "importance sampling", "sampling_uniform": "uniform sampling",
    "prf": "random features", "hedgehog": "identity softmax", "centroid_256": "256 centroids",
}


def training() -> str:
    """Attention error by what is read and what stands for the rest, in and out of domain; mass shares; time a layer."""
    rows = load("training")
    quality = [r for r in rows if r["metric"] != "seconds"]
    values = {(r["case"], r["method"], r["metric"]): r["value"] for r in rows}
    reads = {r["method"]: r["tokens"] for r in quality if "tokens" in r}
    methods = [m for m in METHODS if any(r["method"] == m and r["metric"] == "rel_err" for r in quality)]
    origin = quality[0]
    parts = [
        "# Trained routers and feature maps\n",
        f"{origin['machine']}; `{origin['command']}` at {origin['commit']}. Options: {origin['options']}.\n",
        "SmolLM2-135M at 8192 tokens, layers 1, 6, 11, 16, 21, 26, queries past 4096, anchors 4 + 16; trained on the "
        "first 80 % of the text, measured on its last 20 % and, out of domain (`ood:`), on Python's documentation. "
        "Error: relative L2 of a head's output against full attention, by what is read exactly (rows) and what stands "
        "for the keys that are not read (columns). Mass: share of the mid region's attention that is read. Routers and "
        "oracles share buckets. φ is calibrated and gated per head on training text. `router` is what `train-router` "
        "makes: buckets scored by the means of the request's own keys; `sketch` its second stage on the artifact's own "
        f"basis; `topk_group` exact top-k by group. Estimators are as large as φ's cache ({reads['phi_gated']:.0f} "
        "tokens), but for identity softmax, whose map fixes twice the features, and the last column; maps without a "
        "scale of their own are shifted on training text.\n"]
    for prefix, title in (("", "Held-out text"), ("ood:", "Out of domain")):
        cases = [c for c in dict.fromkeys(r["case"] for r in quality) if (c, "none", "rel_err") in values
                 and c.startswith("ood:") == bool(prefix)]
        table = [[c, _cell(values, c, "none", "mass_share"), *(_cell(values, c, m, "rel_err") for m in methods)]
                 for c in cases]
        parts.append(f"## {title}\n\n" + markdown(["read exactly", "mass", *(METHODS[m] for m in methods)], table)
                     + "\n")
    metrics = list(dict.fromkeys(r["metric"] for r in quality if r["case"] == "calibration"))
    table = [[p + "calibration", *(_cell(values, p + "calibration", "phi", m) for m in metrics)] for p in ("", "ood:")]
    parts.append("## Calibration of φ\n\nQuantiles of `ŝ − s` over the mid keys [nats], its mean under the true "
                 "attention, and `Σŵ / Σw`; means over heads.\n\n" + markdown(["", *metrics], table) + "\n")
    times = [r for r in rows if r["metric"] == "seconds"]
    table = [[r["case"], f"{r['value']:.1f}", r["options"]] for r in times]
    parts.append(f"## Time of a layer\n\n{times[0]['machine']}; `{times[0]['command']}` at {times[0]['commit']}. "
                 "One layer of an 8B-shaped model (8 KV heads, 32 query heads, d = 128), one prompt of synthetic "
                 "keys, the whole command: reading, training, card, artifact.\n\n"
                 + markdown(["", "seconds", "options"], table) + "\n")
    return "\n".join(parts)


def _cell(values: dict[Any, float], *key: Any, digits: int = 3) -> str:
    return f"{values[key]:.{digits}f}" if key in values else "–"


def quality() -> None:
    """The pages of RULER, and a figure of all systems a length."""
    from benchmarks.quality import figures, page

    for name, title in (("quality", "Quality on RULER"),
                        ("quality-rivals", "Quality on RULER, every system on the same prompts")):
        (RESULTS / f"{name}.md").write_text(page(load(name), title, name), encoding="utf-8")
    figures(load("quality-rivals"), RESULTS)


def real() -> str:
    """The page of real models, and a figure a model and length."""
    from benchmarks._real_page import figures, page

    figures(load("real"), RESULTS)
    return page(load("real"))


def phi() -> str:
    """The page of feature maps of a real model."""
    from benchmarks._phi_page import page

    return page(load("phi-training"), load("phi-forms"))


def tables() -> dict[str, dict[str, list[str]]]:
    """Tables that stand in other pages: page, and lines by the name of their markers (`_rows.fill`)."""
    from benchmarks import _phi_page, _real_page

    models, training, forms = load("real"), load("phi-training"), load("phi-forms")
    return {
        "README.md": {"real": _real_page.short(models), "real texts": _real_page.beyond(models)},
        "docs/evaluation.md": {"pairs": _real_page.pairs(models)},
        "docs/train.md": {"phi": _phi_page.short(training), "texts": _real_page.by_text(models),
                          "spent": _phi_page.spent(training)},
        "docs/training.md": {"forms": _phi_page.forms(forms)}}


def written(page: str) -> str:
    """A page of `tables` as the rows are now."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, lines in tables()[page].items():
        text = filled(text, lines, name)
    return text


if __name__ == "__main__":
    from benchmarks import _methods

    _methods.write()
    if sys.argv[1:] == ["methods"]:
        raise SystemExit
    quality()
    for name, draw in (("decode", decode), ("generate", generate), ("training", training), ("real", real),
                       ("phi", phi)):
        (RESULTS / f"{name}.md").write_text(draw(), encoding="utf-8")
    for page in tables():
        (ROOT / page).write_text(written(page), encoding="utf-8")
