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
            "Microseconds a step, bf16, d = 128, C = 1024, ℓ = 32, hidden 1024, sink 1, tail 2047, CUDA graphs over rotated buffers. "
            "`floor` counts the bytes of the chosen keys and values, the dense part and the router's weights at "
            "4.3 TB/s; the ratio is of the complete step to the faster of the two dense peers.\n\n"
            + markdown(["shape", *methods, "faster"], table) + "\n")


if __name__ == "__main__":
    (RESULTS / "decode.md").write_text(decode(), encoding="utf-8")
    print(decode())
