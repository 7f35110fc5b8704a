"""Draw docs/results/*.md from the rows beside them: `python benchmarks/tables.py`. No figure is ever typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"


def load(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def decode() -> str:
    """Microseconds a step by shape, and how many times faster than the best dense peer."""
    rows = load("decode")
    values = {(r["case"], r["method"]): r["value"] for r in rows}
    cases = list(dict.fromkeys(r["case"] for r in rows))
    methods = ["floor", "route_only", "attention_only", "sparse", "sparse_mean_key", "sdpa_flash", "sdpa_cudnn"]
    table = []
    for case in cases:
        cells = [f"{values[case, m]:.1f}" if (case, m) in values else "–" for m in methods]
        dense = [values[case, m] for m in ("sdpa_flash", "sdpa_cudnn") if (case, m) in values]
        ratio = f"{min(dense) / values[case, 'sparse']:.1f} ×" if dense and (case, "sparse") in values else "–"
        table.append([case, *cells, ratio])
    origin = rows[0]
    return (f"# Decode step on a GPU\n\n{origin['machine']}; `{origin['command']}` at {origin['commit']}. "
            "Microseconds a step, bf16, d = 128, C = 1024, ℓ = 32, hidden 1024, sink 1, tail 2047, CUDA graphs over "
            "rotated buffers. `floor` counts the bytes of the chosen keys and values, the dense part and the router's "
            "weights at 4.3 TB/s; the ratio is of the complete step to the faster of the two dense peers.\n\n"
            + markdown(["shape", *methods, "faster"], table) + "\n")


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
        f"{origin['machine']}; `{origin['command']}` at {origin['commit']}."
        + (f" Options: {origin['options']}." if "options" in origin else "") + "\n",
        "SmolLM2-135M at 8192 tokens, layers 1, 6, 11, 16, 21, 26, queries past 4096, anchors 4 + 16; trained on the "
        "first 80 % of the text, measured on its last 20 % and, out of domain (`ood:`), on Python's documentation. "
        "Error: relative L2 of a head's output against full attention, by what is read exactly (rows) and what stands "
        "for the keys that are not read (columns). Mass: share of the mid region's attention that is read. Routers and "
        "oracles share buckets. φ is calibrated and gated per head on training text."
        + (" `router` is the trained router that its own validation windows call the best."
           if ("router@0.05", "none", "rel_err") in values else "")
        + (f" Estimators are as large as φ's cache ({reads['phi_gated']:.0f} tokens), but for identity softmax, whose "
           "map fixes twice the features, and the last column; maps without a scale of their own are shifted on "
           "training text." if "phi_gated" in reads else "") + "\n"]
    for prefix, title in (("", "Held-out text"), ("ood:", "Out of domain")):
        cases = [c for c in dict.fromkeys(r["case"] for r in quality) if (c, "none", "rel_err") in values
                 and c.startswith("ood:") == bool(prefix)]
        table = [[c, _cell(values, c, "none", "mass_share"), *(_cell(values, c, m, "rel_err") for m in methods)]
                 for c in cases]
        parts.append(f"## {title}\n\n" + markdown(["read exactly", "mass", *(METHODS[m] for m in methods)], table)
                     + "\n")
    metrics = list(dict.fromkeys(r["metric"] for r in quality if r["case"] == "calibration"))
    if metrics:
        table = [[p + "calibration", *(_cell(values, p + "calibration", "phi", m) for m in metrics)]
                 for p in ("", "ood:")]
        parts.append("## Calibration of φ\n\nQuantiles of `ŝ − s` over the mid keys [nats], its mean under the true "
                     "attention, and `Σŵ / Σw`; means over heads.\n\n" + markdown(["", *metrics], table) + "\n")
    times = [r for r in rows if r["metric"] == "seconds"]
    if times:
        table = [[r["case"], f"{r['value']:.1f}", r["options"]] for r in times]
        parts.append(f"## Time of a layer\n\n{times[0]['machine']}; `{times[0]['command']}` at {times[0]['commit']}. "
                     "One layer of an 8B-shaped model (8 KV heads, 32 query heads, d = 128), one prompt of synthetic "
                     "keys, the whole command: reading, training, card, artifact.\n\n"
                     + markdown(["", "seconds", "options"], table) + "\n")
    return "\n".join(parts)


def _cell(values: dict[tuple[str, str, str], float], *key: str) -> str:
    return f"{values[key]:.3f}" if key in values else "–"


def partitions() -> str:
    """Mass share that an oracle and the mean key reach, by partition, length, tail and number of buckets."""
    rows = load("partitions")
    values = {(r["length"], r["partition"], r["buckets"], r["tail"], r["method"], r["metric"]): r["value"]
              for r in rows}
    lengths, tails = (sorted({r[k] for r in rows if r["tail"]}) for k in ("length", "tail"))
    counts = sorted({r["buckets"] for r in rows} - {0})
    curves = [r for r in rows if r["metric"] == "mass_share@0.01" and r["partition"] != "topk"]
    middle = curves[0]["buckets"]
    names = list(dict.fromkeys(r["partition"] for r in rows if r["partition"] != "topk"))
    base = [n for n in names if any(r["partition"] == n for r in curves)]

    def pair(length: int, name: str, buckets: int, tail: int, metric: str = "mass_share@0.05") -> str:
        found = [values.get((length, name, buckets, tail, m, metric)) for m in ("oracle", "mean_key")]
        return "–" if found[0] is None else " / ".join(f"{v:.2f}" for v in found)

    def table(wanted: list[str], buckets: int) -> str:
        lines = []
        for length in lengths:
            exact = [f"{values[length, 'topk', 0, t, 'topk', 'mass_share@0.05']:.2f}"
                     if (length, "topk", 0, t, "topk", "mass_share@0.05") in values else "–" for t in tails]
            lines.append([f"{length}: exact top-k", *exact, "–"])
            for n in wanted:
                lines.append([f"{length}: {n}", *(pair(length, n, buckets, t) for t in tails),
                              _ratio(values.get((length, n, buckets, 0, "none", "imbalance")))])
        return markdown(["", *(f"tail {t}" for t in tails), "imbalance"], lines)

    origin = rows[0]
    by_count = markdown(["", *(f"C = {c}" for c in counts)],
                        [[f"{length}: {n}", *(pair(length, n, c, tails[0]) for c in counts)]
                         for length in lengths for n in base])
    metrics = sorted({r["metric"] for r in curves} | {r["metric"] for r in rows if r["metric"].startswith("mass_")})
    curve = markdown(["", *(f"{float(m.split('@')[1]):.0%}" for m in metrics)],
                     [[f"{length}: {n}", *(pair(length, n, middle, tails[0], m) for m in metrics)]
                      for length in lengths for n in base])
    return (f"# Partitions: where the order turns\n\n{origin['machine']}; `{origin['command']}` at "
            f"{origin['commit']}.\n\nSmolLM2-135M, past 8192 tokens with yarn; share of the mid region's attention "
            "mass in the buckets that make up 5 % of the context: chosen by an oracle / by the untrained mean key. "
            "Buckets are found on the first 80 % of the text and judged on its last 20 %. `pre`: keys without RoPE; "
            "`rot`: with RoPE; `own`: the request's own keys with RoPE; `segmentsS`: content buckets (without RoPE) "
            "within S segments of the positions. Imbalance: `C·Σ share²`.\n\n"
            f"## By tail, C = {middle}\n\n{table(base, middle)}\n\n"
            f"## By number of buckets, tail {tails[0]}\n\n{by_count}\n\n"
            f"## By budget, C = {middle}, tail {tails[0]}\n\n{curve}\n\n"
            f"## What might raise the ceiling, C = {middle}\n\n"
            "`centred`: the mean key taken off first; `balanced`: a bias per bucket evens the sizes on training text; "
            "`split`: buckets above twice the mean size cut into runs of positions; `weighted`: keys drawn for k-means "
            f"by the attention they receive.\n\n{table([n for n in names if n not in base], middle)}\n")


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    for name, draw in (("decode", decode), ("training", training), ("partitions", partitions)):
        if (RESULTS / f"{name}.json").is_file():
            (RESULTS / f"{name}.md").write_text(draw(), encoding="utf-8")
