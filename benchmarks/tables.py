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


def training() -> str:
    """Attention error and mass share by what is read, in and out of domain."""
    rows = load("training")
    values = {(r["case"], r["method"], r["metric"]): r["value"] for r in rows}
    cases = [c for c in dict.fromkeys(r["case"] for r in rows) if not c.startswith("ood:")]
    table = []
    for case in cases:
        cells = []
        for prefix in ("", "ood:"):
            for key in (("none", "rel_err"), ("phi_gated", "rel_err"), ("none", "mass_share")):
                value = values.get((prefix + case, *key))
                cells.append("–" if value is None else f"{value:.3f}")
        table.append([case, *cells])
    header = ["read exactly", "error", "error + φ", "mass share", "ood error", "ood error + φ", "ood mass share"]
    origin = rows[0]
    return ("# Trained routers and feature maps\n\n"
            f"{origin['machine']}; `{origin['command']}` at {origin['commit']}.\n\n"
            "SmolLM2-135M at 8192 tokens, layers 1, 6, 11, 16, 21, 26, queries past 4096, anchors 4 + 16; trained on "
            "the first 80 % of the text, measured on its last 20 % and, out of domain, on Python's documentation. "
            "Error: relative L2 of a head's output against full attention; mass share: of the mid region's attention. "
            "φ is calibrated and gated per head on training text. Routers and oracles share 2048 buckets of rotated "
            "keys and read 5 %.\n\n" + markdown(header, table) + "\n")


if __name__ == "__main__":
    for name, draw in (("decode", decode), ("training", training)):
        (RESULTS / f"{name}.md").write_text(draw(), encoding="utf-8")
